package nftnl

import (
	"math"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestSeenHoldsTheNewest(t *testing.T) {
	t.Parallel()
	var k Seen
	for i := range uint64(MaxSeen + 3) {
		k.Add(1, i)
		k.Add(1, 2) // which is looked at all the time
	}
	if _, got := k.All(); len(got) != MaxSeen || !k.Covers(1, 2) || k.Covers(1, 0) || !k.Covers(1, MaxSeen+2) {
		t.Errorf("%v", got)
	}
	if k.Covers(2, 2) {
		t.Error("another generation")
	}
	k.Follow(math.MaxUint32)
	if !k.Covers(1, 2) {
		t.Error("followed another generation")
	}
	k.Use(math.MaxUint32, []uint64{5})
	k.Follow(math.MaxUint32)
	generation, sums := k.All()
	if diff := cmp.Diff([]uint64{5}, sums); generation != 1 || diff != "" {
		t.Errorf("the kernel passes over 0: %d, %s", generation, diff)
	}
}
