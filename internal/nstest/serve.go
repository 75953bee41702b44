package nstest

import (
	"fmt"
	"net"
	"net/netip"
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

// patience is how long either side waits for the other.
const patience = 3 * time.Second

// Ask calls a server of Serve from a namespace, within 3 s, and gives the source
// address that the server saw: what masquerade made of the caller's.
func Ask(tb testing.TB, ns *netns.NS, network string, to netip.AddrPort) (seen netip.AddrPort, _ error) {
	tb.Helper()
	var conn net.Conn
	err := ns.Do(func() error {
		var err error
		conn, err = net.DialTimeout(network, to.String(), patience)
		return err
	})
	if err != nil {
		return netip.AddrPort{}, err
	}
	defer conn.Close()
	if err := conn.SetDeadline(time.Now().Add(patience)); err != nil {
		return netip.AddrPort{}, err
	}
	if _, err := conn.Write([]byte("?")); err != nil {
		return netip.AddrPort{}, err
	}
	buf := make([]byte, 128)
	n, err := conn.Read(buf)
	if err != nil {
		return netip.AddrPort{}, err
	}
	seen, err = netip.ParseAddrPort(string(buf[:n]))
	if err != nil {
		return netip.AddrPort{}, fmt.Errorf("answer of %s: %w", to, err)
	}
	return netip.AddrPortFrom(seen.Addr().Unmap(), seen.Port()), nil
}
