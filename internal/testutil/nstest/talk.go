package nstest

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"sync"
	"testing"
	"time"

	"github.com/tombolo-cni/tombolo/netns"
)

// Talk is a connection that is used all the time: one side asks, numbered, every few
// milliseconds, and the other side answers. So a test knows whether what it did cut a
// connection, or cost it a datagram.
type Talk struct {
	name   string
	client net.Conn
	stop   chan struct{}
	done   sync.WaitGroup

	mu       sync.Mutex
	from     uint64 // the last question that does not count
	asked    uint64 // the last question
	answered map[uint64]bool
	err      error
}

// talkPace is how often a Talk asks.
const talkPace = 5 * time.Millisecond

// NewTalk begins one over "tcp" or "udp", between a server that listens at an address in
// a namespace and a client in another, which calls it by an address that may be another
// one: that of a published port. It ends with the test.
func NewTalk(tb testing.TB, network string, server *netns.NS, at netip.AddrPort, client *netns.NS, by netip.AddrPort) *Talk {
	tb.Helper()
	t := &Talk{name: fmt.Sprintf("%s to %s", network, by), stop: make(chan struct{}), answered: map[uint64]bool{}}
	var closer io.Closer
	accepted := make(chan net.Conn, 1)
	err := server.Do(func() error {
		if network == "udp" {
			conn, err := net.ListenUDP("udp", net.UDPAddrFromAddrPort(at))
			if err == nil {
				closer = conn
				close(accepted)
				t.done.Go(func() { echoPackets(conn) })
			}
			return err
		}
		l, err := net.ListenTCP("tcp", net.TCPAddrFromAddrPort(at))
		if err == nil {
			closer = l
			t.done.Go(func() { echoStream(l, accepted) })
		}
		return err
	})
	if err == nil {
		err = client.Do(func() error {
			var err error
			t.client, err = net.DialTimeout(network, by.String(), patience)
			return err
		})
	}
	if err != nil {
		if closer != nil {
			closer.Close()
		}
		tb.Fatalf("%s: %v", t.name, err)
	}
	t.done.Go(t.ask)
	t.done.Go(t.hear)
	tb.Cleanup(func() {
		t.end()
		t.client.Close()
		closer.Close()
		// Where nothing goes through any more, it does not hear of the end.
		if conn, ok := <-accepted; ok {
			conn.Close()
		}
		t.done.Wait()
	})
	// Not before the two know each other: the first datagrams may be lost while neighbours
	// are looked for.
	for end := time.Now().Add(patience); ; time.Sleep(talkPace) {
		if t.begin() {
			return t
		}
		if _, _, err := t.lost(t.last()); err != nil || time.Now().After(end) {
			tb.Fatalf("%s: nothing is answered: %v", t.name, err)
		}
	}
}

func (t *Talk) end() {
	select {
	case <-t.stop:
	default:
		close(t.stop)
	}
}

// begin has questions count from here on, once one was answered.
func (t *Talk) begin() bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.from = t.asked
	return len(t.answered) > 0
}

func (t *Talk) last() uint64 {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.asked
}

func (t *Talk) ask() {
	tick := time.NewTicker(talkPace)
	defer tick.Stop()
	for {
		select {
		case <-t.stop:
			return
		case <-tick.C:
		}
		t.mu.Lock()
		t.asked++
		b := binary.BigEndian.AppendUint64(nil, t.asked)
		t.mu.Unlock()
		if _, err := t.client.Write(b); err != nil && !t.ended() {
			t.fail(fmt.Errorf("ask: %w", err))
			return
		}
	}
}

func (t *Talk) hear() {
	buf := make([]byte, 8)
	for {
		if _, err := io.ReadFull(t.client, buf); err != nil {
			if !t.ended() {
				t.fail(fmt.Errorf("hear: %w", err))
			}
			return
		}
		t.mu.Lock()
		t.answered[binary.BigEndian.Uint64(buf)] = true
		t.mu.Unlock()
	}
}

func (t *Talk) ended() bool {
	select {
	case <-t.stop:
		return true
	default:
		return false
	}
}

func (t *Talk) fail(err error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.err == nil {
		t.err = err
	}
}

// lost gives how many questions there are that count, up to a last one, and how many of
// them have no answer as yet; and why there will be no more.
func (t *Talk) lost(last uint64) (asked, lost int, err error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for number := t.from + 1; number <= last; number++ {
		asked++
		if !t.answered[number] {
			lost++
		}
	}
	return asked, lost, t.err
}

// Check fails the test if the connection was cut since the Talk began, or if a question
// that was asked by now gets no answer: with TCP that may only come late.
func (t *Talk) Check(tb testing.TB) {
	tb.Helper()
	last := t.last() + 1 // at least one
	for end := time.Now().Add(10 * time.Second); ; time.Sleep(talkPace) {
		asked, lost, err := t.lost(last)
		if lost == 0 && err == nil {
			return
		}
		if err != nil || time.Now().After(end) {
			tb.Errorf("%s: %d questions, %d of them without an answer; %v", t.name, asked, lost, err)
			return
		}
	}
}

func echoPackets(conn *net.UDPConn) {
	buf := make([]byte, 64)
	for {
		n, from, err := conn.ReadFromUDPAddrPort(buf)
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err == nil {
			_, _ = conn.WriteToUDPAddrPort(buf[:n], from)
		}
	}
}

// echoStream serves one caller.
func echoStream(l *net.TCPListener, accepted chan<- net.Conn) {
	conn, err := l.Accept()
	if err != nil {
		close(accepted)
		return
	}
	accepted <- conn
	defer conn.Close()
	buf := make([]byte, 64)
	for {
		n, err := conn.Read(buf)
		if err == nil {
			_, err = conn.Write(buf[:n])
		}
		if err != nil {
			return // the other side has closed it
		}
	}
}
