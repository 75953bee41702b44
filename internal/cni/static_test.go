package cni

import (
	"context"
	"encoding/json"
	"testing"

	current "github.com/containernetworking/cni/pkg/types/100"
	"github.com/google/go-cmp/cmp"

	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/ipam"
)

func TestStaticGivesWhatIsNamed(t *testing.T) {
	t.Parallel()
	const (
		head = `{"cniVersion":"1.1.0","ipam":{"type":"static","addresses":[{"address":"fd00::5/64","gateway":"fd00::1"},{"address":"10.1.0.5/24","gateway":"10.1.0.1"}]}`
		both = `"ips":[{"address":"10.1.0.5/24","gateway":"10.1.0.1"},{"address":"fd00::5/64","gateway":"fd00::1"}]`
	)
	tests := map[string]struct{ conf, args, want string }{
		"config":                 {head + `}`, "", both},
		"CNI_ARGS adds":          {head + `}`, "IP=10.2.0.5/24, 10.3.0.5/16;GATEWAY=10.2.0.1,fd00::9;IgnoreUnknown=1;X=1", `"ips":[{"address":"10.1.0.5/24","gateway":"10.1.0.1"},{"address":"10.2.0.5/24","gateway":"10.2.0.1"},{"address":"10.3.0.5/16"},{"address":"fd00::5/64","gateway":"fd00::9"}]`},
		"args replaces":          {head + `,"args":{"cni":{"ips":["10.4.0.5/24"]}}}`, "IP=10.2.0.5/24;GATEWAY=10.4.0.1", `"ips":[{"address":"10.4.0.5/24"}]`},
		"runtimeConfig replaces": {head + `,"args":{"cni":{"ips":["10.4.0.5/24"]}},"runtimeConfig":{"ips":["fd01::5/64","10.5.0.5/24"]}}`, "", `"ips":[{"address":"10.5.0.5/24"},{"address":"fd01::5/64"}]`},
		"routes and dns": {
			`{"ipam":{"type":"static","addresses":[{"address":"10.1.0.5/24"}],"routes":[{"dst":"0.0.0.0/0","gw":"10.1.0.1","mtu":1400}],` +
				`"dns":{"nameservers":["192.0.2.53"],"domain":"lan","search":["a"],"options":["ndots:5"]}}}`, "",
			`"dns":{"domain":"lan","nameservers":["192.0.2.53"],"options":["ndots:5"],"search":["a"]},"ips":[{"address":"10.1.0.5/24"}],"routes":[{"dst":"0.0.0.0/0","gw":"10.1.0.1","mtu":1400}]`,
		},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			n := newIPAMNode(t, tt.conf)
			r := n.request("a")
			r.Args = tt.args
			result := must.Of(n.tryAdd(r)).Get(t)
			got := must.Of(json.Marshal(result)).Get(t)
			expect.NoDiff(t, cmp.Diff(`{"cniVersion":"1.1.0",`+tt.want+`}`, string(got)))
			expect.Success(t, n.allocator(r).Check(context.Background(), result), "Check")
			n.expect(map[string]string{})
		})
	}
}

func TestStaticChecksAddressAndGateway(t *testing.T) {
	t.Parallel()
	n := newIPAMNode(t, `{"ipam":{"type":"static","addresses":[{"address":"10.1.0.5/24","gateway":"10.1.0.1"}]}}`)
	a := n.allocator(n.request("a"))
	result := must.Of(a.Add(context.Background())).Get(t)
	other := *result.IPs[0]
	other.Gateway = other.Address.IP
	for name, prev := range map[string]*current.Result{
		"nil": nil, "empty": {}, "null": {IPs: []*current.IPConfig{{}}}, "other gateway": {IPs: []*current.IPConfig{&other}},
	} {
		err := a.Check(context.Background(), prev)
		if err == nil {
			t.Errorf("%s: no error", name)
			continue
		}
		wantError(t, err, codeCheckFailed, ipam.ErrNotReserved, "the attachment has no address 10.1.0.5/24 via 10.1.0.1")
	}
}
