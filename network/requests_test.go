package network_test

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/bridge"
	"github.com/tombolo-cni/tombolo/internal/nl"
	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nltest"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
	"github.com/tombolo-cni/tombolo/ipam"
	"github.com/tombolo-cni/tombolo/network"
	"github.com/tombolo-cni/tombolo/nft"
)

// wire is what the calls of a node send and receive by their sockets in the host's namespace.
type wire struct {
	sockets []*nltest.Recorder
	after   func() // each sending
}

type sender struct {
	nl.Transport
	wire *wire
}

func (s sender) Send(b []byte) error {
	err := s.Transport.Send(b)
	if s.wire.after != nil {
		s.wire.after()
	}
	return err
}

func (w *wire) dial(family int) (*nl.Conn, error) {
	t, err := nl.Open(family, nil)
	if err != nil {
		return nil, err
	}
	w.sockets = append(w.sockets, nltest.Record(sender{t, w}))
	return nl.New(w.sockets[len(w.sockets)-1]), nil
}

// tap has the node's calls go by a wire.
func (n *node) tap(w *wire) {
	n.Helper()
	dial := func(protocol int, inPod bool) (*nl.Conn, error) {
		if inPod {
			return nl.Dial(protocol, nil)
		}
		return w.dial(protocol)
	}
	var err error
	n.Node, err = network.Open(nl.WithDialer(n.Context(), dial), &network.Config{NetNS: n.ns, StateDir: n.state})
	must.Succeed(n, err)
}

// requests gives what was sent since the last time, and how many bytes came back.
func (w *wire) requests() (sent []netlink.Message, received int) {
	for _, s := range w.sockets {
		for _, d := range s.Sent() {
			sent = append(sent, nltest.Split(d)...)
		}
		for _, d := range s.Received() {
			received += len(d)
		}
	}
	w.sockets = nil
	return sent, received
}

func count(list []netlink.Message, is func(netlink.Message) bool) int {
	return len(list) - len(slices.DeleteFunc(slices.Clone(list), is))
}

// Of nf_tables, the end of a transaction has the same type.
func deletesLinks(m netlink.Message) bool {
	return m.Header.Type == unix.RTM_DELLINK && len(m.Data) >= unix.SizeofIfInfomsg
}

func lists(m netlink.Message) bool { return m.Header.Flags&netlink.Dump == netlink.Dump }

func TestLimitsAreThereBeforeThePortIsUp(t *testing.T) {
	t.Parallel()
	n := newNode(t, table{with: everything})
	n.do(func() error { return n.Del(n.Context(), n.made.Key, nil) })
	links, err := bridge.Dial(n.ns)
	must.Succeed(t, err)
	defer links.Close()
	var at []string // the port's limits, when it is first seen up
	n.tap(&wire{after: func() {
		if l, err := links.Link(n.Context(), n.made.Port); err == nil && l.Up && at == nil {
			at = strings.Fields(nstest.Run(n, n.ns, "sh", "-c", n.names("tc qdisc show dev $P; tc filter show dev $P ingress; tc qdisc show dev $I; ip link show $I up")))
		}
	}})
	n.add()
	text := strings.Join(at, " ")
	for _, part := range []string{"qdisc tbf", "qdisc clsact", "Redirect to device " + n.names("$I"), "rate 16Mbit", "UP"} {
		expect.Contains(t, text, part)
	}
}

// For each deletion the kernel waits for a grace period of its own.
func TestDelTakesThePortAndItsIFBAtOnce(t *testing.T) {
	t.Parallel()
	n := newNode(t, table{with: everything})
	var w wire
	n.tap(&w)
	n.do(func() error { return n.Del(n.Context(), n.made.Key, nil) })
	sent, _ := w.requests()
	expect.Equal(t, count(sent, deletesLinks), 1, "deletions of links")
	expect.Equal(t, nstest.Run(t, n.ns, "sh", "-c", "ip -o link | grep -c -e veth -e ifb || true"), "0\n", "links that are left")
}

// fill adds pods until there are so many.
func (n *node) fill(from, to int) (keep []network.Key) {
	n.Helper()
	for i := range to {
		pod := n.pod
		pod.ContainerID = fmt.Sprintf("more%d", i)
		keep = append(keep, network.Key{Network: n.nw.Name, ContainerID: pod.ContainerID, IfName: pod.IfName})
		if i < from {
			continue
		}
		pod.NetNS = nstest.New(n)
		pod.Path = nstest.Path(n, pod.NetNS)
		pod.Addresses = []ipam.Address{{Prefix: netip.PrefixFrom(netip.AddrFrom4([4]byte{10, 61, 0, byte(i + 10)}), 24), Gateway: n.pod.Addresses[0].Gateway}}
		n.do(func() error { return expect.Err(n.Add(n.Context(), &n.nw, &pod)) })
	}
	return append(keep, n.made.Key)
}

// A look at a pod costs the same beside any number of others. What is done for all pods lists each kind of thing once.
func TestRequestsDoNotGrowWithOtherPods(t *testing.T) {
	t.Parallel()
	n := newNode(t, table{with: func(n *node) { n.nw.Guard, n.nw.Masquerade = nft.GuardAddresses, true }})
	var w wire
	n.tap(&w)
	var before string
	from := 0
	for _, others := range []int{1, 39, 100} {
		keep := n.fill(from, others)
		from = others
		w.requests()
		n.do(func() error { return expect.Err(n.Check(n.Context(), &n.nw, n.reported())) })
		sent, received := w.requests()
		cost := fmt.Sprintf("Check: %d requests, %d bytes of answers", len(sent), received)
		n.do(func() error { return expect.Err(n.Collect(n.Context(), n.nw.Name, keep, nil)) })
		sent, _ = w.requests()
		cost += fmt.Sprintf("; Collect: %d requests", len(sent))
		n.do(func() error { return n.Repair(n.Context()) })
		sent, _ = w.requests()
		cost += fmt.Sprintf("; Repair: %d listings", count(sent, lists))
		if before != "" && cost != before {
			t.Errorf("beside %d pods there are\n%s, and beside fewer\n%s", others, cost, before)
		}
		before = cost
	}
	t.Log(before)
}
