package network

import (
	"errors"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/ipam"
)

func TestReservationsAreGivenBackByTheRecordAlone(t *testing.T) {
	t.Parallel()
	state, own := t.TempDir(), t.TempDir()
	node, err := Open(t.Context(), &Config{StateDir: state})
	must.Succeed(t, err)
	for name, at := range map[string]struct{ set, dir string }{"the state's": {"", state + "/ipam"}, "a directory of its own": {own, own}, "none": {"spoilt", state + "/ipam"}} {
		ranges := []ipam.RangeSet{{Ranges: []ipam.Range{{Subnet: netip.MustParsePrefix("10.61.0.0/24")}}}}
		pool, err := ipam.NewHostLocal(&ipam.Config{Network: "pods", Dir: at.dir, Ranges: ranges})
		must.Succeed(t, err)
		owner := ipam.Owner{ContainerID: "c", IfName: "eth0"}
		given, err := pool.Add(t.Context(), owner)
		must.Succeed(t, err)
		reservation := filepath.Join(at.dir, "pods", given.Addresses[0].Prefix.Addr().String())
		must.Succeed(t, expect.Err(os.Stat(reservation)))
		back, err := node.allocator("pods", &Origin{Type: "host-local", Dir: at.set})
		must.Succeed(t, err)
		expect.Success(t, back.Del(t.Context(), owner, nil))
		if _, err := os.Stat(reservation); !os.IsNotExist(err) {
			t.Errorf("in %s: the reservation is left: %v", name, err)
		}
	}
}

func TestWhatHasNoReservationsAndWhatIsAnothersToGiveBack(t *testing.T) {
	t.Parallel()
	node, err := Open(t.Context(), &Config{StateDir: t.TempDir()})
	must.Succeed(t, err)
	for _, origin := range []*Origin{nil, {}, {Type: "static"}, {Type: "dhcp", Dir: "/leases"}} {
		if got, err := node.allocator("pods", origin); got != nil || err != nil {
			t.Errorf("%+v: %v, %v; want neither", origin, got, err)
		}
	}
	for kind, says := range map[string]string{"calico-ipam": `"calico-ipam"`, unnamed: "Config.Allocators"} {
		if _, err := node.allocator("pods", &Origin{Type: kind}); !errors.Is(err, ErrInvalid) || !strings.Contains(err.Error(), says) {
			t.Errorf("of %s: %v", kind, err)
		}
	}
}
