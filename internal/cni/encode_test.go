package cni

import (
	"encoding/json"
	"net"
	"testing"

	"github.com/containernetworking/cni/pkg/types"
	current "github.com/containernetworking/cni/pkg/types/100"
	"github.com/google/go-cmp/cmp"

	"github.com/tombolo-cni/tombolo/internal/testutil/must"
)

func TestResultsAreWrittenAsTheLibraryWritesThem(t *testing.T) {
	t.Parallel()
	one, two := 1, 254
	_, dst4, _ := net.ParseCIDR("10.0.0.0/8")
	_, dst6, _ := net.ParseCIDR("::/0")
	cases := map[string]*current.Result{
		"empty": {CNIVersion: "1.1.0"},
		"full": {
			CNIVersion: "1.1.0",
			Interfaces: []*current.Interface{
				{Name: "cbr0", Mac: "02:00:00:00:00:01", Mtu: 1450},
				{Name: "eth0", Mac: "02:00:00:00:00:02", Mtu: 1450, Sandbox: "/run/netns/a\"b\\c\x01é"},
				{Name: "vhost0", SocketPath: "/run/x.sock", PciID: "0000:00:1f.6"},
			},
			IPs: []*current.IPConfig{
				{Interface: &one, Address: net.IPNet{IP: net.IP{10, 0, 0, 5}, Mask: net.CIDRMask(16, 32)}, Gateway: net.IP{10, 0, 0, 1}},
				{Address: net.IPNet{IP: net.ParseIP("fd00::5"), Mask: net.CIDRMask(64, 128)}},
			},
			Routes: []*types.Route{
				{Dst: *dst4, GW: net.IP{10, 0, 0, 1}, MTU: 1300, AdvMSS: 1200, Priority: 5, Table: &two, Scope: &one},
				{Dst: *dst6},
			},
			DNS: types.DNS{Nameservers: []string{"10.0.0.2", "fd00::2"}, Domain: "example", Search: []string{"a", "b"}, Options: []string{"ndots:5"}},
		},
		"part of DNS": {CNIVersion: "1.0.0", DNS: types.DNS{Search: []string{"a"}}},
	}
	for name, r := range cases {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			want, err := json.Marshal(r)
			must.Succeed(t, err)
			got := encodeResult(r)
			if diff := cmp.Diff(decodeAny(t, want), decodeAny(t, got)); diff != "" {
				t.Errorf("(-library +ours):\n%s", diff)
			}
		})
	}
}

func decodeAny(t *testing.T, data []byte) (v any) {
	t.Helper()
	must.Succeed(t, json.Unmarshal(data, &v), "%s", data)
	return v
}
