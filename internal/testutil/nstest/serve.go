package nstest

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/tombolo-cni/tombolo/netns"
)

// Serve answers callers in a namespace until the test ends, over "tcp" or "udp",
// or one family's (tcp4), at an address and port (port 0: any), and gives where it listens. It tells each
// caller the address and port that it sees as theirs: see Ask.
func Serve(tb testing.TB, ns *netns.NS, network string, at netip.AddrPort) netip.AddrPort {
	tb.Helper()
	done := make(chan struct{})
	var where string
	var stop func() error
	err := ns.Do(func() error {
		if strings.HasPrefix(network, "udp") {
			conn, err := net.ListenPacket(network, at.String())
			if err != nil {
				return err
			}
			where, stop = conn.LocalAddr().String(), conn.Close
			go func() { defer close(done); answerPackets(conn) }()
			return nil
		}
		l, err := net.Listen(network, at.String())
		if err != nil {
			return err
		}
		where, stop = l.Addr().String(), l.Close
		go func() { defer close(done); answerStreams(l) }()
		return nil
	})
	if err != nil {
		tb.Fatalf("serve %s at %s: %v", network, at, err)
	}
	tb.Cleanup(func() { stop(); <-done })
	return netip.MustParseAddrPort(where)
}

func answerPackets(conn net.PacketConn) {
	buf := make([]byte, 1<<16)
	for {
		_, from, err := conn.ReadFrom(buf)
		if err != nil {
			return
		}
		conn.WriteTo([]byte(from.String()), from)
	}
}

func answerStreams(l net.Listener) {
	for {
		conn, err := l.Accept()
		if err != nil {
			return
		}
		// A close with the question unread would reset the connection.
		conn.SetDeadline(time.Now().Add(patience))
		conn.Read(make([]byte, 1))
		conn.Write([]byte(conn.RemoteAddr().String()))
		conn.Close()
	}
}

// patience is how long either side waits for the other: far longer than any machine
// needs, however busy.
const patience = time.Minute

// Ask calls a server of Serve from a namespace and gives the source address that the
// server saw: what masquerade made of the caller's. It is for callers that should
// get an answer: it waits for a minute.
func Ask(tb testing.TB, ns *netns.NS, network string, to netip.AddrPort) (seen netip.AddrPort, _ error) {
	tb.Helper()
	return AskWithin(tb, ns, network, to, patience)
}

// AskWithin is Ask for callers that may get no answer, and wait no longer than that.
func AskWithin(tb testing.TB, ns *netns.NS, network string, to netip.AddrPort, wait time.Duration) (seen netip.AddrPort, _ error) {
	tb.Helper()
	deadline := time.Now().Add(wait)
	var conn net.Conn
	err := ns.Do(func() error {
		var err error
		conn, err = (&net.Dialer{Deadline: deadline}).Dial(network, to.String())
		return err
	})
	if err != nil {
		return netip.AddrPort{}, err
	}
	defer conn.Close()
	answer, err := question(conn, deadline)
	if err != nil {
		return netip.AddrPort{}, err
	}
	seen, err = netip.ParseAddrPort(answer)
	if err != nil {
		return netip.AddrPort{}, fmt.Errorf("answer of %s: %w", to, err)
	}
	return netip.AddrPortFrom(seen.Addr().Unmap(), seen.Port()), nil
}

// again is how long a datagram may take, or its answer, before it counts as lost: one
// may be while a neighbour is looked for.
const again = time.Second

// question asks once over a stream, and over and over by datagrams, until there is an
// answer.
func question(conn net.Conn, deadline time.Time) (string, error) {
	_, datagrams := conn.(*net.UDPConn)
	buf := make([]byte, 128)
	for {
		until := deadline
		if soon := time.Now().Add(again); datagrams && soon.Before(deadline) {
			until = soon
		}
		if err := conn.SetDeadline(until); err != nil {
			return "", err
		}
		if _, err := conn.Write([]byte("?")); err != nil {
			return "", err
		}
		n, err := conn.Read(buf)
		if err == nil {
			return string(buf[:n]), nil
		}
		if !errors.Is(err, os.ErrDeadlineExceeded) || !until.Before(deadline) {
			return "", err
		}
	}
}
