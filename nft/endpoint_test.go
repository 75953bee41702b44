package nft

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/netip"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo"
	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
)

func TestAddIsStrict(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	c, ns := dialNew(t)
	first := pod("00000000001", "10.22.0.5", "fd00:22::5")

	err := c.Add(ctx, first)
	expect.That(t, errors.Is(err, fs.ErrNotExist) && !errors.Is(err, fs.ErrExist), "without a table: %v", err)
	mustEnsure(t, c, Network{Name: "podnet"})
	expect.Is(t, c.Add(ctx, first), fs.ErrNotExist, "without the sets of masquerade")
	wantEndpoints(t, c)
	mustEnsure(t, c, podnet())
	mustAdd(t, c, first)
	nft(t, ns, "add element inet tombolo pods4 { cbr0 . 10.22.9.9 comment \"by hand\" }")

	for _, tc := range []struct {
		name string
		ep   Endpoint
		want ConflictError
	}{
		{"the same again", first,
			ConflictError{Element: "inet tombolo pods4 { cbr0 . 10.22.0.5 }", Owner: "00000000001", Network: "podnet", Comment: "tombolo:1:00000000001:podnet"}},
		{"another owner's IPv4 address", pod("00000000002", "10.22.0.5"),
			ConflictError{Element: "inet tombolo pods4 { cbr0 . 10.22.0.5 }", Owner: "00000000001", Network: "podnet", Comment: "tombolo:1:00000000001:podnet"}},
		{"another owner's IPv6 address", pod("00000000002", "10.22.0.6", "fd00:22::5"),
			ConflictError{Element: "inet tombolo pods6 { cbr0 . fd00:22::5 }", Owner: "00000000001", Network: "podnet", Comment: "tombolo:1:00000000001:podnet"}},
		{"another network on the same bridge", Endpoint{Owner: "00000000002", Network: "lan", Bridge: "cbr0", Addrs: nstest.Addrs("10.22.0.5")},
			ConflictError{Element: "inet tombolo pods4 { cbr0 . 10.22.0.5 }", Owner: "00000000001", Network: "podnet", Comment: "tombolo:1:00000000001:podnet"}},
		{"the same network on another bridge",
			Endpoint{Owner: "00000000002", Network: "podnet", Bridge: "cbr1", Addrs: nstest.Addrs("10.22.0.5"), Masquerade: true},
			ConflictError{Element: "inet tombolo masq4-podnet { 10.22.0.5 }", Owner: "00000000001", Network: "podnet", Comment: "tombolo:1:00000000001:podnet"}},
		{"what someone added by hand", pod("00000000002", "10.22.9.9"),
			ConflictError{Element: "inet tombolo pods4 { cbr0 . 10.22.9.9 }", Comment: "by hand"}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			err := c.Add(ctx, tc.ep)
			var got *ConflictError
			expect.That(t, errors.As(err, &got) && *got == tc.want, "got %+v (%v), want %+v", got, err, tc.want)
			expect.That(t, errors.Is(err, fs.ErrExist) && errors.Is(err, unix.EEXIST) && !errors.Is(err, fs.ErrNotExist),
				"%v is not fs.ErrExist alone", err)
			wantEndpoints(t, c, first)
		})
	}
}

func TestConflictNamesTheOwner(t *testing.T) {
	t.Parallel()
	for want, e := range map[string]ConflictError{
		"add element inet tombolo pods4 { cbr0 . 10.22.0.5 }: it belongs to endpoint 00000000001 of network podnet": {
			Element: "inet tombolo pods4 { cbr0 . 10.22.0.5 }", Owner: "00000000001", Network: "podnet"},
		`add element inet tombolo masq4-x { 10.22.0.5 }: it belongs to another program (comment "by hand")`: {
			Element: "inet tombolo masq4-x { 10.22.0.5 }", Comment: "by hand"},
	} {
		expect.Equal(t, e.Error(), want)
	}
}

func TestNetworksMayShareABridgeAndAddresses(t *testing.T) {
	t.Parallel()
	c, _ := dialNew(t)
	other := Network{Name: "other", Masquerade: true, Prefixes: nstest.Prefixes("10.22.0.0/16")}
	mustEnsure(t, c, podnet())
	mustEnsure(t, c, other)
	eps := []Endpoint{
		{Owner: "00000000002", Network: "other", Bridge: "cbr0", Addrs: nstest.Addrs("10.22.0.6"), Masquerade: true},
		{Owner: "00000000003", Network: "other", Bridge: "cbr1", Addrs: nstest.Addrs("10.22.0.5"), Masquerade: true},
		pod("00000000001", "10.22.0.5"),
	}
	mustAdd(t, c, eps...)
	wantEndpoints(t, c, eps...)
	wantReady(t, c, podnet(), eps[2])
	wantReady(t, c, other, eps[:2]...)
}

func TestReplaceMakesElementsTheEndpoints(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	c, ns := dialNew(t)
	expect.Is(t, c.Replace(ctx, pod("00000000001", "10.22.0.5")), fs.ErrNotExist, "without a table")
	mustEnsure(t, c, podnet())
	stale := pod("00000000bad", "10.22.0.5", "fd00:22::5")
	mustAdd(t, c, stale)
	nft(t, ns, "add element inet tombolo pods4 { cbr0 . 10.22.0.9 }")

	fresh := pod("00000000001", "10.22.0.5", "10.22.0.9", "fd00:22::6")
	for _, again := range []string{"", "again"} {
		must.Succeed(t, c.Replace(ctx, fresh), "%v", again)
		wantEndpoints(t, c, fresh, pod("00000000bad", "fd00:22::5"))
	}
	twins := []Endpoint{pod("00000000002", "10.22.0.7"), pod("00000000003", "10.22.0.7")}
	expect.Is(t, c.Replace(ctx, twins...), fs.ErrExist, "two endpoints with one address")
}

// After an Ensure that had to make sets anew, this is what brings elements back.
func TestReplaceBringsAThousandEndpointsBack(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	c, ns := dialNew(t)
	mustEnsure(t, c, podnet())
	eps := make([]Endpoint, 1000)
	for i := range eps {
		eps[i] = pod(Owner(fmt.Sprintf("%011x", i)), fmt.Sprintf("10.22.%d.%d", i>>8, i&255), fmt.Sprintf("fd00:22::%x", i))
	}
	must.Succeed(t, c.Replace(ctx, eps...))
	wantEndpoints(t, c, eps...)
	nft(t, ns, "delete table inet tombolo")
	mustEnsure(t, c, podnet())
	wantEndpoints(t, c)
	must.Succeed(t, c.Replace(ctx, eps...))
	wantEndpoints(t, c, eps...)
	must.Succeed(t, c.Remove(ctx, eps...))
	wantEndpoints(t, c)
}

func TestRemoveTakesOnlyTheOwnersElements(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	c, ns := dialNew(t)
	a, b := pod("0000000000a", "10.22.0.5", "fd00:22::5"), pod("0000000000b", "10.22.0.6")
	l2 := Endpoint{Owner: "0000000000c", Network: "lan", Bridge: "br0", MAC: net.HardwareAddr{2, 0, 0, 0, 0, 5}}

	for _, before := range []string{"without a table", "without elements"} {
		expect.Success(t, c.Remove(ctx, a, l2), "Remove %s", before)
		expect.Success(t, c.RemoveOwners(ctx, "0000000000a"), "RemoveOwners %s", before)
		expect.Of(c.Endpoints(ctx, "")).Len(t, 0, "Endpoints %s", before)
		mustEnsure(t, c, podnet())
	}

	mustAdd(t, c, a, b, l2)
	wantEndpoints(t, c, l2, a, b)
	// A record that is out of date: the address is another's by now.
	expect.Success(t, c.Remove(ctx, pod("0000000000a", "10.22.0.6")))
	wantEndpoints(t, c, l2, a, b)
	// One that says nothing of masquerade.
	without := a
	without.Masquerade = false
	expect.Success(t, c.Remove(ctx, without, l2))
	wantEndpoints(t, c, b)
	mustAdd(t, c, a, l2)
	expect.Success(t, c.RemoveOwners(ctx, "0000000000a", "0000000000c", "0000000000d"))
	wantEndpoints(t, c, b)
	// One of the elements is gone, and one belongs to someone else.
	nft(t, ns, "delete element inet tombolo masq4-podnet { 10.22.0.6 }")
	nft(t, ns, "add element inet tombolo masq4-podnet { 10.22.0.6 comment \"by hand\" }")
	expect.Success(t, c.Remove(ctx, b))
	wantEndpoints(t, c)
	expect.Contains(t, nft(t, ns, "list", "set", "inet", "tombolo", "masq4-podnet"), `10.22.0.6 comment "by hand"`, "what is not ours was deleted")
}

func TestRemoveNetworkLeavesOtherNetworks(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	c, ns := dialNew(t)
	other := Network{Name: "podnet2", Masquerade: true, Prefixes: nstest.Prefixes("10.23.0.0/16")}
	plain := Network{Name: "plain"}
	kept := Endpoint{Owner: "00000000002", Network: "podnet2", Bridge: "cbr0", Addrs: nstest.Addrs("10.23.0.5"), Masquerade: true}
	for _, n := range []Network{podnet(), other, plain} {
		mustEnsure(t, c, n)
	}
	mustAdd(t, c, pod("00000000001", "10.22.0.5", "fd00:22::5"), kept)

	wantHas := func(want map[string]bool) {
		t.Helper()
		for name, want := range want {
			expect.Of(c.HasNetwork(ctx, name)).Is(t, want, "HasNetwork(%q)", name)
		}
	}
	wantHas(map[string]bool{"podnet": true, "podnet2": true, "plain": false, "never": false, "podne": false})
	must.Succeed(t, c.RemoveNetwork(ctx, "podnet"))
	wantEndpoints(t, c, kept)
	wantReady(t, c, other, kept)
	list := nft(t, ns, "list", "ruleset")
	expect.That(t, !strings.Contains(list, "podnet ") && !strings.Contains(list, "10.22."), "left over of podnet:\n%s", list)
	// It is idempotent, and finds nothing of networks that were never there.
	for _, name := range []string{"podnet", "never", "plain"} {
		expect.Success(t, c.RemoveNetwork(ctx, name))
	}
	wantReady(t, c, other, kept)
	wantHas(map[string]bool{"podnet": false, "podnet2": true})
	must.Succeed(t, c.Remove(ctx, kept))
	wantHas(map[string]bool{"podnet2": true}) // by its chain
	must.Succeed(t, c.RemoveNetwork(ctx, "podnet2"))
	wantHas(map[string]bool{"podnet2": false})
	expect.Equal(t, nft(t, ns, "list", "ruleset"), "", "after the last network")
	expect.Success(t, c.RemoveNetwork(ctx, "podnet2"))
}

func TestRemoveNetworkKeepsATableThatIsUsed(t *testing.T) {
	t.Parallel()
	c, ns := dialNew(t)
	mustEnsure(t, c, podnet())
	// Neither has a chain of its own.
	mustAdd(t, c, Endpoint{Owner: "00000000001", Network: "plain", Bridge: "cbr0", Addrs: nstest.Addrs("10.9.0.1")})
	must.Succeed(t, c.RemoveNetwork(context.Background(), "podnet"))
	wantReady(t, c, Network{Name: "plain"})
	wantEndpoints(t, c, Endpoint{Owner: "00000000001", Network: "plain", Bridge: "cbr0", Addrs: nstest.Addrs("10.9.0.1")})
	list := nft(t, ns, "list", "ruleset")
	expect.That(t, !strings.Contains(list, "podnet"), "left over of podnet:\n%s", list)
}

func TestEndpointsOfALongNetworkName(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	c, _ := dialNew(t)
	long, alike := longName+"a", longName+"b" // alike as far as a comment could hold them
	for i, name := range []string{long, alike} {
		mustEnsure(t, c, Network{Name: name, Masquerade: true})
		mustAdd(t, c, Endpoint{
			Owner: Owner(fmt.Sprintf("%016d", i)), Network: name, Bridge: "cbr0", Masquerade: true,
			Addrs: nstest.Addrs(fmt.Sprintf("10.22.0.%d", i)),
		})
	}
	for i, name := range []string{long, alike} {
		got, err := c.Endpoints(ctx, name)
		expect.That(t, err == nil && len(got) == 1 && got[0].Network == name &&
			got[0].Addrs[0] == nstest.Addr(fmt.Sprintf("10.22.0.%d", i)),
			"endpoints of %s: %+v, %v", name, got, err)
	}
	must.Succeed(t, c.RemoveNetwork(ctx, long))
	expect.Of(c.Endpoints(ctx, alike)).Len(t, 1, "endpoints of the other one after that")
}

func TestInvalidArgumentsAreRefusedBeforeTheKernelIsAsked(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	c, _ := dialNew(t)
	good := pod("0123456789a", "10.22.0.5")
	endpoint := func(change func(*Endpoint)) Endpoint {
		ep := good
		change(&ep)
		return ep
	}
	for name, ep := range map[string]Endpoint{
		"no owner":                endpoint(func(ep *Endpoint) { ep.Owner = "" }),
		"long owner":              endpoint(func(ep *Endpoint) { ep.Owner = "0123456789abcdef0" }),
		"owner with a colon":      endpoint(func(ep *Endpoint) { ep.Owner = "01:23" }),
		"owner in upper case":     endpoint(func(ep *Endpoint) { ep.Owner = "ABC" }),
		"no network":              endpoint(func(ep *Endpoint) { ep.Network = "" }),
		"network with a quote":    endpoint(func(ep *Endpoint) { ep.Network = `a"b` }),
		"network with a colon":    endpoint(func(ep *Endpoint) { ep.Network = "a:b" }),
		"network with a slash":    endpoint(func(ep *Endpoint) { ep.Network = "a/b" }),
		"network with a dash":     endpoint(func(ep *Endpoint) { ep.Network = "-a" }),
		"no bridge":               endpoint(func(ep *Endpoint) { ep.Bridge = "" }),
		"long bridge":             endpoint(func(ep *Endpoint) { ep.Bridge = "0123456789abcdef" }),
		"bridge to be numbered":   endpoint(func(ep *Endpoint) { ep.Bridge = "br%d" }),
		"bridge with a NUL":       endpoint(func(ep *Endpoint) { ep.Bridge = "a\x00b" }),
		"zero address":            endpoint(func(ep *Endpoint) { ep.Addrs = make([]netip.Addr, 1) }),
		"mapped address":          endpoint(func(ep *Endpoint) { ep.Addrs = nstest.Addrs("10.22.0.5", "::ffff:10.0.0.1") }),
		"address with a zone":     endpoint(func(ep *Endpoint) { ep.Addrs = nstest.Addrs("fe80::1%eth0") }),
		"neither address nor MAC": endpoint(func(ep *Endpoint) { ep.Addrs = nil }),
		"MAC of eight bytes": endpoint(func(ep *Endpoint) {
			ep.Addrs, ep.MAC = nil, net.HardwareAddr{1, 2, 3, 4, 5, 6, 7, 8}
		}),
	} {
		t.Run(name, func(t *testing.T) {
			_, checkErr := c.CheckEndpoint(ctx, ep)
			for _, err := range []error{c.Add(ctx, ep), c.Replace(ctx, good, ep), c.Remove(ctx, good, ep), checkErr} {
				expect.Is(t, err, tombolo.ErrInvalid)
			}
		})
	}
	for name, n := range map[string]Network{
		"no name":       {},
		"name with :":   {Name: "a:b"},
		"zero prefix":   {Name: "a", Prefixes: make([]netip.Prefix, 1)},
		"mapped prefix": {Name: "a", NonMasquerade: nstest.Prefixes("::ffff:10.0.0.0/104")},
	} {
		t.Run(name, func(t *testing.T) {
			_, ensureErr := c.Ensure(ctx, n)
			_, readyErr := c.Ready(ctx, n)
			_, checkErr := c.Check(ctx, n)
			for _, err := range []error{ensureErr, readyErr, checkErr} {
				expect.Is(t, err, tombolo.ErrInvalid)
			}
		})
	}
	for err, want := range map[error]string{
		c.RemoveOwners(ctx, "a", "4c0f-9e"): `owner "4c0f-9e": want 1 to 16 lower-case letters and digits, as OwnerOf gives them`,
		c.RemoveNetwork(ctx, "a:b"):         `network name "a:b": want letters and digits, and after the first one '_', '.' and '-' too`,
	} {
		expect.That(t, err != nil && strings.HasSuffix(err.Error(), want), "%v does not say %s", err, want)
	}
	_, endpointsErr := c.Endpoints(ctx, "a:b")
	for _, err := range []error{c.RemoveOwners(ctx, "a", "B"), c.RemoveNetwork(ctx, ""), endpointsErr} {
		expect.Is(t, err, tombolo.ErrInvalid)
	}
}

func TestAddressGivenTwiceIsOneElement(t *testing.T) {
	t.Parallel()
	c, _ := dialNew(t)
	mustEnsure(t, c, podnet())
	mustAdd(t, c, pod("00000000001", "10.22.0.5", "fd00:22::5", "10.22.0.5"))
	wantEndpoints(t, c, pod("00000000001", "10.22.0.5", "fd00:22::5"))
}

func TestContextThatIsDoneEndsBeforeTheKernelIsAsked(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	c := On(nil, nil) // asking would panic
	ep := pod("0123456789a", "10.22.0.5")
	_, ensureErr := c.Ensure(ctx, podnet())
	_, readyErr := c.Ready(ctx, podnet())
	_, checkErr := c.Check(ctx, podnet())
	_, ofEndpointErr := c.CheckEndpoint(ctx, ep)
	_, endpointsErr := c.Endpoints(ctx, "")
	for _, err := range []error{
		ensureErr, readyErr, checkErr, ofEndpointErr, endpointsErr, c.Add(ctx, ep), c.Replace(ctx, ep), c.Remove(ctx, ep),
		c.RemoveOwners(ctx, ep.Owner), c.RemoveNetwork(ctx, "podnet"),
	} {
		expect.Is(t, err, context.Canceled)
	}
}

func TestOwnerOfAnAttachmentStaysWhatItIs(t *testing.T) {
	t.Parallel()
	// printf "4:cbr0,6:abc123,4:eth0," | sha256sum | cut -c1-11
	got := OwnerOf("cbr0", "abc123", "eth0")
	expect.That(t, got == "835703a4997" && got.check() == nil, "owner %q", got)
}

func TestHolderSaysWhoseAnAddressIs(t *testing.T) {
	t.Parallel()
	c, ns := dialNew(t)
	own4, own6 := netip.MustParseAddr("10.22.0.5"), netip.MustParseAddr("fd00:22::5")
	got, err := c.AddressOwner(t.Context(), "cbr0", own4)
	expect.That(t, got == nil && err == nil, "without a table: %v, %v", got, err)
	mustEnsure(t, c, podnet())
	mustAdd(t, c, pod("00000000001", "10.22.0.5", "fd00:22::5"))
	nft(t, ns, "add element inet tombolo pods4 { cbr0 . 10.22.9.9 comment \"by hand\" }")
	for _, tt := range []struct {
		bridge string
		a      netip.Addr
		held   bool
		owner  Owner
	}{
		{"cbr0", own4, true, "00000000001"},
		{"cbr0", own6, true, "00000000001"},
		{"cbr0", netip.AddrFrom16(own4.As16()), true, "00000000001"},
		{"cbr0", netip.MustParseAddr("10.22.9.9"), true, ""},
		{"cbr0", netip.MustParseAddr("10.22.0.6"), false, ""},
		{"cbr1", own4, false, ""},
	} {
		got, err := c.AddressOwner(t.Context(), tt.bridge, tt.a)
		expect.That(t, err == nil && (got != nil) == tt.held && (!tt.held || got.Owner == tt.owner),
			"%s behind %s: %v, %v", tt.a, tt.bridge, got, err)
	}
	for bridge, a := range map[string]netip.Addr{"": own4, "cbr0": {}, "too/long": own4} {
		_, err := c.AddressOwner(t.Context(), bridge, a)
		expect.That(t, errors.Is(err, fs.ErrInvalid) || errors.Is(err, tombolo.ErrInvalid), "%s behind %q: %v", a, bridge, err)
	}
}
