package nftnl

import (
	"math"
	"strings"
	"testing"

	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
)

func TestSeenHoldsTheNewest(t *testing.T) {
	t.Parallel()
	var k Verified
	for i := range uint64(MaxVerified + 3) {
		k.Add(1, i)
		k.Add(1, 2) // which is looked at all the time
	}
	expect.That(t, len(k.sums) == MaxVerified && k.Covers(1, 2) && !k.Covers(1, 0) && k.Covers(1, MaxVerified+2), "%v", k.sums)
	expect.That(t, !k.Covers(2, 2), "another generation")
	k.Follow(math.MaxUint32)
	expect.That(t, k.Covers(1, 2), "followed another generation")
	k.Use("4294967295 5")
	k.Follow(math.MaxUint32)
	expect.Equal(t, k.Text(), "1 5", "the kernel passes over 0")
}

func TestWhatWasSeenIsText(t *testing.T) {
	t.Parallel()
	most := strings.TrimPrefix(strings.Repeat(" ffffffffffffffff", MaxVerified), " ")
	for _, text := range []string{"1 0", "4294967295 0 1 ffffffffffffffff", "4294967295 " + most} {
		var k Verified
		k.Use(text)
		expect.Equal(t, k.Text(), text)
		expect.That(t, k.IsOn() && len(text) <= 146, "%q", text)
	}
	for _, text := range []string{"", " ", "x", "7", "-1 1", "4294967296 1", "1 ", "1  2", "1 x", "1 1 " + most, "1 10000000000000000"} {
		k := Verified{generation: 1, sums: []uint64{1}}
		k.Use(text)
		expect.That(t, k.Text() == "" && k.Generation() == nil && k.IsOn(), "%q: %q", text, k.Text())
	}
}

func FuzzSeen(f *testing.F) {
	f.Add("1 0 0")
	f.Fuzz(func(t *testing.T, text string) {
		var k, again Verified
		k.Use(text)
		again.Use(k.Text())
		expect.Equal(t, again.Text(), k.Text(), "%q", text)
	})
}
