package nftnl

import (
	"math"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
)

func TestSeenHoldsTheNewest(t *testing.T) {
	t.Parallel()
	var k Seen
	for i := range uint64(MaxSeen + 3) {
		k.Add(1, i)
		k.Add(1, 2) // which is looked at all the time
	}
	_, got := k.All()
	expect.That(t, len(got) == MaxSeen && k.Covers(1, 2) && !k.Covers(1, 0) && k.Covers(1, MaxSeen+2), "%v", got)
	expect.That(t, !k.Covers(2, 2), "another generation")
	k.Follow(math.MaxUint32)
	expect.That(t, k.Covers(1, 2), "followed another generation")
	k.Use(math.MaxUint32, []uint64{5})
	k.Follow(math.MaxUint32)
	generation, sums := k.All()
	diff := cmp.Diff([]uint64{5}, sums)
	expect.That(t, generation == 1 && diff == "", "the kernel passes over 0: %d, %s", generation, diff)
}
