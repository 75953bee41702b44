package cni

import (
	"context"
	"encoding/json"
	"errors"
	"testing"

	current "github.com/containernetworking/cni/pkg/types/100"
	"github.com/google/go-cmp/cmp"

	"github.com/tombolo-cni/tombolo/internal/ipam/delegate"
	"github.com/tombolo-cni/tombolo/internal/strict"
	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
	"github.com/tombolo-cni/tombolo/ipam"
)

func TestWithoutATypeThereAreNoAddresses(t *testing.T) {
	t.Parallel()
	for name, conf := range map[string]string{
		"no section": `{"name":"lan"}`, "empty section": `{"ipam":{}}`, "null": `{"ipam":null}`, "empty type": `{"ipam":{"type":""}}`,
		"comment": `{"ipam":{"_why":"layer 2"}}`,
	} {
		nstest.RunParallel(t, name, func(t *testing.T) {
			n := newIPAMNode(t, conf)
			a := n.allocator(n.request("a"))
			ctx := context.Background()
			result, err := a.Add(ctx)
			expect.That(t, err == nil && len(result.IPs) == 0, "Add: %v, %v", result, err)
			expect.That(t, a.Allocator == nil, "it has %T", a.Allocator)
			n.expect(map[string]string{})
		})
	}
}

func TestUnknownFieldsAreErrorsOnlyInsideOfIPAM(t *testing.T) {
	t.Parallel()
	n := newIPAMNode(t, `{"foo":1,"args":{"foo":1,"cni":{"foo":1}},"runtimeConfig":{"foo":1,"ipRanges":[[{"subnet":"10.2.0.0/24","foo":1}]]},
		"ipam":{"_foo":1,"type":"host-local","ranges":[[{"_foo":1,"subnet":"fd00::/64"}]]}}`)
	n.allocator(n.request("a"))
	for name, conf := range map[string]string{
		"host-local": `{"ipam":{"type":"host-local","subnet":"10.1.0.0/24","foo":1}}`,
		"static":     `{"ipam":{"type":"static","addresses":[{"address":"10.1.0.5/24"}],"foo":1}}`,
	} {
		n := newIPAMNode(t, conf)
		_, err := newAllocator(n.request("a"))
		wantError(t, err, 2, nil, `unknown field "ipam.foo": 1`)
		var found *strict.Error
		expect.That(t, errors.As(err, &found) && found.Kind == strict.Unknown && found.Path == "ipam.foo", "%s: the strict error is lost: %v", name, err)
		r := n.request("a")
		r.Strict = false
		expect.Success(t, expect.Err(n.allocator(r).Add(context.Background())), "%s, not strict", name)
	}
	// What a plugin of others takes is its own business.
	n = newIPAMNode(t, `{"ipam":{"type":"other","foo":1}}`)
	n.allocator(n.request("a"))
}

func TestConfigErrorKeepsNil(t *testing.T) {
	t.Parallel()
	expect.Success(t, configError(nil))
}

// FuzzNew: no netconf and no CNI_ARGS make newAllocator panic; without Strict it fails for nothing; and what it takes for static
// is an address.
func FuzzNew(f *testing.F) {
	for _, conf := range []string{
		ranged(small + `,[{"subnet":"fd00::/64"}]`),
		`{"ipam":{"type":"host-local","subnet":"10.1.0.0/24","gateway":"10.1.0.9","routes":[{"dst":"::/0","table":5}]}}`,
		`{"ipam":{"type":"static","addresses":[{"address":"10.1.0.5/24","gateway":"10.1.0.1"}],"dns":{"domain":"x"}}}`,
		`{"cniVersion":"1.1.0","ipam":{"type":"host-local"},"runtimeConfig":{"ipRanges":[[{"subnet":"10.1.0.0/30"}]],"ips":["10.1.0.2"]},"args":{"cni":{"ips":[]}}}`,
		`{"ipam":{}}`, `{}`, `[]`, ``,
	} {
		f.Add([]byte(conf), "IgnoreUnknown=1;IP=10.1.0.5;K8S_POD_NAME=x", true)
	}
	f.Fuzz(func(t *testing.T, conf []byte, args string, strictly bool) {
		r := &ipamRequest{
			Plugin:  delegate.Plugin{ContainerID: "a", IfName: "eth0", Args: args},
			Network: "lan", Strict: strictly, DefaultDataDir: "/nonexistent", Warn: func(string) {},
		}
		a, err := newAllocator(r.fill(string(conf)))
		if err != nil {
			must.That(t, strictly, "not strict, and %v", err)
			return
		}
		// What host-local gives is fuzzed in package ipam: a dataDir of here could be any.
		for _, a := range a.given {
			must.That(t, a.Prefix.IsValid(), "bad address %v", a)
		}
	})
}

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
		nstest.RunParallel(t, name, func(t *testing.T) {
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
	err := a.Check(context.Background(), &current.Result{IPs: []*current.IPConfig{&other}})
	wantError(t, err, codeCheckFailed, ipam.ErrNotReserved, "the attachment has no address 10.1.0.5/24 via 10.1.0.1")
	expect.Success(t, a.Check(context.Background(), &current.Result{}), "as the reference plugin does")
}
