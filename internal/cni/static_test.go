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

func TestBadStaticConfigsAreExplained(t *testing.T) {
	t.Parallel()
	const plain = `{"ipam":{"type":"static"}}`
	for name, tt := range map[string]struct {
		conf, args string
		code       uint
		want       string
	}{
		"no prefix length":  {`{"ipam":{"type":"static","addresses":[{"address":"10.1.0.5"}]}}`, "", 7, `field "ipam.addresses[0].address": expected an address with a prefix length`},
		"no address":        {`{"ipam":{"type":"static","addresses":[{"gateway":"10.1.0.1"}]}}`, "", 7, `field "ipam.addresses[0].address" is required`},
		"gateway's zone":    {`{"ipam":{"type":"static","addresses":[{"address":"fd00::5/64","gateway":"fe80::1%eth0"}]}}`, "", 7, `fe80::1%eth0 has a zone`},
		"misspelt":          {`{"ipam":{"type":"static","adresses":[]}}`, "", 2, `unknown field "ipam.adresses": [] (did you mean "addresses"?)`},
		"bad CNI_ARGS":      {plain, "IP=10.1.0.5", 7, `CNI_ARGS IP: "10.1.0.5" is not an address with a prefix length`},
		"bad GATEWAY":       {plain, "GATEWAY=router", 4, `CNI_ARGS GATEWAY: "router" is not an IP address`},
		"unknown key":       {plain, "FOO=1", 4, `FOO=1 is not known`},
		"bad args":          {`{"ipam":{"type":"static"},"args":{"cni":{"ips":["x"]}}}`, "", 7, `args.cni.ips: "x" is not an address`},
		"bad runtimeConfig": {`{"ipam":{"type":"static"},"runtimeConfig":{"ips":["x"]}}`, "", 7, `runtimeConfig.ips: "x" is not an address`},
		"bad route":         {`{"ipam":{"type":"static","routes":[{}]}}`, "", 7, `field "ipam.routes[0].dst" is required`},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := newIPAMNode(t, tt.conf).request("a")
			r.Args = tt.args
			wantError(t, expect.Err(newAllocator(r)), tt.code, nil, tt.want)
			r.Strict = false
			a, err := open(r)
			must.Succeed(t, err, "not strict")
			ctx := context.Background()
			expect.Success(t, a.Del(ctx, nil), "Del")
			expect.Success(t, a.GC(ctx, nil), "GC")
			if tt.code == 2 {
				return
			}
			_, addErr := a.Add(ctx)
			for verb, err := range map[string]error{"Add": addErr, "Check": a.Check(ctx, nil), "Status": a.Status(ctx)} {
				expect.Failure(t, err, "%s works with a broken config", verb)
			}
		})
	}
}

func TestStaticWithoutAnAddressFailsOnlyInAdd(t *testing.T) {
	t.Parallel()
	n := newIPAMNode(t, `{"ipam":{"type":"static"}}`)
	a := n.allocator(n.request("a"))
	expect.Success(t, a.Status(context.Background()), "Status, though the address may come with the ADD")
	wantError(t, expect.Err(a.Add(context.Background())), 7, nil, `network "lan": static has no address to give`)
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
		wantError(t, err, codeCheckFailed, ipam.ErrNotReserved, "prevResult has no address 10.1.0.5/24 with gateway 10.1.0.1")
	}
}
