package nft

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo"
	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
)

// portNames matches a port in a listing, and not the rule about all of them.
var portNames = regexp.MustCompile(`veth[0-9]`)

// guardNet is podnet with a guard, and guardedPod one of its pods.
func guardNet() Network {
	n := podnet()
	n.Guard = true
	return n
}

func guardedPod(owner Owner, port, mac string, addresses ...string) Endpoint {
	ep := pod(owner, addresses...)
	ep.Masquerade = len(addresses) > 0
	ep.Guard, ep.GuardedPort, ep.MAC = GuardAddresses, port, mustMAC(mac)
	return ep
}

// lanPod is one of a LAN, which has SLAAC, and no address of IPv4 before its lease.
func lanPod(owner Owner, port, mac string, addresses ...string) Endpoint {
	ep := guardedPod(owner, port, mac, addresses...)
	ep.Masquerade, ep.SLAAC, ep.Guard = false, true, GuardUntrusted
	return ep
}

func mustMAC(s string) net.HardwareAddr { return net.HardwareAddr(mac(s)) }

func TestGuardElementsAreTheEndpointsOwn(t *testing.T) {
	t.Parallel()
	slaac, untrusted := func(ep *Endpoint) { ep.SLAAC = true }, func(ep *Endpoint) { ep.Guard = GuardUntrusted }
	for _, tc := range []struct {
		name      string
		addresses []string
		want      []string
		are       []func(*Endpoint)
	}{
		{name: "dual-stack", addresses: []string{pod4, pod6}, want: []string{
			"veth1 of set guarded", "veth1 . 02:00:00:00:00:05 of set guard-mac", "veth1 . 10.22.0.5 of set guard4",
			"veth1 . 0x0200000000050000 of set guard-lladdr",
			"veth1 . fd00:22::5 of set guard6", "veth1 . 0xfd000022000000000000000000000005 of set guard-target",
			"veth1 . fe80::ff:fe00:5 of set guard6", "veth1 . 0xfe80000000000000000000fffe000005 of set guard-target",
		}},
		{name: "IPv4", addresses: []string{pod4, "10.22.0.7", pod4}, want: []string{
			"veth1 of set guarded", "veth1 . 02:00:00:00:00:05 of set guard-mac", "veth1 . 10.22.0.5 of set guard4", "veth1 . 10.22.0.7 of set guard4",
		}},
		{name: "IPv6, link-local address given", addresses: []string{podLocal, pod6, pod6}, want: []string{
			"veth1 of set guarded", "veth1 . 02:00:00:00:00:05 of set guard-mac", "veth1 . 0x0200000000050000 of set guard-lladdr",
			"veth1 . fe80::ff:fe00:5 of set guard6", "veth1 . 0xfe80000000000000000000fffe000005 of set guard-target",
			"veth1 . fd00:22::5 of set guard6", "veth1 . 0xfd000022000000000000000000000005 of set guard-target",
		}},
		{name: "no addresses", want: []string{
			"veth1 of set guarded", "veth1 . 02:00:00:00:00:05 of set guard-mac", "veth1 of set guard-free", "veth1 . 0x0200000000050000 of set guard-lladdr",
		}},
		{name: "addresses made of the MAC", are: []func(*Endpoint){slaac}, addresses: []string{pod4, "fd00:22::ff:fe00:5", podLocal, pod6}, want: []string{
			"veth1 of set guarded", "veth1 . 02:00:00:00:00:05 of set guard-mac", "veth1 . 10.22.0.5 of set guard4",
			"veth1 . 0x0200000000050000 of set guard-lladdr",
			"veth1 . fd00:22::5 of set guard6", "veth1 . 0xfd000022000000000000000000000005 of set guard-target",
			"veth1 . 0x000000fffe000005 of set guard-id",
		}},
		{name: "nothing but those", are: []func(*Endpoint){slaac}, want: []string{
			"veth1 of set guarded", "veth1 . 02:00:00:00:00:05 of set guard-mac", "veth1 . 0x0200000000050000 of set guard-lladdr",
			"veth1 . 0x000000fffe000005 of set guard-id",
		}},
		{name: "its MAC alone", are: []func(*Endpoint){func(ep *Endpoint) { ep.Guard = GuardMAC }}, addresses: []string{pod4}, want: []string{
			"veth1 of set guarded", "veth1 . 02:00:00:00:00:05 of set guard-mac", "veth1 . 10.22.0.5 of set guard4", "veth1 of set guard-leasing",
		}},
		{name: "a host", are: []func(*Endpoint){untrusted}, addresses: []string{pod4}, want: []string{
			"veth1 of set guarded", "veth1 . 02:00:00:00:00:05 of set guard-mac", "veth1 . 10.22.0.5 of set guard4",
			"veth1 . 0x0200000000050000 of set guard-lladdr", "veth1 of set guard-untrusted",
		}},
		{name: "a host without addresses", are: []func(*Endpoint){untrusted}, want: []string{
			"veth1 of set guarded", "veth1 . 02:00:00:00:00:05 of set guard-mac",
			"veth1 . 0x0200000000050000 of set guard-lladdr", "veth1 of set guard-untrusted", "veth1 of set guard-leasing",
		}},
		{name: "a host with an address of IPv6", are: []func(*Endpoint){untrusted, slaac}, addresses: []string{"2001:db8::ff:fe00:5"}, want: []string{
			"veth1 of set guarded", "veth1 . 02:00:00:00:00:05 of set guard-mac", "veth1 . 0x0200000000050000 of set guard-lladdr",
			"veth1 . 0x000000fffe000005 of set guard-id", "veth1 of set guard-untrusted", "veth1 of set guard-leasing",
		}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			ep := guardedPod("0123456789a", "veth1", podMAC, tc.addresses...)
			for _, is := range tc.are {
				is(&ep)
			}
			var got []string
			for _, el := range ep.elements() {
				if el.Set.Family == unix.NFPROTO_BRIDGE {
					got = append(got, el.String())
				}
			}
			expect.NoDiff(t, cmp.Diff(tc.want, got), "elements")
			unguarded := ep
			unguarded.Guard = ""
			expect.Equal(t, len(ep.elements())-len(unguarded.elements()), len(tc.want), "the guard takes")
		})
	}
}

func TestGuardedEndpointsAreKnownLikeOthers(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	c, ns := dialNew(t)
	n := guardNet()
	a := guardedPod("0000000000a", "veth1", podMAC, pod4, pod6)
	b := guardedPod("0000000000b", "veth2", otherMAC, other4)
	free := guardedPod("0000000000c", "veth3", "02:00:00:00:00:07")
	plain := pod("0000000000d", "10.22.0.8")
	waiting := lanPod("0000000000f", "veth5", "02:00:00:00:00:09")
	nested := guardedPod("0000000000e", "veth4", "02:00:00:00:00:08", "10.22.0.9")
	nested.Guard = GuardMAC

	mustEnsure(t, c, podnet())
	expect.Is(t, c.Add(ctx, a), fs.ErrNotExist, "where no network has a guard")
	wantEndpoints(t, c)
	mustEnsure(t, c, n)
	mustAdd(t, c, a, b, free, plain, nested, waiting)
	wantEndpoints(t, c, a, b, free, plain, nested, waiting)
	wantReady(t, c, n, a, b, free, plain, nested, waiting)
	must.Succeed(t, c.Remove(ctx, nested))
	leased := lanPod("0000000000f", "veth5", "02:00:00:00:00:09", "10.22.0.10", "fd00:22::ff:fe00:9")
	must.Succeed(t, c.Move(ctx, waiting, leased))
	wantEndpoints(t, c, a, b, free, plain, leased)
	wantReady(t, c, n, leased)
	must.Succeed(t, c.Remove(ctx, leased))

	var conflict *ConflictError
	thief := guardedPod("0000000000e", "veth1", podMAC, "10.22.0.9")
	if err := c.Add(ctx, thief); !errors.As(err, &conflict) || !strings.HasPrefix(conflict.Element, "bridge tombolo guarded {") || conflict.Owner != a.Owner {
		t.Errorf("another pod at the same port: %v", err)
	}
	wantEndpoints(t, c, a, b, free, plain)
	must.Succeed(t, c.Replace(ctx, thief))
	if diffs, err := checkAll(c, n, a); err != nil || len(diffs) != 2 || diffs[0].Object != "set guarded of table bridge tombolo" {
		t.Errorf("what the other has taken over: %v, %v", diffs, err)
	}
	must.Succeed(t, c.Replace(ctx, a))
	must.Succeed(t, c.Remove(ctx, thief))
	wantEndpoints(t, c, a, b, free, plain)
	nft(t, ns, "delete element bridge tombolo guard6 { veth1 . fd00:22::5 }")
	diffs, err := checkAll(c, n, a)
	expect.That(t, err == nil && len(diffs) == 1 && diffs[0].Want == "veth1 . fd00:22::5", "one element is missing: %v, %v", diffs, err)
	must.Succeed(t, c.Replace(ctx, a))

	must.Succeed(t, c.Remove(ctx, a, free))
	wantEndpoints(t, c, b, plain)
	must.Succeed(t, c.RemoveOwners(ctx, b.Owner))
	wantEndpoints(t, c, plain)
	list := nft(t, ns, "list", "table", "bridge", "tombolo")
	expect.That(t, !portNames.MatchString(list), "left behind:\n%s", list)
	// A pod that was never guarded, as far as its caller knows.
	plain.Guard, plain.GuardedPort, plain.MAC = GuardAddresses, "veth4", mustMAC("02:00:00:00:00:08")
	must.Succeed(t, c.Remove(ctx, plain))
	wantEndpoints(t, c)
}

// What a guard lets a pod do that has no addresses, or makes them itself, must not stay
// with one that has them and does not.
func TestGuardKeepsNothingOfWhatAPodWas(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	free := guardedPod("0000000000a", "veth1", podMAC)
	waiting := lanPod("0000000000a", "veth1", podMAC)
	known := guardedPod("0000000000a", "veth1", podMAC, pod4)
	nested := known
	nested.Guard = GuardMAC
	for name, was := range map[string]Endpoint{"free": free, "waiting for a lease": waiting, "held to its MAC": nested} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			want, ns := dialNew(t)
			mustEnsure(t, want, guardNet())
			mustAdd(t, want, known)
			wanted := normal(nft(t, ns, "list", "table", "bridge", "tombolo"))

			c, ns := dialNew(t)
			mustEnsure(t, c, guardNet())
			mustAdd(t, c, was)
			if diffs, err := c.CheckEndpoint(ctx, known); err != nil || !slices.ContainsFunc(diffs, func(d tombolo.Difference) bool { return d.Want == "" && d.Have != "" }) {
				t.Errorf("CheckEndpoint does not see what is too much: %v, %v", diffs, err)
			}
			must.Succeed(t, c.Replace(ctx, known))
			expect.Equal(t, normal(nft(t, ns, "list", "table", "bridge", "tombolo")), wanted, "after Replace")
			expect.Of(c.CheckEndpoint(ctx, known)).Len(t, 0, "CheckEndpoint")
			must.Succeed(t, c.Remove(ctx, known))
			mustAdd(t, c, was)
			// All that a record that is younger says.
			must.Succeed(t, c.Remove(ctx, known))
			list := nft(t, ns, "list", "table", "bridge", "tombolo")
			expect.That(t, !portNames.MatchString(list), "left behind:\n%s", list)
		})
	}
}

func TestGuardIsAddedInOneTransactionWithTheRest(t *testing.T) {
	t.Parallel()
	c, ns := dialNew(t)
	mustEnsure(t, c, guardNet())
	nft(t, ns, "add element bridge tombolo guard-target { veth1 . 0xfe80000000000000000000fffe000005 }")
	err := c.Add(context.Background(), guardedPod("0123456789a", "veth1", podMAC, pod4, pod6))
	must.That(t, errors.Is(err, fs.ErrExist), "the last element is there already: %v", err)
	wantEndpoints(t, c)
	list := nft(t, ns, "list", "ruleset")
	expect.That(t, !strings.Contains(list, "tombolo:1:0123456789a"), "something was added:\n%s", list)
}

func TestGuardRefusesWhatIsNoPort(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct{ name, port, mac, want string }{
		{"a name that is too long", "veth0123456789ab", podMAC, `guarded port "veth0123456789ab" is no name of a link`},
		{"a name with a slash", "ve/th", podMAC, `guarded port "ve/th" is no name of a link`},
		{"no MAC", "veth1", "", "port veth1 cannot be guarded"},
		{"a multicast MAC", "veth1", "03:00:00:00:00:05", "port veth1 cannot be guarded"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			ep := pod("0123456789a", pod4)
			ep.Guard, ep.GuardedPort = GuardAddresses, tc.port
			ep.MAC, _ = net.ParseMAC(tc.mac)
			err := ep.check()
			expect.That(t, errors.Is(err, tombolo.ErrInvalid) && strings.Contains(err.Error(), tc.want), "got %v, want %s", err, tc.want)
		})
	}
	both := guardedPod("0123456789a", "veth1", podMAC)
	both.Guard = "both"
	expect.Is(t, both.check(), tombolo.ErrInvalid, "a guard that is none")
}

func tables(tb testing.TB, ns string) []string {
	tb.Helper()
	return regexp.MustCompile(`(?m)^table \S+ \S+`).FindAllString(ns, -1)
}

// The shared chain is nobody's; the table goes with the last that has something in it.
func TestBridgeTableGoesWithItsLastNetwork(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	c, ns := dialNew(t)
	remove := func(name string, want ...string) {
		t.Helper()
		must.Succeed(t, c.RemoveNetwork(ctx, name))
		expect.NoDiff(t, cmp.Diff(want, tables(t, nft(t, ns, "list", "ruleset"))), "after removing %s", name)
	}
	lan := Network{Name: "lan", Guard: true}
	promiscuous := Network{Name: "promiscuous", Masquerade: true, Dedup: dedups()}
	mustEnsure(t, c, guardNet())
	mustEnsure(t, c, lan)
	mustEnsure(t, c, promiscuous)
	guest := guardedPod("0000000000b", "veth2", otherMAC, other4)
	guest.Network, guest.Masquerade = "lan", false
	mustAdd(t, c, guardedPod("0000000000a", "veth1", podMAC, pod4, pod6), guest)

	remove("podnet", "table inet tombolo", "table bridge tombolo")
	wantEndpoints(t, c, guest)
	wantReady(t, c, lan, guest)
	wantReady(t, c, promiscuous)
	remove("promiscuous", "table inet tombolo", "table bridge tombolo")
	list := nft(t, ns, "list", "ruleset")
	expect.That(t, !strings.Contains(list, "dedup"), "left behind:\n%s", list)
	wantReady(t, c, lan, guest)
	remove("lan")
	remove("lan")

	// A network that needs no bridge table leaves others' alone.
	mustEnsure(t, c, promiscuous)
	mustEnsure(t, c, Network{Name: "plain"})
	remove("plain", "table inet tombolo", "table bridge tombolo")
	wantReady(t, c, promiscuous)
	remove("promiscuous")
}

func TestGuardIsMended(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	ep := guardedPod("0000000000a", "veth1", podMAC, pod4, pod6)
	for _, tc := range []struct {
		harm    string
		emptied bool
	}{
		{harm: "flush ruleset", emptied: true},
		{harm: "delete table bridge tombolo", emptied: true},
		{harm: "flush chain bridge tombolo guard"},
		{harm: "add rule bridge tombolo guard accept"},
		{harm: "insert rule bridge tombolo guard accept"},
		{harm: "delete chain bridge tombolo guard"},
		{harm: "delete chain bridge tombolo guard; delete set bridge tombolo guard6", emptied: true},
		{harm: "flush set bridge tombolo guarded", emptied: true},
		{harm: "add table bridge tombolo { flags dormant; }"},
	} {
		t.Run(tc.harm, func(t *testing.T) {
			t.Parallel()
			c, ns := dialNew(t)
			mustEnsure(t, c, guardNet())
			mustAdd(t, c, ep)
			nft(t, ns, tc.harm)
			expect.Of(c.Ready(ctx, guardNet())).Is(t, false, "Ready")
			diffs, err := checkAll(c, guardNet(), ep)
			expect.That(t, err == nil && len(diffs) > 0, "Check: %v, %v", diffs, err)
			out := mustEnsure(t, c, guardNet())
			expect.That(t, out.Changed && out.Emptied == tc.emptied, "Ensure: %+v", out)
			must.Succeed(t, c.Replace(ctx, ep))
			wantReady(t, c, guardNet(), ep)
			wantEndpoints(t, c, ep)
		})
	}
}

// What was guarded when it was added stays so, whatever becomes of its network and
// of others.
func TestNetworkWithoutGuardLeavesGuardedPodsGuarded(t *testing.T) {
	t.Parallel()
	c, ns := dialNew(t)
	ep := guardedPod("0000000000a", "veth1", podMAC, pod4)
	mustEnsure(t, c, guardNet())
	mustAdd(t, c, ep)
	before := nft(t, ns, "list", "table", "bridge", "tombolo")
	mustEnsure(t, c, podnet())
	mustEnsure(t, c, Network{Name: "other"})
	expect.NoDiff(t, cmp.Diff(before, nft(t, ns, "list", "table", "bridge", "tombolo")), "the bridge table changed")
	wantReady(t, c, podnet(), ep)
}

func TestNumberOfGuardRulesDoesNotDependOnPods(t *testing.T) {
	t.Parallel()
	c, ns := dialNew(t)
	mustEnsure(t, c, guardNet())
	rules := len(listing(t, ns)["rule"])
	var eps []Endpoint
	for i := range 300 {
		eps = append(eps, guardedPod(Owner(fmt.Sprintf("%011x", i)), fmt.Sprintf("veth%d", i),
			fmt.Sprintf("02:00:00:00:%02x:%02x", i>>8, i&255), fmt.Sprintf("10.22.%d.%d", i>>8, i&255), fmt.Sprintf("fd00:22::%x", i+1)))
	}
	mustAdd(t, c, eps...)
	got := len(listing(t, ns)["rule"])
	expect.That(t, got == rules, "%d rules with 300 pods, and %d with none", got, rules)
	must.Succeed(t, c.Remove(context.Background(), eps...))
	wantEndpoints(t, c)
}
