package uplink_test

import (
	"strings"
	"testing"

	"github.com/tombolo-cni/tombolo/bridge/uplink"
	"github.com/tombolo-cni/tombolo/internal/nl"
	"github.com/tombolo-cni/tombolo/internal/nl/nltest"
	"github.com/tombolo-cni/tombolo/internal/nstest"
)

// test/vm/run.sh noipv6 has a kernel that is like this in truth. Without IPv6, too,
// nothing is to be lost while the NIC becomes a port.
func TestKernelWithoutIPv6HasDetoursToo(t *testing.T) {
	t.Parallel()
	l := newLAN(t)
	refusal, detours := nltest.NoIPv6(), 0
	look := func() {
		detours++
		if found := l.detour(t); found != "tombi tombo rule" && found != "tombo tombi rule" {
			t.Errorf("of the detour there is: %s", found)
		}
		if links := nstest.Run(t, l.host, "ip", "-d", "link"); strings.Count(links, "alias tombolo:1:uplink") != 2 {
			t.Errorf("not both ends have their alias:\n%s", links)
		}
	}
	within(t, l.host, func() error {
		conn, err := uplink.DialThrough(nil, func(tr nl.Transport) nl.Transport {
			return &atRule{nltest.NewFaulty(tr, refusal), look}
		})
		if err != nil {
			return err
		}
		defer conn.Close()
		_, err = conn.Take(t.Context(), toBridge(), new(memory))
		return err
	})
	// The bridge's, and that of either end.
	if got := refusal.Fired(); got != 3 || detours != 1 {
		t.Errorf("the kernel has refused %d requests, and seen %d detours, want 3 and 1", got, detours)
	}
	l.mustHaveNoDetour(t, "after the takeover")
}
