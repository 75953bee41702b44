package bridge

import (
	"testing"

	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
)

// FuzzForwarding holds that no reply makes the decoder panic, nor say more than it was told, for what the kernel says of a family's configuration.
func FuzzForwarding(f *testing.F) {
	f.Add([]byte{})
	f.Fuzz(func(t *testing.T, b []byte) {
		on, _ := decodeForwarding(b)
		expect.That(t, !on || len(b) >= 12, "%x has no room for an attribute, and says that the host forwards", b)
	})
}
