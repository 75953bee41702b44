package bridge_test

import (
	"errors"
	"io/fs"
	"strings"
	"testing"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo"
	"github.com/tombolo-cni/tombolo/bridge"
	"github.com/tombolo-cni/tombolo/internal/nl"
	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nltest"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
	"github.com/tombolo-cni/tombolo/netns"
)

// faultyConn works on n's namespace through a transport that fails as told, there
// or in the pods.
func faultyConn(tb testing.TB, n *node, host, pod []*nltest.Fault) *bridge.Conn {
	tb.Helper()
	t, err := nl.Open(unix.NETLINK_ROUTE, n.ns)
	must.Succeed(tb, err)
	conn := bridge.On(nl.New(nltest.NewFaulty(t, host...)), func() (tombolo.Socket, error) {
		t, err := nl.Open(unix.NETLINK_ROUTE, nil)
		if err != nil {
			return nil, err
		}
		return nl.New(nltest.NewFaulty(t, pod...)), nil
	})
	tb.Cleanup(func() { conn.Close() })
	return conn
}

func TestAttachUndoesItselfWhateverTheKernelRefuses(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	cases := map[string]*struct {
		fault nltest.Fault
		onPod bool
	}{
		"the pair":                 {nltest.Fault{Type: unix.RTM_NEWLINK, Nth: 1}, false},
		"the port's attributes":    {nltest.Fault{Type: unix.RTM_NEWLINK, Nth: 2}, false},
		"the static FDB entry":     {nltest.Fault{Type: unix.RTM_NEWNEIGH}, false},
		"the look at the pod":      {nltest.Fault{Type: unix.RTM_GETLINK}, true},
		"loopback":                 {nltest.Fault{Type: unix.RTM_NEWLINK, Nth: 1}, true},
		"addrgenmode":              {nltest.Fault{Type: unix.RTM_NEWLINK, Nth: 2}, true},
		"the first address":        {nltest.Fault{Type: unix.RTM_NEWADDR, Nth: 1}, true},
		"the second address":       {nltest.Fault{Type: unix.RTM_NEWADDR, Nth: 2}, true},
		"the link-local address":   {nltest.Fault{Type: unix.RTM_NEWADDR, Nth: 3}, true},
		"the interface coming up":  {nltest.Fault{Type: unix.RTM_NEWLINK, Nth: 3}, true},
		"the first default route":  {nltest.Fault{Type: unix.RTM_NEWROUTE, Nth: 1}, true},
		"the second default route": {nltest.Fault{Type: unix.RTM_NEWROUTE, Nth: 2}, true},
	}
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			c.fault.Errno, c.fault.Text = unix.ENOBUFS, "no room today"
			var host, inPod []*nltest.Fault
			if c.onPod {
				inPod = []*nltest.Fault{&c.fault}
			} else {
				host = []*nltest.Fault{&c.fault}
			}
			conn := faultyConn(t, n, host, inPod)
			pod := nstest.New(t)
			p := port(5)
			p.StaticFDB = true
			_, err := conn.Attach(t.Context(), pod, p)
			nltest.MustHaveFired(t, &c.fault)
			expect.That(t, errors.Is(err, unix.ENOBUFS) && strings.Contains(err.Error(), "no room today"),
				"error is %v, want ENOBUFS with the kernel's text", err)
			expect.Is(t, expect.Err(n.conn.Link(t.Context(), p.Name)), fs.ErrNotExist, "the port is there")
			out := nstest.Run(t, pod, "ip", "-o", "link")
			expect.That(t, strings.Count(out, "\n") == 1, "the pod has more than lo:\n%s", out)
		})
	}
}

func TestFailedUndoIsToldBesideTheCause(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	stuck := &nltest.Fault{Type: unix.RTM_DELLINK, Errno: unix.EBUSY}
	cause := &nltest.Fault{Type: unix.RTM_NEWADDR, Errno: unix.ENOBUFS}
	conn := faultyConn(t, n, []*nltest.Fault{stuck}, []*nltest.Fault{cause})
	_, err := conn.Attach(t.Context(), nstest.New(t), port(6))
	nltest.MustHaveFired(t, stuck, cause)
	expect.That(t, errors.Is(err, unix.ENOBUFS) && errors.Is(err, unix.EBUSY),
		"error is %v, want both ENOBUFS and EBUSY in it", err)
}

func TestInterruptedListIsAskedForAgain(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	attach(t, n, port(0))
	twice := &nltest.Fault{Type: unix.RTM_GETLINK, Match: isDump, Interrupt: true, Times: 2}
	conn := faultyConn(t, n, []*nltest.Fault{twice}, nil)
	links, err := conn.Veths(t.Context())
	nltest.MustHaveFired(t, twice)
	expect.That(t, err == nil && len(links) == 1, "Veths: %d links, %v", len(links), err)
}

func isDump(m netlink.Message) bool { return m.Header.Flags&unix.NLM_F_DUMP == unix.NLM_F_DUMP }

// The thousandth pod costs what the first did only if nothing on the way asks for
// a list, and if the number of datagrams stays what it is.
func TestAttachAndDetachListNothing(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	var recorders []*nltest.Recorder
	record := func(ns *netns.NS) *nl.Conn {
		tr := must.Of(nl.Open(unix.NETLINK_ROUTE, ns)).Get(t)
		r := nltest.Record(tr)
		recorders = append(recorders, r)
		return nl.New(r)
	}
	conn := bridge.On(record(n.ns), func() (tombolo.Socket, error) { return record(nil), nil })
	defer conn.Close()
	p := port(0)
	p.BridgeIndex, p.MTU = n.link.Index, 1400
	must.Succeed(t, expect.Err(conn.Attach(t.Context(), nstest.New(t), p)))
	must.Succeed(t, conn.Detach(t.Context(), p.Name, p.Alias))
	var datagrams []int
	for _, r := range recorders {
		datagrams = append(datagrams, len(r.Sent()))
		for _, sent := range r.Sent() {
			for _, m := range nltest.Split(sent) {
				expect.That(t, !isDump(m), "a dump of type %d", m.Header.Type)
			}
		}
	}
	// Node: the pair with its port, its index, the look before the deletion, the
	// deletion. Pod: the interface's index, all the rest. Over a socket, which a
	// recorder is not, an index takes no datagram.
	if want := []int{4, 2}; len(datagrams) != 2 || datagrams[0] != want[0] || datagrams[1] != want[1] {
		t.Errorf("datagrams on the node and in the pod: %v, want %v", datagrams, want)
	}
}

func TestAttachStaysWithinItsAllocations(t *testing.T) {
	n := newNode(t)
	pod := nstest.New(t)
	p := port(0)
	p.BridgeIndex, p.MTU = n.link.Index, 1400
	allocs := testing.AllocsPerRun(20, func() {
		must.Succeed(t, expect.Err(n.conn.Attach(t.Context(), pod, p)))
		must.Succeed(t, n.conn.Detach(t.Context(), p.Name, p.Alias))
	})
	const most = 270 // 258, and 267 with the race detector
	t.Logf("%.0f allocations for an Attach and a Detach", allocs)
	expect.That(t, allocs <= most, "%.0f allocations for an Attach and a Detach, where %d are the most", allocs, most)
}
