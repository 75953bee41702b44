package network

import (
	"net/netip"
	"testing"

	"github.com/tombolo-cni/tombolo/internal/state"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
)

// That it is refused where there is none, test/vm/run.sh noipv6 shows.
func TestIPv6IsRefusedOnlyWhereItIsAskedFor(t *testing.T) {
	t.Parallel()
	with6 := []netip.Prefix{nstest.Prefix("10.1.0.0/16"), nstest.Prefix("fd01::/64")}
	for name, tt := range map[string]struct {
		slaac   bool
		subnets []netip.Prefix
		asked   bool
	}{
		"IPv4":         {false, with6[:1], false},
		"no addresses": {false, nil, false},
		"both":         {false, with6, true},
		"slaac":        {true, nil, true},
	} {
		if err := refuseIPv6("pods", tt.slaac, tt.subnets); (err != nil) != (tt.asked && !nstest.HasIPv6()) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// A bridge that is made anew answers under the MAC that its pods have in their
// neighbour tables.
func TestBridgesMACIsTheSameForAnEpoch(t *testing.T) {
	t.Parallel()
	one := state.Epoch{Boot: "b", ID: "1"}.Token()
	mac := bridgeMAC(one, "cbr0")
	if len(mac) != 6 || mac[0]&3 != 2 {
		t.Errorf("%s is not a unicast MAC that is locally administered", mac)
	}
	if again := bridgeMAC(one, "cbr0"); again.String() != mac.String() {
		t.Errorf("%s, then %s", mac, again)
	}
	later := state.Epoch{Boot: "b", ID: "2"}.Token()
	for what, other := range map[string]string{"bridge": bridgeMAC(one, "br0").String(), "life": bridgeMAC(later, "cbr0").String()} {
		if other == mac.String() {
			t.Errorf("another %s has the same, %s", what, other)
		}
	}
}
