package bridge_test

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo"
	"github.com/tombolo-cni/tombolo/bridge"
	"github.com/tombolo-cni/tombolo/bridge/vlan"
	"github.com/tombolo-cni/tombolo/internal/nl"
	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nltest"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
)

// shown gives what iproute2, as the referee, says of br0: of the words below, those
// that it prints.
func shown(tb testing.TB, n *node) string {
	tb.Helper()
	details := strings.NewReplacer(",", " ", "<", " ", ">", " ").Replace(nstest.Run(tb, n.ns, "ip", "-d", "link", "show", "br0"))
	var list []string
	for _, word := range []string{"PROMISC", "nf_call_iptables 1", "nf_call_ip6tables 1", "nf_call_arptables 1"} {
		if strings.Contains(details, " "+word+" ") {
			list = append(list, word)
		}
	}
	return strings.Join(list, ", ")
}

func TestEnsureSetsPromiscuousAndNFCall(t *testing.T) {
	t.Parallel()
	on, off := new(true), new(false)
	const both = "nf_call_iptables 1, nf_call_ip6tables 1"
	// The steps are taken on one bridge, which the first of them makes.
	steps := []struct {
		promiscuous, nfCall *bool
		byHand              []string // iproute2's arguments, before the step
		changed             bool
		want                string
	}{
		{on, on, nil, true, "PROMISC, " + both},
		{on, on, nil, false, "PROMISC, " + both},
		{nil, nil, nil, false, "PROMISC, " + both},
		{off, nil, nil, true, both},
		{off, on, nil, false, both},
		{nil, off, nil, true, ""},
		{off, off, nil, false, ""},
		{nil, nil, []string{"promisc", "on"}, false, "PROMISC"},
		{nil, on, []string{"type", "bridge", "nf_call_ip6tables", "1"}, true, "PROMISC, " + both},
		{nil, on, []string{"type", "bridge", "nf_call_iptables", "0"}, true, "PROMISC, " + both},
		{nil, on, []string{"type", "bridge", "nf_call_arptables", "1"}, false, "PROMISC, " + both + ", nf_call_arptables 1"},
		{nil, off, nil, true, "PROMISC, nf_call_arptables 1"},
		{off, on, []string{"down"}, true, both + ", nf_call_arptables 1"},
	}
	n := &node{ns: nstest.New(t)}
	n.conn = must.Of(bridge.Dial(n.ns)).Get(t)
	defer n.conn.Close()
	for i, step := range steps {
		if step.byHand != nil {
			nstest.Run(t, n.ns, "ip", append([]string{"link", "set", "br0"}, step.byHand...)...)
		}
		br := br0()
		br.Promiscuous, br.NFCall = step.promiscuous, step.nfCall
		l, changed, err := ensure(t, n.conn, br)
		must.Succeed(t, err, "step %d", i)
		expect.Equal(t, changed, step.changed, "step %d: changed is", i)
		got := shown(t, n)
		expect.Equal(t, got, step.want, "step %d: ip shows", i)
		if l.Promiscuous != strings.Contains(got, "PROMISC") || l.Bridge.NFCallIPTables != strings.Contains(got, "iptables") ||
			l.Bridge.NFCallIP6Tables != strings.Contains(got, "ip6tables") || !l.Up {
			t.Errorf("step %d: Ensure gives %+v with %+v, where ip shows %q", i, l, l.Bridge, got)
		}
		expect.Of(checkBridge(t, n.conn, br)).Len(t, 0, "step %d: CheckBridge", i)
	}
}

func TestCaptureOnTheBridgeIsNotPromiscuousMode(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	br := br0()
	br.Promiscuous = new(false)
	t.Run("while it runs", func(t *testing.T) {
		capture(t, n.ns, n.link.Index)
		out := nstest.Run(t, n.ns, "ip", "-d", "link", "show", "br0")
		must.That(t, strings.Contains(out, "promiscuity 1"), "the capture does not make it promiscuous:\n%s", out)
		if l, changed, err := ensure(t, n.conn, br); err != nil || changed || l.Promiscuous {
			t.Errorf("Ensure: promiscuous %t, changed %t, %v", l.Promiscuous, changed, err)
		}
		br.Promiscuous = new(true)
		expect.Of(checkBridge(t, n.conn, br)).Len(t, 1, "CheckBridge")
		if changed, err := n.conn.Ensure(t.Context(), br); err != nil || !changed {
			t.Errorf("Ensure: changed %t, %v", changed, err)
		}
	})
	expect.Equal(t, shown(t, n), "PROMISC", "after the capture ip shows")
}

// recorded is a connection to n, and what it sends.
func recorded(tb testing.TB, n *node) (*bridge.Conn, *nltest.Recorder) {
	tb.Helper()
	tr := must.Of(nl.Open(unix.NETLINK_ROUTE, n.ns)).Get(tb)
	r := nltest.Record(tr)
	conn := bridge.On(nl.New(r), nil)
	tb.Cleanup(func() { conn.Close() })
	return conn, r
}

func TestEnsureOfAnUnchangedBridgeIsOneRequest(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	attach(t, n, port(0)) // a carrier: without one the kernel forgets neighbours by itself
	conn, sent := recorded(t, n)
	br := br0()
	br.Promiscuous, br.NFCall = new(true), new(true)
	_, err := conn.Ensure(t.Context(), br)
	must.That(t, err == nil, "%v", err)
	sent.Sent()
	neighbour := []string{"neigh", "replace", "10.44.0.77", "lladdr", "02:00:00:00:00:77", "dev", "br0", "nud", "reachable"}
	neighbours := func() string { return nstest.Run(t, n.ns, "ip", "neigh", "show", "10.44.0.77") }

	nstest.Run(t, n.ns, "ip", neighbour...)
	changed, err := conn.Ensure(t.Context(), br)
	expect.That(t, err == nil && !changed, "Ensure: changed %t, %v", changed, err)
	expect.Equal(t, len(sent.Sent()), 1, "datagrams")
	expect.That(t, neighbours() != "", "the bridge's neighbours are forgotten")
	// To change something else does not cost them either.
	nstest.Run(t, n.ns, "ip", "link", "set", "br0", "promisc", "off")
	changed, err = conn.Ensure(t.Context(), br)
	expect.That(t, err == nil && changed, "Ensure: changed %t, %v", changed, err)
	expect.Equal(t, len(sent.Sent()), 2, "datagrams")
	expect.That(t, neighbours() != "", "the bridge's neighbours are forgotten")
	// One of somebody else has to be pinned, which is what costs them.
	br.Alias = "another"
	changed, err = conn.Ensure(t.Context(), br)
	expect.That(t, err == nil && !changed, "Ensure: changed %t, %v", changed, err)
	expect.Equal(t, len(sent.Sent()), 2, "datagrams")
	expect.Equal(t, neighbours(), "", "the kernel has come to keep neighbours, so that the MAC could always be pinned")
}

func TestNewBridgeHasTheMTUOfEthernet(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	l, _, err := ensure(t, n.conn, bridge.Bridge{Name: "br1"})
	must.That(t, err == nil && l.MTU == 1500, "Ensure: %+v, %v, want an MTU of 1500", l, err)
	// It is pinned: a port's does not become the bridge's, and Ensure leaves it.
	p := port(0)
	p.Bridge, p.MTU = "br1", 1300
	attach(t, n, p)
	l, changed, err := ensure(t, n.conn, bridge.Bridge{Name: "br1"})
	expect.That(t, err == nil && !changed && l.MTU == 1500, "with a port, Ensure: %+v, changed %t, %v", l, changed, err)
}

func TestForeignBridgeGetsItsMACPinned(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	nstest.Run(t, n.ns, "ip", "link", "add", "br1", "type", "bridge")
	l, _, err := ensure(t, n.conn, bridge.Bridge{Name: "br1", MTU: 1400, Alias: "node"})
	must.Succeed(t, err)
	p := port(0)
	p.Bridge, p.MAC = "br1", mac("02:00:00:00:00:00") // lower than any that the kernel chooses
	attach(t, n, p)
	after := must.Of(n.conn.Link(t.Context(), "br1")).Get(t)
	expect.That(t, after.MAC.String() == l.MAC.String() && after.Alias == "",
		"it has MAC %s and alias %q, want %s and none", after.MAC, after.Alias, l.MAC)
}

func TestRefusedCorrectionIsNoChange(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	fault := &nltest.Fault{Type: unix.RTM_NEWLINK, Errno: unix.EPERM, Text: "not today"}
	conn := faultyConn(t, n, []*nltest.Fault{fault}, nil)
	br := br0()
	br.NFCall = new(true)
	l, changed, err := ensure(t, conn, br)
	nltest.MustHaveFired(t, fault)
	if !errors.Is(err, unix.EPERM) || !strings.Contains(err.Error(), "not today") || changed || l.Bridge.NFCallIPTables {
		t.Errorf("Ensure: %+v, changed %t, %v", l.Bridge, changed, err)
	}
}

// withoutNetfilter is a kernel that was built without CONFIG_BRIDGE_NETFILTER: it
// takes the attributes, ignores them, and never gives them.
type withoutNetfilter struct{ nl.Transport }

func (k withoutNetfilter) Send(b []byte) error {
	b = append([]byte(nil), b...)
	rename(b)
	return k.Transport.Send(b)
}

func (k withoutNetfilter) Receive(b []byte) (int, error) {
	n, err := k.Transport.Receive(b)
	if err == nil {
		rename(b[:n])
	}
	return n, err
}

// rename gives the attributes a number that means nothing to either side. Of one
// byte each, they stand side by side in requests and in replies.
func rename(b []byte) {
	for at := 0; at+16 <= len(b); at += 4 {
		length := binary.NativeEndian.Uint16(b[at:])
		first, second := binary.NativeEndian.Uint16(b[at+2:]), binary.NativeEndian.Uint16(b[at+10:])
		if length == 5 && first == unix.IFLA_BR_NF_CALL_IPTABLES && second == unix.IFLA_BR_NF_CALL_IP6TABLES {
			binary.NativeEndian.PutUint16(b[at+2:], unix.IFLA_BR_PAD)
			binary.NativeEndian.PutUint16(b[at+10:], unix.IFLA_BR_PAD)
		}
	}
}

func TestNFCallWhereTheKernelCannot(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	tr := must.Of(nl.Open(unix.NETLINK_ROUTE, n.ns)).Get(t)
	conn := bridge.On(nl.New(withoutNetfilter{tr}), nil)
	defer conn.Close()
	br := br0()
	br.NFCall, br.Promiscuous = new(true), new(true)
	l, changed, err := ensure(t, conn, br)
	expect.That(t, errors.Is(err, bridge.ErrNoNetfilter) && changed && l.Promiscuous,
		"Ensure: %+v, changed %t, %v, want all else done and ErrNoNetfilter", l, changed, err)
	var opErr *tombolo.OpError
	expect.That(t, errors.As(err, &opErr) && opErr.Object == "br0", "%v is not an OpError of br0", err)
	expect.Equal(t, shown(t, n), "PROMISC", "ip shows")
	if changed, err := conn.Ensure(t.Context(), br); !errors.Is(err, bridge.ErrNoNetfilter) || changed {
		t.Errorf("second Ensure: changed %t, %v", changed, err)
	}
	expect.Of(checkBridge(t, conn, br)).Len(t, 2, "CheckBridge")
	br.NFCall = new(false)
	_, err = conn.Ensure(t.Context(), br)
	expect.That(t, err == nil, "without what it cannot do, Ensure: %v", err)
}

// checkBridge compares a bridge with what br describes.
func checkBridge(t *testing.T, conn *bridge.Conn, br bridge.Bridge) ([]tombolo.Difference, error) {
	t.Helper()
	l, err := conn.Link(t.Context(), br.Name)
	if errors.Is(err, fs.ErrNotExist) {
		err = nil
	}
	return br.Differences(l), err
}

func TestCheckBridgeFindsEachDifference(t *testing.T) {
	t.Parallel()
	want := br0()
	want.MAC, want.Promiscuous, want.NFCall = mac("02:00:00:00:00:01"), new(true), new(true)
	cases := map[string]struct {
		byHand []string // iproute2's arguments
		want   string
	}{
		"none":            {[]string{"link", "show", "br0"}, ""},
		"down":            {[]string{"link", "set", "br0", "down"}, "bridge br0: link is down, should be up"},
		"MTU":             {[]string{"link", "set", "br0", "mtu", "1500"}, "bridge br0: MTU is 1500, should be 1400"},
		"MAC":             {[]string{"link", "set", "br0", "address", "02:00:00:00:00:02"}, "bridge br0: MAC is 02:00:00:00:00:02, should be 02:00:00:00:00:01"},
		"not promiscuous": {[]string{"link", "set", "br0", "promisc", "off"}, "bridge br0: promiscuous mode is off, should be on"},
		"IPv4 call":       {[]string{"link", "set", "br0", "type", "bridge", "nf_call_iptables", "0"}, "bridge br0: nf_call_iptables is off, should be on"},
		"IPv6 call":       {[]string{"link", "set", "br0", "type", "bridge", "nf_call_ip6tables", "0"}, "bridge br0: nf_call_ip6tables is off, should be on"},
		"ARP call":        {[]string{"link", "set", "br0", "type", "bridge", "nf_call_arptables", "1"}, ""},
		"gone":            {[]string{"link", "del", "br0"}, "bridge br0: link br0 is missing"},
	}
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			n := &node{ns: nstest.New(t)}
			conn, sent := recorded(t, n)
			_, err := conn.Ensure(t.Context(), want)
			must.That(t, err == nil, "%v", err)
			nstest.Run(t, n.ns, "ip", c.byHand...)
			sent.Sent()
			diffs, err := checkBridge(t, conn, want)
			must.Succeed(t, err)
			if got := lines(diffs); got != c.want {
				t.Errorf("CheckBridge says:\n%s\nwant: %s", got, c.want)
			}
			expect.Equal(t, len(sent.Sent()), 1, "datagrams")
		})
	}
	t.Run("what is left open is not compared", func(t *testing.T) {
		n := &node{ns: nstest.New(t)}
		conn, _ := recorded(t, n)
		if _, err := conn.Ensure(t.Context(), want); err != nil {
			t.Fatal(err)
		}
		expect.Of(checkBridge(t, conn, bridge.Bridge{Name: "br0", Alias: "another"})).Len(t, 0, "CheckBridge")
	})
	t.Run("another kind of link", func(t *testing.T) {
		n := newNode(t)
		nstest.Veth(t, n.ns, "veth0", nstest.New(t), "veth1")
		for link, want := range map[string]string{
			"lo":    "bridge lo: link is a physical or a loopback interface, should be of kind bridge",
			"veth0": "bridge veth0: link is of kind veth, should be of kind bridge",
		} {
			diffs, err := checkBridge(t, n.conn, bridge.Bridge{Name: link})
			if got := lines(diffs); err != nil || got != want {
				t.Errorf("CheckBridge: %q, %v, want %q", got, err, want)
			}
		}
	})
}

func lines(diffs []tombolo.Difference) string {
	var list []string
	for _, d := range diffs {
		list = append(list, d.String())
	}
	return strings.Join(list, "\n")
}

func TestProbeOfNetfilterSeesWhatIsThere(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	there := nstest.Run(t, n.ns, "sh", "-c", "ls -d /proc/sys/net/bridge 2>/dev/null || true") != ""
	inside(t, n.ns, func() error {
		err := bridge.ProbeNetfilter()
		expect.That(t, there == (err == nil) && (err == nil || errors.Is(err, bridge.ErrNoNetfilter)),
			"ProbeNetfilter: %v, and the parameters are there: %t", err, there)
		return nil
	})
}

func TestNewBridgeOfTheLeastMTUForIPv6HasNoLinkLocalAddress(t *testing.T) {
	t.Parallel()
	for _, mtu := range []int{1280, 1281, 1500} {
		ns := nstest.New(t)
		conn := must.Of(bridge.Dial(ns)).Get(t)
		defer conn.Close()
		_, err := conn.Ensure(t.Context(), bridge.Bridge{Name: "br0", MTU: mtu, NoIPv6: true})
		must.That(t, err == nil, "%v", err)
		shown := nstest.Run(t, ns, "ip", "-d", "link", "show", "br0")
		if !strings.Contains(shown, "addrgenmode none") || !strings.Contains(shown, fmt.Sprintf(" mtu %d ", mtu)) {
			t.Errorf("of MTU %d, the bridge is:\n%s", mtu, shown)
		}
		expect.Equal(t, nstest.Run(t, ns, "ip", "-6", "addr", "show", "dev", "br0"), "", "of MTU %d, the bridge has", mtu)
	}
}

// A caller that is killed, or fails, between the request that makes a bridge and the one
// that says whose it is, leaves a bridge that would else pass for somebody else's.
func TestBridgeThatWasMadeByHalvesIsFinishedByTheNext(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	br := bridge.Bridge{Name: "br7", Alias: "mine", MTU: 1400, NoIPv6: true}
	fault := nltest.Fault{Type: unix.RTM_NEWLINK, Nth: 2, Errno: unix.ENOBUFS}
	_, err := faultyConn(t, n, []*nltest.Fault{&fault}, nil).Ensure(t.Context(), br)
	expect.That(t, err != nil, "the fault went unnoticed")
	nltest.MustHaveFired(t, &fault)
	half := must.Of(n.conn.Link(t.Context(), br.Name)).Get(t)
	must.That(t, half.Alias == "" && half.Group != 0, "made by halves: %+v", half)
	l, changed, err := ensure(t, n.conn, br)
	expect.That(t, err == nil && changed && l.Alias == "mine" && l.Group == 0 && l.MTU == 1400 && l.Up,
		"the next Ensure: %+v, changed %t, %v", l, changed, err)
	l, changed, err = ensure(t, n.conn, br)
	expect.That(t, err == nil && !changed, "and once more: %+v, changed %t, %v", l, changed, err)
	// A bridge that somebody else made is left without an alias, in a group too.
	nstest.Run(t, n.ns, "ip", "link", "add", "name", "br8", "type", "bridge")
	nstest.Run(t, n.ns, "ip", "link", "set", "br8", "group", "5")
	theirs := bridge.Bridge{Name: "br8", Alias: "mine"}
	l, _, err = ensure(t, n.conn, theirs)
	expect.That(t, err == nil && l.Alias == "" && l.Group == 5, "somebody else's: %+v, %v", l, err)
}

// A kernel without VLANs refuses to make such a bridge, and all kernels refuse the others.
func TestARefusedBridgeLeavesNothing(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	for _, refused := range []struct {
		br  bridge.Bridge
		why error
	}{
		{bridge.Bridge{MTU: 67}, tombolo.ErrInvalid}, {bridge.Bridge{MTU: 65536}, tombolo.ErrInvalid},
		{bridge.Bridge{Alias: "mine\x00"}, tombolo.ErrInvalid}, {bridge.Bridge{MAC: make([]byte, 6)}, unix.EADDRNOTAVAIL},
		{bridge.Bridge{VLANFiltering: true}, vlan.ErrUnsupported},
	} {
		refused.br.Name = "br9"
		changed, err := n.conn.Ensure(t.Context(), refused.br)
		if refused.br.VLANFiltering && err == nil {
			continue // a kernel with VLANs
		}
		expect.Is(t, err, refused.why, "%+v", refused.br)
		expect.Is(t, expect.Err(n.conn.Link(t.Context(), "br9")), fs.ErrNotExist, "%+v, changed %t", refused.br, changed)
	}
}

// Each field of a Bridge, changed in one that is there, changes that of the kernel and no other, and a second Ensure
// changes nothing. The zero value leaves what is there.
func TestOneFieldOfABridgeIsChanged(t *testing.T) {
	t.Parallel()
	n := &node{ns: nstest.New(t)}
	n.conn = must.Of(bridge.Dial(n.ns)).Get(t)
	defer n.conn.Close()
	br := bridge.Bridge{Name: "br0", Alias: "mine", MAC: []byte{2, 0, 0, 0, 0, 1}, MTU: 1400, Promiscuous: new(true), NFCall: new(true), MaxLearned: 100}
	want, _, err := ensure(t, n.conn, br)
	must.Succeed(t, err)
	for _, c := range []struct {
		name   string
		change func(br *bridge.Bridge, want *bridge.Link)
	}{
		{"nothing", func(*bridge.Bridge, *bridge.Link) {}},
		{"MAC", func(br *bridge.Bridge, want *bridge.Link) { br.MAC = []byte{2, 0, 0, 0, 0, 9}; want.MAC = br.MAC }},
		{"MTU", func(br *bridge.Bridge, want *bridge.Link) { br.MTU, want.MTU = 1300, 1300 }},
		{"Promiscuous", func(br *bridge.Bridge, want *bridge.Link) { br.Promiscuous, want.Promiscuous = new(false), false }},
		{"NFCall", func(br *bridge.Bridge, want *bridge.Link) {
			br.NFCall, want.Bridge.NFCallIPTables, want.Bridge.NFCallIP6Tables = new(false), false, false
		}},
		{"MaxLearned", func(br *bridge.Bridge, want *bridge.Link) {
			br.MaxLearned, want.Bridge.MaxLearned = 200, new(uint32(200))
		}},
		{"all back to zero", func(br *bridge.Bridge, _ *bridge.Link) { *br = bridge.Bridge{Name: br.Name, Alias: br.Alias} }},
	} {
		before := *want.Bridge
		c.change(&br, want)
		changes := c.name != "nothing" && c.name != "all back to zero"
		for i, changed := range []bool{changes, false} {
			have, got, err := ensure(t, n.conn, br)
			must.Succeed(t, err, c.name)
			expect.Equal(t, got, changed && (c.name != "MaxLearned" || before.MaxLearned != nil), "%s: Ensure %d: changed is", c.name, i)
			if before.MaxLearned == nil {
				want.Bridge.MaxLearned = nil
			}
			expect.NoDiff(t, cmp.Diff(want, have, cmpopts.IgnoreUnexported(bridge.Link{}, bridge.BridgeState{})), "%s", c.name)
		}
	}
}
