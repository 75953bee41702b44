package ident

import "testing"

func TestRandomMACsAreForOneAndOurOwn(t *testing.T) {
	t.Parallel()
	seen := map[string]bool{}
	for range 1000 {
		mac := RandomMAC()
		if len(mac) != 6 || mac[0]&1 != 0 || mac[0]&2 == 0 {
			t.Fatalf("%v is no unicast MAC of the locally administered kind", mac)
		}
		seen[mac.String()] = true
	}
	if len(seen) != 1000 {
		t.Errorf("%d of 1000 differ", len(seen))
	}
}
