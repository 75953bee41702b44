package reclaim

import (
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/tombolo-cni/tombolo/ipam"
	"github.com/tombolo-cni/tombolo/network"
)

func TestReservationsAreGivenBackByTheRecordAlone(t *testing.T) {
	t.Parallel()
	state, own := t.TempDir(), t.TempDir()
	for name, at := range map[string]struct{ set, dir string }{"the state's": {"", state + "/ipam"}, "a directory of its own": {own, own}} {
		ranges := []ipam.RangeSet{{Ranges: []ipam.Range{{Subnet: netip.MustParsePrefix("10.61.0.0/24")}}}}
		pool, err := ipam.NewHostLocal(&ipam.Config{Network: "pods", Dir: at.dir, Ranges: ranges})
		if err != nil {
			t.Fatal(err)
		}
		owner := ipam.Owner{ContainerID: "c", IfName: "eth0"}
		given, err := pool.Add(t.Context(), owner)
		if err != nil {
			t.Fatal(err)
		}
		reservation := filepath.Join(at.dir, "pods", given.Addresses[0].Prefix.Addr().String())
		if _, err := os.Stat(reservation); err != nil {
			t.Fatal(err)
		}
		back, err := Allocators(state)("pods", &network.Origin{Type: "host-local", Dir: at.set})
		if err != nil {
			t.Fatal(err)
		}
		if err := back.Del(t.Context(), owner, nil); err != nil {
			t.Error(err)
		}
		if _, err := os.Stat(reservation); !os.IsNotExist(err) {
			t.Errorf("in %s: the reservation is left: %v", name, err)
		}
	}
}

func TestWhatHasNoReservationsAndWhatIsAnothersToGiveBack(t *testing.T) {
	t.Parallel()
	of := Allocators(t.TempDir())
	for _, origin := range []*network.Origin{nil, {}, {Type: "static"}, {Type: "dhcp", Dir: "/leases"}} {
		if got, err := of("pods", origin); got != nil || err != nil {
			t.Errorf("%+v: %v, %v; want neither", origin, got, err)
		}
	}
	if _, err := of("pods", &network.Origin{Type: "calico-ipam"}); err == nil || !strings.Contains(err.Error(), `"calico-ipam"`) {
		t.Errorf("of a plugin's: %v", err)
	}
}
