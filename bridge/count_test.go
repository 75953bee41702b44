package bridge_test

import (
	"fmt"
	"net"
	"net/netip"
	"runtime"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
	"github.com/tombolo-cni/tombolo/netns"
)

// counter counts the datagrams that arrive at a pod, copies included, and knows
// without waiting when the last of them is there.
//
// All is sent from one thread that stays on one CPU. The kernel then does all its
// work on a datagram there too, and hands it from link to link by that CPU's one
// queue, first in, first out. So what is sent later and takes no shorter a way
// arrives later: the markers, which another pod, the witness, sends over the same
// bridge. Each further round of them outlasts one more link on a datagram's way.
type counter struct {
	in      net.PacketConn // in the pod that is counted at
	witness *netns.NS
}

// rounds of markers. A datagram passes two links, its sender's and its receiver's,
// as does a marker; the third round is to spare.
const rounds = 3

// countAt listens in a pod, over both families.
func countAt(tb testing.TB, pod, witness *netns.NS) *counter {
	tb.Helper()
	c := &counter{witness: witness}
	inside(tb, pod, func() error {
		var err error
		c.in, err = net.ListenPacket("udp", "[::]:0")
		return err
	})
	tb.Cleanup(func() { c.in.Close() })
	return c
}

// port is where the counter listens.
func (c *counter) port() uint16 { return netip.MustParseAddrPort(c.in.LocalAddr().String()).Port() }

// count sends datagrams from a namespace to a service, and gives how many arrived
// from which source. pod is an address of the counted pod itself, of the same family:
// the markers' way.
func (c *counter) count(tb testing.TB, from *netns.NS, service netip.AddrPort, pod netip.Addr, datagrams int) map[netip.Addr]int {
	tb.Helper()
	sender := dialUDP(tb, from, service)
	defer sender.Close()
	marker := dialUDP(tb, c.witness, netip.AddrPortFrom(pod, c.port()))
	defer marker.Close()
	arrived := map[netip.Addr]int{}
	must.Succeed(tb, onOneCPU(func() error {
		for range datagrams {
			if _, err := sender.Write([]byte(countMe)); err != nil {
				return err
			}
		}
		for round := range rounds {
			mark := fmt.Sprintf("%s round %d", marker.LocalAddr(), round)
			if _, err := marker.Write([]byte(mark)); err != nil {
				return err
			}
			if err := c.readUntil(mark, arrived); err != nil {
				return err
			}
		}
		return nil
	}), "%s from %s", service, from.ID())
	return arrived
}

// readUntil counts what arrives before a marker. A copy of an earlier marker is
// nothing to count.
func (c *counter) readUntil(mark string, arrived map[netip.Addr]int) error {
	if err := c.in.SetReadDeadline(time.Now().Add(patience)); err != nil {
		return err
	}
	buf := make([]byte, 128)
	for {
		n, from, err := c.in.ReadFrom(buf)
		if err != nil {
			return fmt.Errorf("waiting for the marker: %w", err)
		}
		switch string(buf[:n]) {
		case mark:
			return nil
		case countMe:
			arrived[from.(*net.UDPAddr).AddrPort().Addr().Unmap()]++
		}
	}
}

const countMe = "count me"

// onOneCPU runs fn on a thread that is kept on one CPU, and ends with it.
func onOneCPU(fn func() error) error {
	done := make(chan error)
	go func() {
		runtime.LockOSThread() // for good: the thread is of no use to others
		done <- func() error {
			var all, one unix.CPUSet
			if err := unix.SchedGetaffinity(0, &all); err != nil {
				return err
			}
			for cpu := range len(all) * 64 {
				if all.IsSet(cpu) {
					one.Set(cpu)
					break
				}
			}
			if err := unix.SchedSetaffinity(0, &one); err != nil {
				return err
			}
			return fn()
		}()
	}()
	return <-done
}

// dialUDP gives a socket of a namespace that sends to one place.
func dialUDP(tb testing.TB, ns *netns.NS, to netip.AddrPort) net.Conn {
	tb.Helper()
	var conn net.Conn
	inside(tb, ns, func() error {
		var err error
		conn, err = net.Dial("udp", to.String())
		return err
	})
	return conn
}

func inside(tb testing.TB, ns *netns.NS, fn func() error) {
	tb.Helper()
	must.Succeed(tb, ns.Do(fn))
}

// meet has two ends learn each other's MACs, and the bridge both: nothing then
// waits for neighbour discovery.
func meet(tb testing.TB, from *netns.NS, to ...netip.Addr) {
	tb.Helper()
	for _, a := range to {
		must.Succeed(tb, nstest.Ping(tb, from, a))
	}
}
