package cni

import (
	"net/netip"
	"testing"

	"github.com/tombolo-cni/tombolo/internal/nstest"
)

func TestConfiguredIPv6IsFound(t *testing.T) {
	t.Parallel()
	for ipam, want := range map[string]string{
		`{}`: "",
		`{"type": "host-local", "subnet": "10.1.0.0/16"}`:                                              "",
		`{"type": "host-local", "subnet": "fd01::/64"}`:                                                "an address in fd01::/64",
		`{"type": "host-local", "ranges": [[{"subnet": "10.1.0.0/16"}], [{"subnet": "10.2.0.0/16"}]]}`: "",
		`{"type": "host-local", "ranges": [[{"subnet": "10.1.0.0/16"}], [{"subnet": "fd01::/64"}]]}`:   "an address in fd01::/64",
		`{"type": "static", "addresses": [{"address": "10.1.0.2/16"}]}`:                                "",
		`{"type": "static", "addresses": [{"address": "10.1.0.2/16"}, {"address": "fd01::2/64"}]}`:     "an address in fd01::/64",
		// Not for it to say.
		`{"type": "host-local", "subnet": "fd01::"}`: "",
		`{"type": "another", "ranges": "fd01::/64"}`: "",
		`[`: "",
	} {
		if got := configuredIPv6([]byte(`{"name": "net", "ipam": ` + ipam + `}`)); got != want {
			t.Errorf("%s: %q, want %q", ipam, got, want)
		}
	}
}

// That it is refused where there is none, test/vm/run.sh noipv6 shows.
func TestIPv6IsRefusedOnlyWhereItIsAskedFor(t *testing.T) {
	t.Parallel()
	with6 := []netip.Prefix{nstest.Prefix("10.1.0.0/16"), nstest.Prefix("fd01::/64")}
	var slaac network
	slaac.SLAAC = true
	for name, tt := range map[string]struct {
		network network
		asked   bool
	}{
		"IPv4":         {network{subnets: with6[:1]}, false},
		"no addresses": {network{}, false},
		"both":         {network{subnets: with6}, true},
		"slaac":        {slaac, true},
	} {
		if err := tt.network.refuseIPv6(); (err != nil) != (tt.asked && !nstest.HasIPv6()) {
			t.Errorf("%s: %v", name, err)
		}
	}
}
