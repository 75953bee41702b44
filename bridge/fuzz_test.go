package bridge

import (
	"testing"
)

// FuzzLink holds that no reply of the kernel, or of what takes itself for it,
// makes the decoder panic. The corpus has replies of a real kernel.
func FuzzLink(f *testing.F) {
	f.Add([]byte{})
	f.Add(make([]byte, 16))
	f.Fuzz(func(t *testing.T, b []byte) {
		var l Link
		if err := l.decode(b); err != nil {
			return
		}
		if len(l.Name) > len(b) || len(l.Alias) > len(b) {
			t.Errorf("more came out than went in: %+v", l)
		}
		var pod podLink
		if err := pod.decode(b); err == nil && len(pod.ipv4)+len(pod.ipv6) > len(b) {
			t.Errorf("more came out than went in: %+v", pod)
		}
		_, _ = pod.ipv6.at(0)
	})
}

// FuzzForwarding holds the same for what the kernel says of a family's configuration.
func FuzzForwarding(f *testing.F) {
	f.Add([]byte{})
	f.Fuzz(func(t *testing.T, b []byte) {
		if on, _ := decodeForwarding(b); on && len(b) < 12 {
			t.Errorf("%x has no room for an attribute, and says that the host forwards", b)
		}
	})
}
