package network

import (
	"errors"
	"io/fs"
	"maps"
	"net/netip"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/tombolo-cni/tombolo/internal/state"
	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
	"github.com/tombolo-cni/tombolo/ipam"
	"github.com/tombolo-cni/tombolo/netns"
	"github.com/tombolo-cni/tombolo/nft"
	"github.com/tombolo-cni/tombolo/route"
)

func TestMain(m *testing.M) {
	nstest.Main(m)
}

// bed is a host's namespace with a state directory, a network, and one pod.
type bed struct {
	host *netns.NS
	node *Node
	nw   Network
	pod  Pod
}

func newBed(t *testing.T) *bed {
	t.Helper()
	b := &bed{host: nstest.New(t)}
	pod := nstest.New(t)
	var err error
	if b.node, err = Open(t.Context(), &Config{StateDir: filepath.Join(t.TempDir(), "state")}); err != nil {
		t.Fatal(err)
	}
	b.nw = Network{Name: "pods", Bridge: "cbr0", Gateway: true, DefaultGateway: true, Masquerade: true, Hairpin: true, Routed: true}
	b.pod = Pod{
		ContainerID: "c1", IfName: "eth0", NetNS: pod, Path: nstest.Path(t, pod),
		Addresses: []ipam.Address{{Prefix: netip.MustParsePrefix("10.61.0.2/24"), Gateway: netip.MustParseAddr("10.61.0.1")}},
	}
	return b
}

func (b *bed) do(t *testing.T, what func() error) {
	t.Helper()
	must.Succeed(t, b.host.Do(what))
}

func (b *bed) add(t *testing.T) *Attachment {
	t.Helper()
	var made *Attachment
	b.do(t, func() (err error) { made, err = b.node.Add(t.Context(), &b.nw, &b.pod); return err })
	return made
}

// mustBeAsMade compares the pod with what Add made of it.
func (b *bed) mustBeAsMade(t *testing.T) {
	t.Helper()
	b.do(t, func() error {
		diffs, err := b.node.Check(t.Context(), &b.nw, &b.pod)
		if len(diffs) > 0 {
			t.Errorf("it differs: %v", diffs)
		}
		return err
	})
}

// inside gives a call's session, without the lock.
func (b *bed) inside(t *testing.T, do func(*session) error) {
	t.Helper()
	b.do(t, func() error {
		s, err := openSession(b.node.cfg)
		if err != nil {
			return err
		}
		defer s.close()
		return do(s)
	})
}

func TestAttachmentsComeAndGo(t *testing.T) {
	t.Parallel()
	b := newBed(t)
	b.pod.Ports = []nft.Port{{Protocol: nft.TCP, HostPort: 8080, PodPort: 80}}
	made := b.add(t)
	if made.Addresses[0] != b.pod.Addresses[0] || made.Port != "veth"+made.hash() || !made.Ready || made.BridgeMTU == 0 || len(made.Routes) != 1 {
		t.Errorf("made %+v", made)
	}
	b.mustBeAsMade(t)
	b.do(t, func() error {
		_, err := b.node.Add(t.Context(), &b.nw, &b.pod)
		expect.Is(t, err, ErrExists, "the same again")
		expect.Is(t, b.node.Remove(t.Context(), "pods"), ErrAttached, "remove a network that has a pod")
		names, err := b.node.Networks(t.Context())
		if err != nil || !slices.Equal(names, []string{"pods"}) {
			t.Errorf("networks %v, %v", names, err)
		}
		list, err := b.node.Attachments(t.Context(), "pods")
		if err != nil || len(list) != 1 || list[0].Key != made.Key || list[0].Ports[0] != b.pod.Ports[0] {
			t.Errorf("attachments %v, %v", list, err)
		}
		expect.Success(t, b.node.Repair(t.Context()), "repair")
		for range 2 { // the second time it is gone
			expect.Success(t, b.node.Del(t.Context(), made.Key, nil), "del")
		}
		expect.Is(t, expect.Err(b.node.Check(t.Context(), &b.nw, &b.pod)), ErrNotAttached, "check of what is gone")
		expect.Success(t, b.node.Upkeep().Known(t.Context(), "pods"), "a network without pods")
		for range 2 { // the second time it is gone
			expect.Success(t, b.node.Remove(t.Context(), "pods"), "remove")
		}
		expect.Is(t, b.node.Upkeep().Known(t.Context(), "pods"), ErrInvalid, "a network that is gone")
		return nil
	})
	b.inside(t, func(s *session) error {
		expect.Is(t, expect.Err(s.Links.Link(t.Context(), "cbr0")), fs.ErrNotExist, "the bridge")
		return nil
	})
}

// Whatever cannot be meant is refused before anything is made.
func TestWhatCannotBeMeantMakesNothing(t *testing.T) {
	t.Parallel()
	for name, spoil := range map[string]func(*bed) (*Network, *Pod){
		"no network":           func(b *bed) (*Network, *Pod) { return nil, &b.pod },
		"no pod":               func(b *bed) (*Network, *Pod) { return &b.nw, nil },
		"a network of no name": func(b *bed) (*Network, *Pod) { b.nw.Name = ""; return &b.nw, &b.pod },
		"a name that is a way": func(b *bed) (*Network, *Pod) { b.nw.Name = "a/b"; return &b.nw, &b.pod },
		"no bridge":            func(b *bed) (*Network, *Pod) { b.nw.Bridge = ""; return &b.nw, &b.pod },
		"no container":         func(b *bed) (*Network, *Pod) { b.pod.ContainerID = ""; return &b.nw, &b.pod },
		"no interface":         func(b *bed) (*Network, *Pod) { b.pod.IfName = ""; return &b.nw, &b.pod },
		"no namespace":         func(b *bed) (*Network, *Pod) { b.pod.NetNS = nil; return &b.nw, &b.pod },
		"a namespace of none":  func(b *bed) (*Network, *Pod) { b.pod.NetNS = new(netns.NS); return &b.nw, &b.pod },
		"the host's own":       func(b *bed) (*Network, *Pod) { b.pod.NetNS = b.host; return &b.nw, &b.pod },
		"an address of none":   func(b *bed) (*Network, *Pod) { b.pod.Addresses = make([]ipam.Address, 1); return &b.nw, &b.pod },
		"a host port 0": func(b *bed) (*Network, *Pod) {
			b.pod.Ports = []nft.Port{{Protocol: nft.TCP, PodPort: 80}}
			return &b.nw, &b.pod
		},
		"a port of the pod 0": func(b *bed) (*Network, *Pod) {
			b.pod.Ports = []nft.Port{{Protocol: nft.TCP, HostPort: 80}}
			return &b.nw, &b.pod
		},
		"a port of no protocol": func(b *bed) (*Network, *Pod) {
			b.pod.Ports = []nft.Port{{HostPort: 80, PodPort: 80}}
			return &b.nw, &b.pod
		},
		"a limit of 7 bit/s": func(b *bed) (*Network, *Pod) { b.pod.Limits.Ingress.Rate = 7; return &b.nw, &b.pod },
		"a lease without a place": func(b *bed) (*Network, *Pod) {
			b.pod.Lease = &Lease{}
			return &b.nw, &b.pod
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := newBed(t)
			nw, pod := spoil(b)
			b.do(t, func() error {
				expect.Is(t, expect.Err(b.node.Add(t.Context(), nw, pod)), ErrInvalid, "add")
				return nil
			})
			b.inside(t, func(s *session) error {
				expect.Is(t, expect.Err(s.Links.Link(t.Context(), "cbr0")), fs.ErrNotExist, "the bridge")
				return nil
			})
		})
	}
}

// Another program may use the firewall's table; what it has there is none of our faults.
func TestElementsOfAnotherProgramAreToldApart(t *testing.T) {
	t.Parallel()
	b := newBed(t)
	b.add(t)
	theirs := nft.Endpoint{Owner: "embedder1", Network: "theirs", Bridge: "br7", Addrs: []netip.Addr{netip.MustParseAddr("10.99.0.2")}}
	lost := nft.Endpoint{Owner: "00000000abc", Network: "pods", Bridge: "cbr0", Addrs: []netip.Addr{netip.MustParseAddr("10.61.0.99")}}
	same := nft.Endpoint{Owner: "embedder2", Network: "pods", Bridge: "br7", Addrs: []netip.Addr{netip.MustParseAddr("10.99.0.3")}}
	inspected := func() (in *Inspection) {
		b.do(t, func() (err error) { in, err = b.node.Inspect(t.Context()); return err })
		return in
	}
	b.inside(t, func(s *session) error {
		return errors.Join(s.Firewall.Add(t.Context(), theirs), s.Firewall.Add(t.Context(), same))
	})
	if in := inspected(); in.Differs() || len(in.Stray) > 0 || len(in.Others) != 2 || !strings.Contains(strings.Join(in.Others, ","), "embedder1 of network theirs") {
		t.Errorf("%+v", in)
	}
	b.inside(t, func(s *session) error { return s.Firewall.Add(t.Context(), lost) })
	if in := inspected(); !in.Differs() || len(in.Stray) != 1 || len(in.Others) != 2 {
		t.Errorf("%+v", in)
	}
	// Nor does garbage collection take it.
	b.do(t, func() error { _, err := b.node.Collect(t.Context(), "pods", nil, nil); return err })
	if in := inspected(); len(in.Stray) > 0 || len(in.Others) != 2 || len(in.Attachments) > 0 {
		t.Errorf("collected: %+v", in)
	}
}

func TestPoolsAreThoseOfTheLastConfiguration(t *testing.T) {
	t.Parallel()
	b := newBed(t)
	dir := filepath.Join(t.TempDir(), "ipam")
	given := b.pod.Addresses
	b.pod.Addresses = nil
	use := func(last string) {
		r := ipam.Range{Subnet: given[0].Prefix.Masked(), RangeEnd: nstest.Addr(last)}
		h, err := ipam.NewHostLocal(&ipam.Config{Network: "pods", Dir: dir, Ranges: []ipam.RangeSet{{Ranges: []ipam.Range{r}}}})
		must.Succeed(t, err)
		b.nw.Allocator, b.nw.Origin = h, Origin{Type: "host-local", Dir: dir}
	}
	want := func(pools ...Pool) {
		t.Helper()
		got, err := b.node.Pools(t.Context())
		if !slices.Equal(got, pools) || err != nil {
			t.Errorf("pools %v, %v; want %v", got, err, pools)
		}
	}
	want()
	use("10.61.0.9")
	b.add(t)
	want(Pool{"pods", ipam.Pool{Name: "10.61.0.1-10.61.0.9 of 10.61.0.0/24", Size: 8, Reserved: 1}})
	// An ADD with another range notes that, and builds nothing.
	use("10.61.0.254")
	second := nstest.New(t)
	b.pod.ContainerID, b.pod.NetNS, b.pod.Path = "c2", second, nstest.Path(t, second)
	before := nstest.Run(t, b.host, "ip", "-o", "link", "show", "cbr0")
	b.add(t)
	want(Pool{"pods", ipam.Pool{Name: "10.61.0.0/24", Size: 253, Reserved: 2}})
	expect.Equal(t, nstest.Run(t, b.host, "ip", "-o", "link", "show", "cbr0"), before, "the bridge was %s, and is", before)
	// It is no longer given from a range.
	b.nw.Allocator, b.nw.Origin, b.pod.Addresses = nil, Origin{}, given
	b.pod.Addresses[0].Prefix = nstest.Prefix("10.61.0.99/24")
	third := nstest.New(t)
	b.pod.ContainerID, b.pod.NetNS, b.pod.Path = "c3", third, nstest.Path(t, third)
	b.add(t)
	want()
}

func TestRepairOfOneNetworkLeavesTheOthers(t *testing.T) {
	t.Parallel()
	b := newBed(t)
	b.add(t)
	second := nstest.New(t)
	b.nw.Name, b.nw.Bridge = "others", "cbr1"
	b.pod.NetNS, b.pod.Path = second, nstest.Path(t, second)
	b.pod.Addresses = []ipam.Address{{Prefix: nstest.Prefix("10.62.0.2/24"), Gateway: nstest.Addr("10.62.0.1")}}
	b.add(t)
	lacking := func() []string {
		var seen *Links
		b.do(t, func() (err error) { seen, err = b.node.Upkeep().Links(t.Context()); return err })
		return slices.Sorted(maps.Keys(seen.Lacking))
	}
	for _, tt := range []struct {
		harm   string
		lacks  []string
		remain []string // after one of them was repaired
	}{
		{"true", nil, nil},
		{"ip addr flush dev cbr0; ip addr flush dev cbr1", []string{"others", "pods"}, []string{"others"}},
		// What others have a part in has them repaired too.
		{"ip addr flush dev cbr0; ip addr flush dev cbr1; nft delete table inet tombolo", []string{"others", "pods"}, nil},
	} {
		nstest.Run(t, b.host, "sh", "-ec", tt.harm)
		if got := lacking(); !slices.Equal(got, tt.lacks) {
			t.Errorf("after %s networks %q lack something, want %q", tt.harm, got, tt.lacks)
		}
		b.do(t, func() error { return b.node.Upkeep().Repair(t.Context(), []string{"pods"}) })
		if got := lacking(); !slices.Equal(got, tt.remain) {
			t.Errorf("after %s and the repair networks %q lack something, want %q", tt.harm, got, tt.remain)
		}
		b.do(t, func() error { return b.node.Upkeep().Repair(t.Context(), []string{"others", "pods"}) })
		b.mustBeAsMade(t)
		if got := lacking(); len(got) > 0 {
			t.Errorf("after %s and all repairs networks %q lack something", tt.harm, got)
		}
	}
	b.do(t, func() error {
		expect.Is(t, b.node.Upkeep().Repair(t.Context(), []string{"../pods"}), ErrInvalid, "a bad name")
		return b.node.Upkeep().Repair(t.Context(), nil)
	})
}

// TestAPortIsPassedOnToAnAddUnderWay has the attachment that publishes a container's port deleted
// after the Add of another one has found it there, and before that is on record.
func TestAPortIsPassedOnToAnAddUnderWay(t *testing.T) {
	t.Parallel()
	b := newBed(t)
	b.pod.Ports = []nft.Port{{Protocol: nft.TCP, HostPort: 8080, PodPort: 80}}
	first := b.add(t)
	passed := make(chan struct{})
	var deleted error
	ended := make(chan struct{})
	del := func() {
		defer close(ended)
		node, err := Open(t.Context(), &Config{StateDir: b.node.cfg.Dir.Path(), Step: func(step string) error {
			if step == "firewall" {
				close(passed)
			}
			return nil
		}})
		if err == nil {
			err = b.host.Do(func() error { return node.Del(t.Context(), first.Key, nil) })
		}
		deleted = err
	}
	node, err := Open(t.Context(), &Config{StateDir: b.node.cfg.Dir.Path(), Step: func(step string) error {
		if step == "firewall" {
			go del()
			<-passed
		}
		return nil
	}})
	must.Succeed(t, err)
	b.nw.Name, b.nw.Bridge, b.pod.IfName = "others", "cbr1", "eth1"
	b.pod.Addresses = []ipam.Address{{Prefix: nstest.Prefix("10.62.0.2/24"), Gateway: nstest.Addr("10.62.0.1")}}
	b.do(t, func() error { _, err := node.Add(t.Context(), &b.nw, &b.pod); return err })
	<-ended
	if deleted != nil {
		t.Error(deleted)
	}
	if got := nstest.Run(t, b.host, "nft", "list", "map", "inet", "tombolo", "hostports4"); !strings.Contains(got, "8080 ") || !strings.Contains(got, "10.62.0.2 . 80") {
		t.Errorf("the port leads to\n%s", got)
	}
	b.do(t, func() error {
		list, err := b.node.Attachments(t.Context(), "others")
		if err == nil && (len(list) != 1 || len(list[0].Ports) != 1) {
			t.Errorf("attachments %+v", list)
		}
		return err
	})
	b.mustBeAsMade(t)
}

func TestRangesComeBackFromARecord(t *testing.T) {
	t.Parallel()
	given := []ipam.RangeSet{
		{Ranges: []ipam.Range{
			{Subnet: nstest.Prefix("10.1.0.0/24"), RangeStart: nstest.Addr("10.1.0.9"), RangeEnd: nstest.Addr("10.1.0.20")},
			{Subnet: nstest.Prefix("10.2.0.0/24"), Gateway: nstest.Addr("10.9.9.9")},
		}},
		{Ranges: []ipam.Range{{Subnet: nstest.Prefix("fd01::/64")}}},
	}
	h, err := ipam.NewHostLocal(&ipam.Config{Network: "pods", Ranges: given})
	must.Succeed(t, err)
	want := &state.Network{Name: "pods", Pools: h.RangeSets()}
	dir, err := state.Open(t.TempDir())
	must.Succeed(t, err)
	must.Succeed(t, dir.SaveNetwork(want))
	got, err := dir.LoadNetwork("pods")
	must.Succeed(t, err)
	expect.NoDiff(t, cmp.Diff(want, got, cmpopts.EquateComparable(netip.Addr{}, netip.Prefix{})))
	expect.Equal(t, samePools(want, got), true, "they are the same")
	want.Pools[0].Ranges[1].Gateway = netip.Addr{}
	expect.Equal(t, samePools(want, got), false, "without a gateway they are the same")
}

// That it is refused where there is none, test/vm/run.sh noipv6 shows.
func TestIPv6IsRefusedOnlyWhereItIsAskedFor(t *testing.T) {
	t.Parallel()
	with6 := []netip.Prefix{nstest.Prefix("10.1.0.0/16"), nstest.Prefix("fd01::/64")}
	for name, tt := range map[string]struct {
		slaac   bool
		subnets []netip.Prefix
		routes  []route.Route
		asked   bool
	}{
		"IPv4":         {false, with6[:1], []route.Route{{Dst: nstest.Prefix("0.0.0.0/0")}}, false},
		"no addresses": {false, nil, nil, false},
		"both":         {false, with6, nil, true},
		"slaac":        {true, nil, nil, true},
		"a route":      {false, with6[:1], []route.Route{{Dst: nstest.Prefix("::/0")}}, true},
	} {
		if err := refuseIPv6("pods", tt.slaac, tt.subnets, tt.routes...); (err != nil) != (tt.asked && !nstest.HasIPv6()) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// A bridge that is made anew answers under the MAC that its pods have in their
// neighbour tables.
func TestBridgesMACIsTheSameForAnEpoch(t *testing.T) {
	t.Parallel()
	one := state.Epoch{Boot: "b", ID: "1"}.Token()
	mac := bridgeMAC(one, "cbr0")
	if len(mac) != 6 || mac[0]&3 != 2 {
		t.Errorf("%s is not a unicast MAC that is locally administered", mac)
	}
	if again := bridgeMAC(one, "cbr0"); again.String() != mac.String() {
		t.Errorf("%s, then %s", mac, again)
	}
	later := state.Epoch{Boot: "b", ID: "2"}.Token()
	for what, other := range map[string]string{"bridge": bridgeMAC(one, "br0").String(), "life": bridgeMAC(later, "cbr0").String()} {
		if other == mac.String() {
			t.Errorf("another %s has the same, %s", what, other)
		}
	}
}
