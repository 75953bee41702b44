package network

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/tombolo-cni/tombolo/bridge"
	"github.com/tombolo-cni/tombolo/internal/endpoint"
	"github.com/tombolo-cni/tombolo/internal/state"
	"github.com/tombolo-cni/tombolo/ipam"
	"github.com/tombolo-cni/tombolo/network/internal/recorded"
	"github.com/tombolo-cni/tombolo/network/internal/session"
	"github.com/tombolo-cni/tombolo/route"
)

// comparable values of netip are compared as such.
func netipValues() cmp.Option { return cmpopts.EquateComparable(netip.Addr{}, netip.Prefix{}) }

// addresses are pods' addresses without gateways.
func addresses(prefixes ...string) []ipam.Address {
	var list []ipam.Address
	for _, p := range prefixes {
		list = append(list, ipam.Address{Prefix: netip.MustParsePrefix(p)})
	}
	return list
}

// dualStack is what host-local gives: an address of each family, with gateways.
func dualStack() []ipam.Address {
	list := addresses("10.61.0.2/24", "fd61::2/64")
	list[0].Gateway, list[1].Gateway = netip.MustParseAddr("10.61.0.1"), netip.MustParseAddr("fd61::1")
	return list
}

func TestAddressesComeIPv4First(t *testing.T) {
	t.Parallel()
	given := []ipam.Address{
		{Prefix: netip.MustParsePrefix("fd61::2/64"), Gateway: netip.MustParseAddr("fd61::1")},
		{Prefix: netip.MustParsePrefix("10.61.0.2/24"), Gateway: netip.MustParseAddr("10.61.0.1")},
		{Prefix: netip.MustParsePrefix("fd62::2/64")},
		{Prefix: netip.MustParsePrefix("10.62.0.2/24")},
	}
	want := addresses("10.61.0.2/24", "10.62.0.2/24", "fd61::2/64", "fd62::2/64")
	want[0].Gateway, want[2].Gateway = netip.MustParseAddr("10.61.0.1"), netip.MustParseAddr("fd61::1")
	got, err := givenOf(given, nil)
	if diff := cmp.Diff(want, got.addresses, netipValues()); diff != "" || err != nil {
		t.Errorf("%v, addresses (-want +got):\n%s", err, diff)
	}
}

// The short name of an attachment is the same wherever it stands.
func TestHashesAgree(t *testing.T) {
	t.Parallel()
	key := Key{Network: "pods", ContainerID: "c1", IfName: "eth0"}
	rec := &state.Attachment{Network: "pods", ContainerID: "c1", IfName: "eth0"}
	if rec.Hash() != key.hash() || bridge.HostName("pods", "c1", "eth0") != "veth"+key.hash() {
		t.Errorf("record %s, key %s, port %s", rec.Hash(), key.hash(), bridge.HostName("pods", "c1", "eth0"))
	}
}

func TestDefaultRoutes(t *testing.T) {
	t.Parallel()
	on, off := Network{DefaultGateway: true}, Network{}
	four := route.Route{Dst: netip.MustParsePrefix("0.0.0.0/0"), Gateway: netip.MustParseAddr("10.61.0.1")}
	six := route.Route{Dst: netip.MustParsePrefix("::/0"), Gateway: netip.MustParseAddr("fd61::1")}
	given := route.Route{Dst: netip.MustParsePrefix("0.0.0.0/0"), Gateway: netip.MustParseAddr("10.61.0.9")}
	elsewhere := route.Route{Dst: netip.MustParsePrefix("0.0.0.0/0"), Gateway: netip.MustParseAddr("10.61.0.9"), Table: 100}
	main := route.Route{Dst: netip.MustParsePrefix("0.0.0.0/0"), Gateway: netip.MustParseAddr("10.61.0.9"), Table: 254}
	half := route.Route{Dst: netip.MustParsePrefix("0.0.0.0/1")}
	for _, tt := range []struct {
		name      string
		nw        Network
		addresses []ipam.Address
		given     []route.Route
		want      []route.Route
	}{
		{"each family that has a gateway", on, dualStack(), nil, []route.Route{four, six}},
		{"IPv4 alone", on, dualStack()[:1], nil, []route.Route{four}},
		{"a family without a gateway", on, addresses("10.61.0.2/24"), nil, nil},
		{"the first gateway of a family", on, append(addresses("10.60.0.2/24"), dualStack()...), nil, []route.Route{four, six}},
		{"not where the ipam gave one", on, dualStack(), []route.Route{given}, []route.Route{given, six}},
		{"nor where it named the main table for it", on, dualStack(), []route.Route{main}, []route.Route{main, six}},
		{"one of another table is none", on, dualStack()[:1], []route.Route{elsewhere}, []route.Route{elsewhere, four}},
		{"half of everything is none", on, dualStack()[:1], []route.Route{half}, []route.Route{half, four}},
		{"no default gateway", off, dualStack(), []route.Route{half}, []route.Route{half}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			before := append([]route.Route(nil), tt.given...)
			got := withDefaultRoutes(&tt.nw, tt.addresses, tt.given)
			if diff := cmp.Diff(tt.want, got, netipValues(), cmpopts.EquateEmpty()); diff != "" {
				t.Errorf("routes (-want +got):\n%s", diff)
			}
			if diff := cmp.Diff(before, tt.given, netipValues()); diff != "" {
				t.Errorf("the ipam's own list was changed: %s", diff)
			}
		})
	}
}

func TestPodRoutes(t *testing.T) {
	t.Parallel()
	scope := func(s route.Scope) *route.Scope { return &s }
	// What every route has, in short.
	to := func(dst, gw string, change func(*route.Route)) route.Route {
		r := route.Route{Dst: netip.MustParsePrefix(dst), Protocol: route.ProtocolTombolo}
		if gw != "" {
			r.Gateway = netip.MustParseAddr(gw)
		}
		if change != nil {
			change(&r)
		}
		return r
	}
	onLink := func(r *route.Route) { r.OnLink = true }
	for _, tt := range []struct {
		name      string
		nw        Network
		addresses []ipam.Address
		given     []route.Route
		want      []route.Route
	}{
		{"none", Network{}, dualStack(), nil, nil},
		{"default routes", Network{DefaultGateway: true}, dualStack(), nil,
			[]route.Route{to("0.0.0.0/0", "10.61.0.1", nil), to("::/0", "fd61::1", nil)}},
		{"without a gateway of its own, by the address's", Network{}, dualStack(),
			[]route.Route{{Dst: netip.MustParsePrefix("192.0.2.0/24")}, {Dst: netip.MustParsePrefix("2001:db8::/32")}},
			[]route.Route{to("192.0.2.0/24", "10.61.0.1", nil), to("2001:db8::/32", "fd61::1", nil)}},
		{"without any gateway", Network{}, addresses("10.61.0.2/24"),
			[]route.Route{{Dst: netip.MustParsePrefix("192.0.2.0/24")}}, []route.Route{to("192.0.2.0/24", "", nil)}},
		{"a scope says that there is none", Network{}, dualStack(),
			[]route.Route{{Dst: netip.MustParsePrefix("192.0.2.0/24"), Scope: scope(253)}},
			[]route.Route{to("192.0.2.0/24", "", func(r *route.Route) { r.Scope = scope(route.ScopeLink) })}},
		{"host bits are dropped", Network{}, dualStack(),
			[]route.Route{{Dst: netip.MustParsePrefix("192.0.2.7/24"), Gateway: netip.MustParseAddr("10.61.0.3")}}, []route.Route{to("192.0.2.0/24", "10.61.0.3", nil)}},
		{"every attribute", Network{}, dualStack(),
			[]route.Route{{Dst: netip.MustParsePrefix("192.0.2.0/24"), Gateway: netip.MustParseAddr("10.61.0.3"), MTU: 1300, AdvMSS: 1200, Priority: 50, Table: 100, Scope: scope(0)}},
			[]route.Route{to("192.0.2.0/24", "10.61.0.3", func(r *route.Route) {
				r.MTU, r.AdvMSS, r.Priority, r.Table, r.Scope = 1300, 1200, 50, 100, scope(route.ScopeGlobal)
			})}},
		{"a gateway off link", Network{DefaultGateway: true},
			[]ipam.Address{{Prefix: netip.MustParsePrefix("10.61.0.2/32"), Gateway: netip.MustParseAddr("10.99.0.1")}}, nil,
			[]route.Route{to("0.0.0.0/0", "10.99.0.1", onLink)}},
		{"a link-local gateway is on link", Network{},
			dualStack(), []route.Route{{Dst: netip.MustParsePrefix("2001:db8::/32"), Gateway: netip.MustParseAddr("fe80::1")}}, []route.Route{to("2001:db8::/32", "fe80::1", nil)}},
		{"on link by another route's help", Network{}, dualStack(),
			// The second can be made only after the first.
			[]route.Route{{Dst: netip.MustParsePrefix("0.0.0.0/0"), Gateway: netip.MustParseAddr("192.0.2.1")}, {Dst: netip.MustParsePrefix("192.0.2.1/32"), Scope: scope(253)}},
			[]route.Route{to("192.0.2.1/32", "", func(r *route.Route) { r.Scope = scope(route.ScopeLink) }), to("0.0.0.0/0", "192.0.2.1", onLink)}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			got := podRoutes(&tt.nw, tt.addresses, tt.given)
			if diff := cmp.Diff(tt.want, got, netipValues(), cmpopts.EquateEmpty()); diff != "" {
				t.Errorf("routes (-want +got):\n%s", diff)
			}
		})
	}
}

func TestAddressMACIsThatOfTheFirstIPv4Address(t *testing.T) {
	t.Parallel()
	if got := addressMAC(addresses("fd61::2/64", "10.61.0.2/24", "10.61.0.3/24")); got.String() != "0a:58:0a:3d:00:02" {
		t.Errorf("MAC is %s", got)
	}
	if got := addressMAC(addresses("fd61::2/64")); got != nil {
		t.Errorf("MAC without IPv4 is %s", got)
	}
	var none net.HardwareAddr
	if diff := cmp.Diff(none, addressMAC(nil)); diff != "" {
		t.Errorf("MAC without addresses: %s", diff)
	}
}

func TestUndoGoesBackThroughAllSteps(t *testing.T) {
	t.Parallel()
	var order []int
	var u undo
	boom := errors.New("boom")
	for i := range 3 {
		u.push(func(ctx context.Context) error {
			order = append(order, i)
			if _, limited := ctx.Deadline(); !limited {
				t.Error("a step back has no time limit")
			}
			if i == 1 {
				return boom
			}
			return nil
		})
	}
	cause := context.DeadlineExceeded // which must not keep anything from being undone
	err := u.run(cause)
	if diff := cmp.Diff([]int{2, 1, 0}, order); diff != "" {
		t.Errorf("order (-want +got):\n%s", diff)
	}
	if !errors.Is(err, cause) || !errors.Is(err, boom) {
		t.Errorf("error is %v", err)
	}
}

// A hash that is not what the names give shows whether any of these computes it once more.
func TestHashOfAKeyIsPassedOnAndNotComputedAgain(t *testing.T) {
	t.Parallel()
	const hash = "0123456789a"
	own := ipam.Owner{ContainerID: "c1", IfName: "eth0"}
	rec := (&Pod{ContainerID: "c1", IfName: "eth0"}).record(&Network{Name: "pods", Bridge: "cbr0"}, hash)
	dir, err := state.Open(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	pending, err := dir.Create(rec)
	if err != nil {
		t.Fatal(err)
	}
	defer pending.Close()
	if _, err := dir.LockAttachment("pods", hash); !errors.Is(err, state.ErrBusy) {
		t.Errorf("the record is not the hash's: %v", err)
	}
	target, node := recorded.Target(rec), (&session.Session{}).IPAMNode("pods", own, hash)
	for what, text := range map[string]string{
		"port": rec.HostIf, "owner": string(endpoint.Of(rec).Owner), "alias": endpoint.AliasOf(rec),
		"owner of the ifb": target.Owner, "alias of the ifb": target.Alias, "allocator": node.Hash(own),
	} {
		if !strings.Contains(text, hash) {
			t.Errorf("%s %q is not of hash %s", what, text, hash)
		}
	}
	if got := node.Hash(ipam.Owner{ContainerID: "c2", IfName: "eth0"}); got == hash {
		t.Error("another container has the same hash")
	}
}

func TestAPodThatLeasesNeedsNoMACOfItsOwn(t *testing.T) {
	t.Parallel()
	prepare := func(pod *Pod) (*adding, error) {
		pod.Lease = &Lease{KeeperOptional: true}
		a := &adding{nw: &Network{Name: "lan"}, pod: pod, base: &state.Attachment{}}
		_, err := a.prepareLease(t.TempDir())
		return a, err
	}
	asked := &Pod{ContainerID: "c1", IfName: "eth0"}
	a, err := prepare(asked)
	if err != nil || len(a.pod.MAC) != 6 || a.base.MAC != a.pod.MAC.String() || asked.MAC != nil {
		t.Errorf("it has %s, %s on record, and was given %s: %v", a.pod.MAC, a.base.MAC, asked.MAC, err)
	}
	if _, err := prepare(&Pod{ContainerID: "c1", IfName: "eth0", MAC: make(net.HardwareAddr, 8)}); !errors.Is(err, ErrInvalid) {
		t.Errorf("a MAC of 8 bytes: %v", err)
	}
}
