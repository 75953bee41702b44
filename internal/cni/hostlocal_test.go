package cni

import (
	"context"
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/containernetworking/cni/pkg/types"
	"github.com/google/go-cmp/cmp"

	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
	"github.com/tombolo-cni/tombolo/ipam"
)

func TestTheResultHoldsAllThatTheConfigSays(t *testing.T) {
	t.Parallel()
	n := newIPAMNode(t, "")
	resolv := filepath.Join(n.dataDir, "resolv.conf")
	must.Succeed(t, os.WriteFile(resolv, []byte("nameserver 192.0.2.53\n"), 0o644))
	n.conf = `{"cniVersion":"1.1.0","ipam":{"type":"host-local","resolvConf":"` + resolv + `",
		"ranges":[[{"subnet":"fd00::/64","gateway":"fd00::ff"}],[{"subnet":"10.1.0.0/24"}]],
		"routes":[{"dst":"0.0.0.0/0"},{"dst":"fd00:9::/32","gw":"fd00::1"},
			{"dst":"10.0.0.0/8","gw":"10.1.0.1","mtu":1400,"advmss":1360,"priority":100,"table":50,"scope":253}]}}`
	result := must.Of(n.tryAdd(n.request("a"))).Get(t)
	got := must.Of(json.Marshal(result)).Get(t)
	want := `{"cniVersion":"1.1.0","dns":{"nameservers":["192.0.2.53"]},` +
		`"ips":[{"address":"fd00::1/64","gateway":"fd00::ff"},{"address":"10.1.0.2/24","gateway":"10.1.0.1"}],` +
		`"routes":[{"dst":"0.0.0.0/0"},{"dst":"fd00:9::/32","gw":"fd00::1"},` +
		`{"advmss":1360,"dst":"10.0.0.0/8","gw":"10.1.0.1","mtu":1400,"priority":100,"scope":253,"table":50}]}`
	expect.NoDiff(t, cmp.Diff(want, string(got)))
	// The sets keep the index that they have in the config.
	n.expect(map[string]string{
		"10.1.0.2": "a\r\neth0", "fd00::1": "a\r\neth0", "last_reserved_ip.0": "fd00::1", "last_reserved_ip.1": "10.1.0.2",
	})
}

func TestRequestedAddressesAreGiven(t *testing.T) {
	t.Parallel()
	const dual = `[{"subnet":"10.1.0.0/24"}],[{"subnet":"fd00::/64"}]`
	with := func(extra string) string { return strings.TrimSuffix(ranged(dual), "}") + extra + "}" }
	tests := map[string]struct{ conf, args, want string }{
		"CNI_ARGS":                  {with(``), "IgnoreUnknown=1;K8S_POD_NAME=x;IP=10.1.0.9", "10.1.0.9,fd00::2"},
		"CNI_ARGS, both families":   {with(``), "IP=10.1.0.9,fd00::9", "10.1.0.9,fd00::9"},
		"CNI_ARGS, empty":           {with(``), "IP=;MAC=02:00:00:00:00:01", "10.1.0.2,fd00::2"},
		"args.cni.ips":              {with(`,"args":{"cni":{"ips":["fd00::9"]},"other":{}}`), "", "10.1.0.2,fd00::9"},
		"runtimeConfig.ips":         {with(`,"runtimeConfig":{"ips":["10.1.0.9/24","fd00::9/64"]}`), "", "10.1.0.9,fd00::9"},
		"one from each source":      {with(`,"args":{"cni":{"ips":["fd00::9"]}}`), "IP=10.1.0.9", "10.1.0.9,fd00::9"},
		"the same from two sources": {with(`,"args":{"cni":{"ips":["10.1.0.9"]}},"runtimeConfig":{"ips":["10.1.0.9/16"]}`), "", "10.1.0.9,fd00::2"},
		"mapped notation":           {with(``), "IP=::ffff:10.1.0.9", "10.1.0.9,fd00::2"},
	}
	for name, tt := range tests {
		nstest.RunParallel(t, name, func(t *testing.T) {
			n := newIPAMNode(t, tt.conf)
			r := n.request("a")
			r.Args = tt.args
			result := must.Of(n.tryAdd(r)).Get(t)
			expect.Equal(t, addressesOf(result), tt.want)
			expect.Equal(t, n.files()["last_reserved_ip.0"], resultAddrs(result)[0].String(), "last_reserved_ip.0 holds")
		})
	}
}

func TestDelWorksWhateverIsWrong(t *testing.T) {
	t.Parallel()
	for name, conf := range map[string]string{
		"ranges broken":     `{"ipam":{"type":"host-local","ranges":[[{"subnet":"bogus"}]]}}`,
		"ranges overlap":    ranged(small + "," + small),
		"unknown fields":    `{"ipam":{"type":"host-local","foo":1}}`,
		"no ranges":         `{"ipam":{"type":"host-local"}}`,
		"types all over":    `{"cniVersion":1,"ipam":{"type":"host-local","dataDir":7,"routes":"x"},"args":"x","runtimeConfig":[]}`,
		"requested gateway": `{"ipam":{"type":"host-local","subnet":"10.1.0.0/24"},"runtimeConfig":{"ips":["10.1.0.1"]}}`,
	} {
		nstest.RunParallel(t, name, func(t *testing.T) {
			n := newIPAMNode(t, conf)
			n.put("10.1.0.2", "a\r\neth0")
			n.del("a")
			n.expect(map[string]string{})
			r := n.request("a")
			r.Strict = false
			a := n.allocator(r)
			expect.Success(t, a.GC(context.Background(), nil), "GC")
			if name == "unknown fields" {
				return
			}
			expect.Failure(t, expect.Err(a.Add(context.Background())), "Add worked")
			expect.Failure(t, a.Check(context.Background(), nil), "Check worked")
			expect.Failure(t, a.Status(context.Background()), "Status worked")
		})
	}
}

// A runtime hands over what a pod is to have with the verbs of the pod, and nothing with STATUS.
func TestRangesOfARuntimeAreNotMissedBeforeThereIsAPod(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	n := newIPAMNode(t, `{"cniVersion":"1.1.0","capabilities":{"ipRanges":true},"ipam":{"type":"host-local"}}`)
	a := n.allocator(n.request("a"))
	expect.Success(t, a.Status(ctx), "Status")
	const want = "host-local has no addresses to give"
	wantError(t, expect.Err(a.Add(ctx)), 7, nil, want)
	wantError(t, a.Check(ctx, nil), 7, nil, want)
	expect.Success(t, errors.Join(a.Del(ctx, nil), a.GC(ctx, nil)), "Del and GC")
	for _, conf := range []string{`{"ipam":{"type":"host-local"}}`, `{"capabilities":{"ipRanges":false,"ips":true},"ipam":{"type":"host-local"}}`} {
		_, err := newAllocator((&ipamRequest{Network: "lan", Strict: true}).fill(conf))
		wantError(t, err, 7, nil, want)
	}
}

func TestABrokenConfigStillNamesItsDataDir(t *testing.T) {
	t.Parallel()
	n := newIPAMNode(t, "")
	n.dataDir = t.TempDir()
	n.conf = `{"ipam":{"type":"host-local","ranges":"bogus","dataDir":"` + n.dataDir + `"}}`
	n.put("10.1.0.2", "a\r\neth0")
	r := n.request("a")
	r.Strict, r.DefaultDataDir = false, "/nonexistent"
	must.Succeed(t, n.allocator(r).Del(context.Background(), nil))
	n.expect(map[string]string{})
	expect.That(t, n.Warned(`field "ipam.ranges": expected a list`), "what is wrong with the config is not reported")
}

func TestRangesComeInTheReferencesOrder(t *testing.T) {
	t.Parallel()
	var conf hostLocalConf
	r := (&ipamRequest{Strict: true}).fill(`{"cniVersion":"1.1.0","ipam":{"type":"host-local","subnet":"10.2.0.0/24","ranges":[[{"subnet":"10.3.0.0/24"}]]},` +
		`"runtimeConfig":{"ipRanges":[[{"subnet":"10.1.0.0/24"}],[{"subnet":"fd00::/64"}]],"other":{"a":1}}}`)
	must.Succeed(t, r.read(&conf))
	var got []string
	for _, set := range conf.sets(&r.RequestedAddresses) {
		got = append(got, set.Name+" range "+set.Ranges[0].Subnet.String())
	}
	want := []string{
		"runtimeConfig.ipRanges[0] range 10.1.0.0/24", "runtimeConfig.ipRanges[1] range fd00::/64", "ipam range 10.2.0.0/24",
		"ipam.ranges[0] range 10.3.0.0/24",
	}
	expect.NoDiff(t, cmp.Diff(want, got))
}

// Package network puts the ranges on record, by which pools are told of, and goes by the node that it binds to.
func TestAnAllocatorTellsItsRanges(t *testing.T) {
	t.Parallel()
	n := newIPAMNode(t, ranged(small+`,[{"subnet":"fd00::/64"}]`))
	for _, of := range []ipam.Allocator{n.allocator(n.request("a")).allocator, n.allocator(n.request("a")).Bind(ipam.Node{})} {
		expect.Equal(t, len(ipam.RangeSetsOf(of)), 2, "range sets of %T", of)
	}
}

func TestResolvConfIsUnderstood(t *testing.T) {
	t.Parallel()
	const text = "# comment\n; another\n\nnameserver 192.0.2.53\n  nameserver\tfd00::53 trailing\nnameserver\n" +
		"domain lan.example\r\nsearch a.example b.example\nsearch c.example\noptions ndots:5\noptions timeout:1 attempts:2\nsortlist x\nnameserver 192.0.2.54"
	want := types.DNS{
		Nameservers: []string{"192.0.2.53", "fd00::53", "192.0.2.54"},
		Domain:      "lan.example",
		Search:      []string{"a.example", "b.example", "c.example"},
		Options:     []string{"ndots:5", "timeout:1", "attempts:2"},
	}
	expect.NoDiff(t, cmp.Diff(want, ParseResolvConf(text)))
}

// FuzzResolvConf: any text gives fields without white space in them.
func FuzzResolvConf(f *testing.F) {
	f.Add("nameserver 192.0.2.53\nsearch a b\noptions ndots:5\ndomain x\n")
	f.Add("# c\n;d\nnameserver")
	f.Fuzz(func(t *testing.T, text string) {
		dns := ParseResolvConf(text)
		for _, list := range [][]string{dns.Nameservers, dns.Search, dns.Options} {
			for _, item := range list {
				must.That(t, item != "" && strings.TrimSpace(item) == item, "%q gave the item %q", text, item)
			}
		}
	})
}
