package main

import (
	"net/netip"
	"testing"

	"github.com/tombolo-cni/tombolo/bridge/uplink"
	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
)

func TestVerdictOfAPlanIsOneLine(t *testing.T) {
	t.Parallel()
	u := uplink.Uplink{NIC: "eth0", Bridge: "br0"}
	for _, tt := range []struct {
		name, connection, want string
		steps                  uplink.Steps
	}{
		{"both families, and a warning", "192.0.2.1 1 2001:db8::2 22",
			"OK, but see the warnings (1): 192.0.2.2, 2001:db8::2 move to br0, your SSH session stays; undo: tombolo uplink restore eth0\n",
			uplink.Steps{Moves: []netip.Addr{nstest.Addr("192.0.2.2"), nstest.Addr("2001:db8::2")}, Warnings: []string{"x"}}},
		{"an SSH session by another NIC", "192.0.2.1 1 198.51.100.2 22",
			"OK: 192.0.2.2 moves to br0, connections stay; undo: tombolo uplink restore eth0\n",
			uplink.Steps{Moves: []netip.Addr{nstest.Addr("192.0.2.2")}}},
		{"no address", "", "OK: no address moves to br0, connections stay; undo: tombolo uplink restore eth0\n", uplink.Steps{}},
	} {
		expect.Equal(t, verdict(&tt.steps, u, tt.connection), tt.want, "%s", tt.name)
	}
}
