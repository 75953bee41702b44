package repotest

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"reflect"
	"runtime/debug"
	"slices"
	"strings"
	"testing"

	"github.com/tombolo-cni/tombolo"
	"github.com/tombolo-cni/tombolo/addr"
	"github.com/tombolo-cni/tombolo/bridge"
	"github.com/tombolo-cni/tombolo/bridge/bandwidth"
	"github.com/tombolo-cni/tombolo/bridge/share"
	"github.com/tombolo-cni/tombolo/bridge/vlan"
	"github.com/tombolo-cni/tombolo/dhcpc"
	"github.com/tombolo-cni/tombolo/dhcpc/transport"
	"github.com/tombolo-cni/tombolo/hostport"
	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
	"github.com/tombolo-cni/tombolo/ipam"
	"github.com/tombolo-cni/tombolo/netns"
	"github.com/tombolo-cni/tombolo/network"
	"github.com/tombolo-cni/tombolo/nft"
	"github.com/tombolo-cni/tombolo/nft/foreign"
	"github.com/tombolo-cni/tombolo/route"
)

// exported is everything that can be called, by package: functions by their names, and a
// zero of each type with methods. The API's golden files say whether any is missing.
func exported() map[string]map[string]any {
	return map[string]map[string]any{
		"tombolo": {
			"OpError": tombolo.OpError{}, "Difference": tombolo.Difference{},
			// Interfaces have nothing to call.
			"Socket": nil,
		},
		"netns": {
			"Open": netns.Open, "OpenSame": netns.OpenSame, "ID": netns.ID{}, "NS": netns.NS{},
			// Current and New take nothing.
			"Current": nil, "New": nil,
		},
		"addr": {
			"Broadcast": addr.Broadcast, "Dial": addr.Dial, "LinkLocal": addr.LinkLocal, "Listen": addr.Listen, "On": addr.On,
			"Address": addr.Address{}, "Conn": addr.Conn{}, "Watch": addr.Watch{},
		},
		"route": {
			"Dial": route.Dial, "On": route.On, "NoRoute": route.NoRoute,
			"Conn": route.Conn{}, "Route": route.Route{}, "Type": route.Type(0),
		},
		"vlan": {
			"On":   vlan.On,
			"Conn": vlan.Conn{}, "Membership": vlan.Membership{}, "Range": vlan.Range{}, "Ranges": vlan.Ranges(nil),
		},
		"bridge": {
			"Dial": bridge.Dial, "HostName": bridge.HostName, "On": bridge.On, "ProbeNetfilter": bridge.ProbeNetfilter,
			"Bridge": bridge.Bridge{}, "Conn": bridge.Conn{}, "Link": bridge.Link{}, "Port": bridge.Port{}, "Solicitation": bridge.Solicitation{},
		},
		"bandwidth": {
			"On": bandwidth.On, "IFBName": bandwidth.IFBName,
			"Conn": bandwidth.Conn{}, "Shape": bandwidth.Shape{},
		},
		"share": {"On": share.On, "Pair": share.Pair, "Conn": share.Conn{}},
		"hostport": {
			"Dial": hostport.Dial, "Listeners": hostport.Listeners, "NotHeldFor": hostport.NotHeldFor,
			"Conn": hostport.Conn{}, "Listener": hostport.Listener{},
		},
		"network": {
			"Open":       network.Open,
			"Inspection": network.Inspection{}, "Network": network.Network{}, "Node": network.Node{}, "Change": network.Change{}, "Upkeep": network.Upkeep{}, "Uplinks": network.Uplinks{}, "Report": network.Report{}, "Dead": network.Dead{},
		},
		"nft": {
			"CheckCallers": nft.CheckCallers, "Dial": nft.Dial, "On": nft.On, "OwnerOf": nft.OwnerOf,
			"ConflictError": nft.ConflictError{}, "Conn": nft.Conn{}, "Egress": nft.Egress(""), "Guard": nft.Guard(""), "Policy": nft.Policy(0), "Port": nft.Port{}, "Protocol": nft.Protocol(0),
		},
		"foreign": {
			"On":   foreign.On,
			"Conn": foreign.Conn{}, "Obstacle": foreign.Obstacle{},
		},
		"ipam": {
			"NewHostLocal": ipam.NewHostLocal, "RangeSetsOf": ipam.RangeSetsOf,
			"Address": ipam.Address{}, "HostLocal": ipam.HostLocal{},
			// Interfaces have nothing to call.
			"Allocator": nil,
		},
		"dhcpc": {
			"New": dhcpc.New, "NewMachine": dhcpc.NewMachine, "Release": dhcpc.Release,
			"Client": dhcpc.Client{}, "Hex": dhcpc.Hex{}, "Lease": dhcpc.Lease{}, "Machine": dhcpc.Machine{}, "Route": dhcpc.Route{},
			"Session": dhcpc.Session{},
			// Interfaces have nothing to call.
			"Transport": nil,
		},
		"transport": {
			"DialRaw": transport.DialRaw, "DialUDP": transport.DialUDP, "DialUDP6": transport.DialUDP6, "DialWitness": transport.DialWitness, "DialWitness6": transport.DialWitness6,
			"Dialer": transport.Dialer, "Send6": transport.Send6, "Release": transport.Release,
		},
	}
}

// callable are the names in an API file of which something can be called.
func callable(t *testing.T, name string) []string {
	t.Helper()
	data := must.Of(os.ReadFile(filepath.Join("testdata", "api", name+".txt"))).Get(t)
	var names []string
	for line := range strings.Lines(string(data)) {
		var found string
		if rest, ok := strings.CutPrefix(line, "func "); ok {
			found, _, _ = strings.Cut(rest, "(")
		} else if rest, ok := strings.CutPrefix(line, "method ("); ok {
			found, _, _ = strings.Cut(strings.TrimPrefix(rest, "*"), ")")
		}
		if found != "" && !slices.Contains(names, found) {
			names = append(names, found)
		}
	}
	return names
}

func TestNothingExportedIsMissingFromThePanicTest(t *testing.T) {
	t.Parallel()
	all := exported()
	for name, list := range all {
		want := callable(t, name)
		for _, n := range want {
			_, ok := list[n]
			expect.That(t, ok, "%s.%s can be called, and is not on the list", name, n)
		}
		for n := range list {
			expect.That(t, slices.Contains(want, n), "%s.%s is on the list, and cannot be called", name, n)
		}
	}
	files, err := filepath.Glob(filepath.Join("testdata", "api", "*.txt"))
	expect.That(t, err == nil && len(files) == len(all), "%d files of API, %d packages, %v", len(files), len(all), err)
}

// No exported function panics, whatever it is called with, and what can say so says that
// an argument cannot be meant.
func TestNoExportedFunctionPanics(t *testing.T) {
	ns := nstest.New(t)
	must.Succeed(t, ns.Do(func() error {
		for name, list := range exported() {
			for symbol, v := range list {
				if v == nil {
					continue
				}
				if reflect.TypeOf(v).Kind() == reflect.Func {
					callAll(t, name+"."+symbol, reflect.ValueOf(v))
					continue
				}
				callMethods(t, name+"."+symbol, v)
			}
		}
		return nil
	}))
}

// callMethods calls the methods of a zero value. Of a handle, which only its constructor makes, it calls those of a
// closed one.
func callMethods(t *testing.T, name string, zero any) {
	pointer := reflect.PointerTo(reflect.TypeOf(zero))
	value := reflect.TypeOf(zero)
	for i := range pointer.NumMethod() {
		method := pointer.Method(i)
		of := func(receiver reflect.Value) {
			callAll(t, name+"."+method.Name, receiver.Method(i))
		}
		if !handle(zero) {
			of(reflect.New(value))
		}
		if closed := closedOne(t, zero); closed.IsValid() {
			of(closed)
		}
	}
}

// handle reports whether only a constructor makes values of the type.
func handle(zero any) bool {
	switch zero.(type) {
	case netns.NS, vlan.Conn, addr.Conn, addr.Watch, route.Conn, bridge.Conn, bridge.Solicitation, bandwidth.Conn, hostport.Conn, nft.Conn, foreign.Conn, share.Conn, network.Node, network.Upkeep, network.Change, network.Uplinks, ipam.HostLocal, dhcpc.Client, dhcpc.Machine, dhcpc.Session:
		return true
	}
	return false
}

func closedOne(t *testing.T, zero any) reflect.Value {
	t.Helper()
	var v any
	var err error
	switch zero.(type) {
	case netns.NS:
		v, err = netns.New()
	case addr.Conn:
		v, err = addr.Dial(nil)
	case route.Conn:
		v, err = route.Dial(nil)
	case bridge.Conn:
		v, err = bridge.Dial(nil)
	case hostport.Conn:
		v, err = hostport.Dial(nil, nil)
	case nft.Conn:
		v, err = nft.Dial(nil)
	default:
		return reflect.Value{}
	}
	if err == nil {
		err = v.(interface{ Close() error }).Close()
	}
	must.Succeed(t, err)
	return reflect.ValueOf(v)
}

// callAll calls a function with zeros of all its arguments, and with plausible ones, and a context that is done.
func callAll(t *testing.T, name string, f reflect.Value) {
	callWith(t, name, f, reflect.Zero)
	callWith(t, name, f, meant)
}

func callWith(t *testing.T, name string, f reflect.Value, argument func(reflect.Type) reflect.Value) {
	done, cancel := context.WithCancel(context.Background())
	cancel()
	typ := f.Type()
	var args []reflect.Value
	for i := range typ.NumIn() {
		switch in := typ.In(i); {
		case typ.IsVariadic() && i == typ.NumIn()-1:
		case in == reflect.TypeFor[context.Context]():
			args = append(args, reflect.ValueOf(done))
		default:
			args = append(args, argument(in))
		}
	}
	out, panicked := call(f, args)
	if panicked != "" {
		t.Errorf("%s: %s", name, panicked)
		return
	}
	for _, o := range out {
		if c, ok := o.Interface().(interface{ Close() error }); ok && !o.IsNil() && !strings.HasSuffix(name, ".On") {
			_ = c.Close()
		}
	}
}

// meant gives an argument that passes for one, so that a call gets past the look at it.
func meant(in reflect.Type) reflect.Value {
	v := reflect.New(in).Elem()
	switch in {
	case reflect.TypeFor[netip.Addr]():
		return reflect.ValueOf(netip.MustParseAddr("192.0.2.1"))
	case reflect.TypeFor[netip.Prefix]():
		return reflect.ValueOf(netip.MustParsePrefix("192.0.2.1/24"))
	}
	switch in.Kind() {
	case reflect.String:
		v.SetString("eth0")
	case reflect.Int, reflect.Int64:
		v.SetInt(1)
	case reflect.Uint8, reflect.Uint32:
		v.SetUint(2)
	case reflect.Struct:
		for i := range v.NumField() {
			if v.Field(i).CanSet() {
				v.Field(i).Set(meant(in.Field(i).Type))
			}
		}
	}
	return v
}

func call(f reflect.Value, args []reflect.Value) (out []reflect.Value, panicked string) {
	defer func() {
		if r := recover(); r != nil {
			lines := strings.Split(string(debug.Stack()), "\n")
			at := ""
			for _, l := range lines {
				if strings.Contains(l, ".go:") && !strings.Contains(l, "/src/") && !strings.Contains(l, "panic_test.go") {
					at += strings.TrimSpace(l) + " "
				}
			}
			panicked = fmt.Sprintf("panic: %v at %.300s", r, at)
		}
	}()
	return f.Call(args), ""
}

// What takes a pod's namespace refuses one that is none, before anything is made.
func TestWhatIsNoPodIsRefused(t *testing.T) {
	t.Parallel()
	host := nstest.New(t)
	nstest.Run(t, host, "ip", "link", "add", "br0", "type", "bridge")
	conn := must.Of(bridge.Dial(host)).Get(t)
	t.Cleanup(func() { conn.Close() })
	closed, err := netns.New()
	if err == nil {
		err = closed.Close()
	}
	must.Succeed(t, err)
	port := bridge.Port{Bridge: "br0", BridgeIndex: nstest.Index(t, host, "br0"), Name: "veth0", Peer: "eth0", MTU: 1500}
	before := nstest.Run(t, host, "ip", "link")
	ctx := t.Context()
	for name, pod := range map[string]*netns.NS{"nil": nil, "zero": {}, "closed": closed, "the host's own": host} {
		_, attach := conn.Attach(ctx, pod, port)
		_, solicit := conn.Solicit(ctx, pod, port)
		for verb, err := range map[string]error{"Attach": attach, "Solicit": solicit} {
			if pod == host && verb != "Attach" {
				continue // there is nothing of the pod's to be found
			}
			expect.Is(t, err, tombolo.ErrInvalid, "%s of a pod that is %s", verb, name)
		}
		if name == "nil" || name == "the host's own" {
			continue
		}
		expect.Is(t, expect.Err(bridge.Dial(pod)), tombolo.ErrInvalid, "Dial in one that is %s", name)
	}
	expect.Equal(t, nstest.Run(t, host, "ip", "link"), before, "links before:\n%s\nafter", before)
}

// Values that make no sense in any combination are refused, and not only zeros are.
func TestValuesThatCannotBeMeantAreErrInvalid(t *testing.T) {
	t.Parallel()
	ns := nstest.New(t)
	addresses := must.Of(addr.Dial(ns)).Get(t)
	t.Cleanup(func() { addresses.Close() })
	routes := must.Of(route.Dial(ns)).Get(t)
	t.Cleanup(func() { routes.Close() })
	mac := net.HardwareAddr{2, 0, 0, 0, 0, 1}
	nothing := func(context.Context, netip.Addr) (dhcpc.Transport[*dhcpc.Packet], error) { return nil, nil }
	client, err := dhcpc.New(&dhcpc.Config{MAC: mac, Dial: nothing})
	must.Succeed(t, err)
	_, none := dhcpc.New(nil)
	_, noDial := dhcpc.New(&dhcpc.Config{MAC: mac})
	_, noMAC := dhcpc.NewMachine(&dhcpc.Config{})
	_, noTransport := client.Acquire(t.Context())
	p := netip.MustParsePrefix
	all := map[string]error{
		"an address that is none":              addresses.Add(t.Context(), addr.Address{Link: 1}),
		"an IPv4 address of an IPv6 peer":      addresses.Add(t.Context(), addr.Address{Prefix: p("10.1.0.1/24"), Peer: netip.MustParseAddr("fd00::1"), Link: 1}),
		"an IPv6 address of an IPv4 peer":      addresses.Add(t.Context(), addr.Address{Prefix: p("fd00::1/64"), Peer: netip.MustParseAddr("10.1.0.1"), Link: 1}),
		"an IPv4 address of a peer mapped":     addresses.Replace(t.Context(), addr.Address{Prefix: p("10.1.0.1/24"), Peer: netip.MustParseAddr("::ffff:10.1.0.2"), Link: 1}),
		"a default route without a family":     routes.Add(t.Context(), route.Route{Link: 1}),
		"a next hop that weighs 1000":          routes.Add(t.Context(), route.Route{Dst: p("10.2.0.0/16"), Nexthops: []route.Nexthop{{Link: 1, Weight: 1000}, {Link: 1}}}),
		"a DHCP client without configuration":  none,
		"a DHCP client without Dial":           noDial,
		"a DHCP client without MAC":            noMAC,
		"a Dial that gives no transport":       noTransport,
		"a lease that is none, to be released": client.Release(t.Context(), nil),
	}
	for name, err := range all {
		expect.Is(t, err, tombolo.ErrInvalid, "%s", name)
	}
}
