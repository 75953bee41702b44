package uplink_test

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
	"github.com/tombolo-cni/tombolo/netns"
)

// traffic is what runs over the LAN while a NIC is taken over: for each family and
// direction a flow of numbered datagrams, and a TCP connection that echoes.
type traffic struct {
	tb      testing.TB
	flows   []*datagrams
	conns   []*stream
	dropped func() int // by processors that cannot keep up
}

// startTraffic starts all of it between the host and addresses of the router, and
// returns when all has arrived once.
func startTraffic(tb testing.TB, l *lan, pairs ...[2]string) *traffic {
	tb.Helper()
	tr := &traffic{tb: tb, dropped: nstest.Overload(tb, l.host, l.router)}
	for _, p := range pairs {
		// What is lost before the kernel has all local routes is no fault of ours.
		if err := nstest.Ping(tb, l.host, netip.MustParseAddr(p[1])); err != nil {
			tb.Fatal(err)
		}
	}
	for _, p := range pairs {
		host, far := netip.MustParseAddr(p[0]), netip.MustParseAddr(p[1])
		tr.flows = append(tr.flows, newDatagrams(tb, l.host, host, l.router, far), newDatagrams(tb, l.router, far, l.host, host))
		tr.conns = append(tr.conns, newStream(tb, l.host, l.router, far), newStream(tb, l.router, l.host, host))
	}
	for _, f := range tr.flows {
		f.waitFor(tb, 20)
	}
	for _, s := range tr.conns {
		s.waitFor(tb, 3)
	}
	return tr
}

func both() [][2]string { return [][2]string{{"10.0.0.5", "192.0.2.1"}, {"fd00::5", "2001:db8::1"}} }

// more waits until as much has arrived again in each flow.
func (tr *traffic) more() {
	for _, f := range tr.flows {
		f.waitFor(tr.tb, f.arrived()+20)
	}
	for _, s := range tr.conns {
		s.waitFor(tr.tb, s.echoes()+3)
	}
}

// result ends the traffic and gives how many datagrams were lost and how many segments
// were sent again, in all flows. What processors drop because they cannot keep up is
// none of it.
func (tr *traffic) result() (lost, again int) {
	tr.more()
	for _, f := range tr.flows {
		n := f.stop()
		if n > 0 {
			tr.tb.Logf("%s lost %d datagrams", f.name, n)
		}
		lost += n
	}
	for _, s := range tr.conns {
		n := s.stop(tr.tb)
		if n > 0 {
			tr.tb.Logf("%s: %d segments were sent again", s.name, n)
		}
		again += n
	}
	if n := tr.dropped(); n > 0 && lost > 0 {
		tr.tb.Logf("%d datagrams were lost, and this machine's processors have dropped %d packets", lost, n)
		lost = max(lost-n, 0)
	}
	return lost, again
}

// patience is for tests that would otherwise hang: far more than any machine needs.
const patience = time.Minute

// datagrams is a flow of numbered datagrams.
type datagrams struct {
	name     string
	from, to *net.UDPConn
	done     chan struct{}
	senders  sync.WaitGroup
	readers  sync.WaitGroup

	mu   sync.Mutex
	cond *sync.Cond
	sent uint64
	errs int // that the kernel refused to send
	got  map[uint64]bool
}

func newDatagrams(tb testing.TB, fromNS *netns.NS, from netip.Addr, toNS *netns.NS, to netip.Addr) *datagrams {
	tb.Helper()
	f := &datagrams{name: fmt.Sprintf("%s > %s", from, to), done: make(chan struct{}), got: map[uint64]bool{}}
	f.cond = sync.NewCond(&f.mu)
	within(tb, toNS, func() error {
		var err error
		f.to, err = net.ListenUDP("udp", net.UDPAddrFromAddrPort(netip.AddrPortFrom(to, 0)))
		return err
	})
	largeBuffer(tb, f.to)
	within(tb, fromNS, func() error {
		var err error
		f.from, err = net.DialUDP("udp", net.UDPAddrFromAddrPort(netip.AddrPortFrom(from, 0)), f.to.LocalAddr().(*net.UDPAddr))
		return err
	})
	f.senders.Go(f.send)
	f.readers.Go(f.receive)
	tb.Cleanup(func() { f.end() })
	return f
}

// largeBuffer is for a test process that does not run for a while.
func largeBuffer(tb testing.TB, c *net.UDPConn) {
	raw, err := c.SyscallConn()
	if err != nil {
		tb.Fatal(err)
	}
	if err := raw.Control(func(fd uintptr) {
		if unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, 16<<20) != nil {
			c.SetReadBuffer(16 << 20) // a user namespace may not force it
		}
	}); err != nil {
		tb.Fatal(err)
	}
}

func within(tb testing.TB, ns *netns.NS, fn func() error) {
	tb.Helper()
	if err := ns.Do(fn); err != nil {
		tb.Fatal(err)
	}
}

func (f *datagrams) send() {
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	var b [8]byte
	for {
		select {
		case <-f.done:
			return
		case <-tick.C:
		}
		f.mu.Lock()
		n := f.sent
		f.sent++
		f.mu.Unlock()
		binary.BigEndian.PutUint64(b[:], n)
		if _, err := f.from.Write(b[:]); err != nil {
			f.mu.Lock()
			f.errs++
			f.mu.Unlock()
		}
	}
}

func (f *datagrams) receive() {
	var b [64]byte
	for {
		n, err := f.to.Read(b[:])
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err != nil || n != 8 {
			continue
		}
		f.mu.Lock()
		f.got[binary.BigEndian.Uint64(b[:])] = true
		f.mu.Unlock()
		f.cond.Broadcast()
	}
}

func (f *datagrams) arrived() int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return len(f.got)
}

func (f *datagrams) waitFor(tb testing.TB, n int) {
	tb.Helper()
	deadline := time.AfterFunc(patience, f.cond.Broadcast)
	defer deadline.Stop()
	begin := time.Now()
	f.mu.Lock()
	defer f.mu.Unlock()
	for len(f.got) < n {
		if time.Since(begin) >= patience {
			tb.Fatalf("%s: %d of %d datagrams arrived", f.name, len(f.got), f.sent)
		}
		f.cond.Wait()
	}
}

// gone is how long nothing arrives before what is missing counts as lost: a processor
// that is busy may be late with what waits there, which others overtake.
const gone = 5 * time.Second

// stop gives how many were lost.
func (f *datagrams) stop() int {
	close(f.done)
	f.senders.Wait()
	f.mu.Lock()
	sent := int(f.sent)
	f.mu.Unlock()
	seen, since := f.arrived(), time.Now()
	for seen < sent && time.Since(since) < gone {
		time.Sleep(time.Millisecond)
		if now := f.arrived(); now > seen {
			seen, since = now, time.Now()
		}
	}
	return sent - seen
}

func (f *datagrams) end() {
	select {
	case <-f.done:
	default:
		close(f.done)
	}
	f.senders.Wait()
	f.from.Close()
	f.to.Close()
	f.readers.Wait()
}

// stream is a TCP connection on which one side asks and the other answers.
type stream struct {
	name         string
	conn, server net.Conn
	work         sync.WaitGroup
	turn         sync.Mutex // held from a question to its answer

	mu    sync.Mutex
	cond  *sync.Cond
	count int
	err   error
}

func newStream(tb testing.TB, from, to *netns.NS, at netip.Addr) *stream {
	tb.Helper()
	s := &stream{name: "tcp to " + at.String()}
	s.cond = sync.NewCond(&s.mu)
	var listener net.Listener
	within(tb, to, func() error {
		var err error
		listener, err = net.Listen("tcp", netip.AddrPortFrom(at, 0).String())
		return err
	})
	defer listener.Close()
	within(tb, from, func() error {
		var err error
		s.conn, err = net.DialTimeout("tcp", listener.Addr().String(), patience)
		return err
	})
	var err error
	if s.server, err = listener.Accept(); err != nil {
		tb.Fatal(err)
	}
	s.work.Go(s.echo)
	s.work.Go(s.talk)
	tb.Cleanup(func() { s.end() })
	return s
}

// echo is io.Copy, which would keep pipes in a pool for the next one.
func (s *stream) echo() {
	b := make([]byte, 4096)
	for {
		n, err := s.server.Read(b)
		if err == nil {
			_, err = s.server.Write(b[:n])
		}
		if err != nil {
			return
		}
	}
}

func (s *stream) talk() {
	b := make([]byte, 100)
	for {
		s.turn.Lock()
		_, err := s.conn.Write(b)
		if err == nil {
			_, err = io.ReadFull(s.conn, b)
		}
		s.turn.Unlock()
		s.mu.Lock()
		s.count++
		s.err = err
		s.mu.Unlock()
		s.cond.Broadcast()
		if err != nil {
			return
		}
		time.Sleep(time.Millisecond) // the pace of the traffic
	}
}

func (s *stream) echoes() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.count
}

func (s *stream) waitFor(tb testing.TB, n int) {
	tb.Helper()
	deadline := time.AfterFunc(patience, s.cond.Broadcast)
	defer deadline.Stop()
	begin := time.Now()
	s.mu.Lock()
	defer s.mu.Unlock()
	for s.count < n || s.err != nil {
		if s.err != nil || time.Since(begin) >= patience {
			tb.Fatalf("%s: %d answers, %v", s.name, s.count, s.err)
		}
		s.cond.Wait()
	}
}

// stop gives how many segments either side sent again.
func (s *stream) stop(tb testing.TB) (again int) {
	s.info(tb, func(info *unix.TCPInfo) { again += int(info.Total_retrans) })
	return again
}

// info shows what the kernel knows of either side.
func (s *stream) info(tb testing.TB, look func(*unix.TCPInfo)) {
	for _, c := range []net.Conn{s.conn, s.server} {
		raw, err := c.(syscall.Conn).SyscallConn()
		if err != nil {
			tb.Fatal(err)
		}
		if err := raw.Control(func(fd uintptr) {
			if info, err := unix.GetsockoptTCPInfo(int(fd), unix.SOL_TCP, unix.TCP_INFO); err == nil {
				look(info)
			}
		}); err != nil {
			tb.Fatal(err)
		}
	}
}

func (s *stream) end() {
	s.conn.Close()
	s.server.Close()
	s.work.Wait()
}
