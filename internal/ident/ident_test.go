package ident_test

import (
	"testing"

	"github.com/tombolo-cni/tombolo/internal/ident"
	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
)

func TestHashStaysWhatItIs(t *testing.T) {
	t.Parallel()
	// One that changes orphans every attachment on every node that is upgraded.
	// printf "4:cbr0,6:abc123,4:eth0," | sha256sum | cut -c1-11
	got, want := ident.Hash("cbr0", "abc123", "eth0"), "835703a4997"
	expect.That(t, got == want, "Hash is %s, was %s", got, want)
}

func TestNamesThatRunTogetherHashApart(t *testing.T) {
	t.Parallel()
	seen := map[string][3]string{}
	for _, names := range [][3]string{{"ab", "c", "d"}, {"a", "bc", "d"}, {"a", "b", "cd"}, {"abc", "d", ""}, {"", "abc", "d"}, {"a,1:b", "c", "d"}} {
		h := ident.Hash(names[0], names[1], names[2])
		expect.Equal(t, len(h), ident.Digits, "%q: %q has not %d digits", names, h, ident.Digits)
		other, ok := seen[h]
		expect.That(t, !ok, "%q and %q are both %s", names, other, h)
		seen[h] = names
	}
}
