package ident

import (
	"testing"

	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
)

func TestIdentifiers(t *testing.T) {
	t.Parallel()
	for _, s := range []string{"a", "0", "Z", "a.b_c-d", "9e6...", "a-"} {
		expect.That(t, IsIdentifier(s), "%q is refused", s)
	}
	for _, s := range []string{"", ".", "-a", "_a", "a b", "a/b", "a\x00", "a\n", "ä", "aä", "a:b"} {
		expect.That(t, !IsIdentifier(s), "%q is accepted", s)
	}
}

func TestLinkNames(t *testing.T) {
	t.Parallel()
	for _, s := range []string{"e", "eth0", "fifteen-bytes-x", "a.b", "...", "ä"} {
		expect.That(t, IsLinkName(s), "%q is refused", s)
	}
	for _, s := range []string{"", ".", "..", "sixteen-bytes-xx", "a/b", "a:b", "a b", "a\tb", "a\n", "a\v", "a\f", "a\r", "a\x00", "br%d", "%", "100%"} {
		expect.That(t, !IsLinkName(s), "%q is accepted", s)
	}
}
