package uplink_test

import (
	"os"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/nstest"
)

// flood sends datagrams to the host as fast as one processor can, some microseconds
// apart, while something is done, and gives how many were sent and lost. A gap of some
// microseconds shows in it, and hardly ever in flows of a moderate pace.
func (l *lan) flood(tb testing.TB, do func()) (sent, lost int) {
	tb.Helper()
	before := dropped(tb)
	f := newFlood(tb, l)
	f.waitFor(tb, 1000)
	do()
	f.waitFor(tb, f.arrived.Load()+1000)
	close(f.done)
	f.work.Wait()
	// What the kernel drops because it cannot keep up is no fault of a plan's. Others'
	// drops are among them.
	return f.sent, max(f.sent-int(f.arrived.Load())-(dropped(tb)-before), 0)
}

// dropped counts what all processors have dropped because their queues were full (second
// column, in hexadecimal).
func dropped(tb testing.TB) int {
	tb.Helper()
	b, err := os.ReadFile("/proc/net/softnet_stat")
	if err != nil {
		tb.Fatal(err)
	}
	total := 0
	for line := range strings.Lines(string(b)) {
		n, err := strconv.ParseInt(strings.Fields(line)[1], 16, 64)
		if err != nil {
			tb.Fatal(err)
		}
		total += int(n)
	}
	return total
}

type flooding struct {
	done    chan struct{} // the sender has to end
	ended   chan struct{} // the reader has ended
	work    sync.WaitGroup
	sent    int
	arrived atomic.Int64
}

func newFlood(tb testing.TB, l *lan) *flooding {
	f := &flooding{done: make(chan struct{}), ended: make(chan struct{})}
	host := unix.SockaddrInet4{Addr: nstest.Addr("10.0.0.5").As4()}
	var in, out int
	within(tb, l.host, func() error {
		var err error
		if in, err = unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0); err != nil {
			return err
		}
		// For a reader that does not run for a while.
		if unix.SetsockoptInt(in, unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, 256<<20) != nil {
			tb.Skip("the receive buffer cannot be large here, so that a slow reader would count as a loss")
		}
		if err = unix.Bind(in, &host); err != nil {
			return err
		}
		bound, err := unix.Getsockname(in)
		host = *bound.(*unix.SockaddrInet4)
		return err
	})
	within(tb, l.router, func() error {
		var err error
		if out, err = unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0); err != nil {
			return err
		}
		return unix.Connect(out, &host)
	})
	f.work.Go(func() {
		defer unix.Close(out)
		for {
			select {
			case <-f.done:
				// What is behind all others tells the reader to end.
				for {
					select {
					case <-f.ended:
						return
					case <-time.After(time.Millisecond):
						unix.Write(out, []byte("end"))
					}
				}
			default:
			}
			if _, err := unix.Write(out, []byte("datagram")); err == nil {
				f.sent++
			}
			for begin := time.Now(); time.Since(begin) < 5*time.Microsecond; { // a timer would be a hundred times as slow
			}
		}
	})
	f.work.Go(func() {
		defer close(f.ended)
		defer unix.Close(in)
		b := make([]byte, 16)
		for {
			if n, err := unix.Read(in, b); err != nil || n == len("end") {
				return
			}
			f.arrived.Add(1)
		}
	})
	return f
}

func (f *flooding) waitFor(tb testing.TB, n int64) {
	tb.Helper()
	for begin := time.Now(); f.arrived.Load() < n; time.Sleep(time.Millisecond) {
		if time.Since(begin) > patience {
			tb.Fatalf("%d of %d datagrams arrived", f.arrived.Load(), f.sent)
		}
	}
}

func TestNoDatagramOfAFloodIsLost(t *testing.T) {
	l := newLAN(t)
	if err := nstest.Ping(t, l.router, nstest.Addr("10.0.0.5")); err != nil {
		t.Fatal(err)
	}
	var sent, lost int
	for range 3 {
		n, gone := l.flood(t, func() {
			rec, j := take(t, l, toBridge())
			if len(rec.Notes) > 0 {
				t.Errorf("notes: %q", rec.Notes)
			}
			if err := l.conn.Restore(t.Context(), rec, j); err != nil {
				t.Fatal(err)
			}
		})
		sent, lost = sent+n, lost+gone
	}
	if lost > 0 {
		t.Errorf("%d of %d datagrams to the host were lost", lost, sent)
	}
}

// TestAPortLosesDatagramsWithoutADetour shows what the detour is there for.
func TestAPortLosesDatagramsWithoutADetour(t *testing.T) {
	l := newLAN(t)
	run(t, l.host, "link add br0 type bridge", "link set br0 addrgenmode none address "+hostMAC, "link set br0 up",
		"addr add 10.0.0.5/24 dev br0 noprefixroute", "link add port0 type veth peer name port1", "link set port1 up", "link set port0 master br0 up")
	if err := nstest.Ping(t, l.router, nstest.Addr("10.0.0.5")); err != nil {
		t.Fatal(err)
	}
	for range 10 {
		sent, lost := l.flood(t, func() {
			for range 20 {
				run(t, l.host, "link set eth0 master br0", "link set eth0 nomaster")
			}
		})
		t.Logf("%d of %d lost", lost, sent)
		if lost > 0 {
			return
		}
	}
	t.Log("none was lost: on this machine it cannot be seen what the detour is for")
}
