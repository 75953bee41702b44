package bridge_test

import (
	"errors"
	"io/fs"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo"
	"github.com/tombolo-cni/tombolo/bridge"
	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nltest"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
)

func TestEnslaveGivesAndTakesEachFlag(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	plain := port(0)
	attach(t, n, plain)
	for name, set := range map[string]func(*bridge.Port){
		"hairpin":            func(p *bridge.Port) { p.Hairpin = true },
		"isolation":          func(p *bridge.Port) { p.Isolated = true },
		"groups":             func(p *bridge.Port) { p.ForwardGroups = true },
		"no learning":        func(p *bridge.Port) { p.NoLearning = true },
		"no flood":           func(p *bridge.Port) { p.NoFlood = true },
		"no multicast flood": func(p *bridge.Port) { p.NoMulticastFlood = true },
	} {
		t.Run(name, func(t *testing.T) {
			flagged := plain
			set(&flagged)
			for _, p := range []bridge.Port{flagged, plain} {
				must.Succeed(t, n.conn.Enslave(t.Context(), p))
				expect.Of(n.conn.Check(t.Context(), p)).Len(t, 0, "Check")
			}
			expect.Of(n.conn.Check(t.Context(), flagged)).Len(t, 1, "Check does not see that it was taken away")
		})
	}
}

func TestAttachLeavesHairpinOffUnlessAskedFor(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	for i, hairpin := range []bool{true, false, true} {
		p := port(byte(i))
		p.Hairpin = hairpin
		attach(t, n, p)
		l := must.Of(n.conn.Link(t.Context(), p.Name)).Get(t)
		expect.Equal(t, l.Port.Hairpin, hairpin, "hairpin is")
	}
}

// Mending goes over ports that are as they should be, with traffic on them.
func TestEnslaveOfAPortInPlaceDisturbsNothing(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	p := port(0)
	pod, _ := attach(t, n, p)
	meet(t, n.ns, addrs(p)...)
	learnt := func() string { return nstest.Run(t, n.ns, "bridge", "fdb", "show", "br", "br0", "brport", p.Name) }
	before := learnt()
	conn, sent := recorded(t, n)
	p.BridgeIndex = n.link.Index
	carrierChanges := func() string {
		_, changes, _ := strings.Cut(nstest.Run(t, pod, "ip", "-json", "-s", "-s", "link", "show", "eth0"), `"carrier_changes":`)
		return strings.TrimRight(changes, "}]\n")
	}
	changes := carrierChanges()
	must.Succeed(t, conn.Enslave(t.Context(), p))
	expect.Equal(t, len(sent.Sent()), 1, "datagrams")
	after := learnt()
	expect.That(t, after == before && strings.Count(before, "\n") >= 2, "the bridge knew\n%sand now\n%s", before, after)
	after = carrierChanges()
	expect.That(t, after == changes && changes != "", "the pod's carrier changed: %q times, then %q", changes, after)
}

// A bridge that was deleted and made again knows none of its pods.
func TestEnslaveBringsPodsBackToABridgeMadeAnew(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	describe := func(i byte) bridge.Port {
		p := port(i)
		p.PeerMAC = mac("02:00:00:00:01:00")
		p.PeerMAC[5] = i
		p.Hairpin, p.Isolated, p.StaticFDB = i == 0, i == 1, i == 2
		return p
	}
	for i := range byte(3) {
		attach(t, n, describe(i))
	}
	nstest.Run(t, n.ns, "ip", "link", "del", "br0")
	l, changed, err := ensure(t, n.conn, br0())
	must.That(t, err == nil && changed, "Ensure: changed %t, %v", changed, err)
	nstest.Run(t, n.ns, "ip", "addr", "add", gateways[0], "dev", "br0")
	for i := range byte(3) {
		p := describe(i)
		p.BridgeIndex = l.Index
		must.Succeed(t, n.conn.Enslave(t.Context(), p))
		expect.Of(n.conn.Check(t.Context(), p)).Len(t, 0, "Check")
		// No pod has the new bridge's MAC yet: the host asks first.
		expect.Success(t, nstest.Ping(t, n.ns, addrs(p)[0]))
	}
	static := nstest.Run(t, n.ns, "bridge", "fdb", "show", "br", "br0", "brport", port(2).Name)
	expect.Contains(t, static, "02:00:00:00:01:02 sticky master br0 static", "the static entry is missing")
}

func TestEnslaveOfWhatIsNotThere(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	p := port(0)
	err := n.conn.Enslave(t.Context(), p)
	expect.That(t, errors.Is(err, fs.ErrNotExist), "without a link: %v, want one that matches fs.ErrNotExist", err)
	attach(t, n, p)
	p.Bridge = "br9"
	err = n.conn.Enslave(t.Context(), p)
	expect.That(t, errors.Is(err, fs.ErrNotExist), "without a bridge: %v, want one that matches fs.ErrNotExist", err)
	p.StaticFDB = true
	expect.Is(t, n.conn.Enslave(t.Context(), p), tombolo.ErrInvalid, "with an entry for no MAC")
	p.Name = ""
	expect.Is(t, n.conn.Enslave(t.Context(), p), tombolo.ErrInvalid, "without a name")
}

func TestDetachWhoseDeletionIsRefusedSaysSo(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	p := port(0)
	attach(t, n, p)
	refused := &nltest.Fault{Type: unix.RTM_DELLINK, Errno: unix.EBUSY, Times: 1}
	conn := faultyConn(t, n, []*nltest.Fault{refused}, nil)
	err := conn.Detach(t.Context(), p.Name, p.Alias)
	nltest.MustHaveFired(t, refused)
	expect.Is(t, err, unix.EBUSY, "Detach")
	// Nothing stands in the way of the next.
	expect.Success(t, conn.Detach(t.Context(), p.Name, p.Alias))
	expect.Is(t, expect.Err(n.conn.Link(t.Context(), p.Name)), fs.ErrNotExist, "the port is there")
}

// Somebody else may take the link between the look and the deletion.
func TestDetachOfALinkThatGoesMeanwhileIsSuccess(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	p := port(0)
	attach(t, n, p)
	gone := &nltest.Fault{Type: unix.RTM_DELLINK, Errno: unix.ENODEV}
	conn := faultyConn(t, n, []*nltest.Fault{gone}, nil)
	err := conn.Detach(t.Context(), p.Name, p.Alias)
	nltest.MustHaveFired(t, gone)
	expect.Success(t, err)
}
