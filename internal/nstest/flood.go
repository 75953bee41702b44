package nstest

import (
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/netns"
)

const (
	// spacing is the least time between two datagrams of a flood: far less than the
	// kernel takes to make a link a bridge's port.
	spacing = 5 * time.Microsecond
	// underWay is how many datagrams of a flood may be: fewer than fit into the queue of
	// a processor (net.core.netdev_max_backlog, 1000) or of a socket. So a machine that is
	// busy with other things makes a flood slow, and loses nothing of it.
	underWay = 200
	// gone is how long one is under way before it counts as lost.
	gone = 3 * time.Second
	// floodTail is how many have to arrive before something is done, and after it.
	floodTail = 1000
)

// Flood counts what is lost of one flow of datagrams, as fast as one processor can have
// it, while something is done. A gap of some microseconds shows in it, and hardly ever in
// flows of a moderate pace. out is a UDP socket that is connected to where in, another,
// is bound. What processors have dropped on the way, between these namespaces, because
// they could not keep up is not counted: see Overload.
func Flood(tb testing.TB, out, in int, do func(), namespaces ...*netns.NS) (sent, lost int) {
	tb.Helper()
	dropped := Overload(tb, namespaces...)
	f := flood{out: out, in: in}
	var work sync.WaitGroup
	work.Go(f.run)
	end := sync.OnceFunc(func() {
		f.stop.Store(true)
		work.Wait()
	})
	defer end() // where a test has failed
	f.wait(tb)
	do()
	f.wait(tb)
	end()
	sent = int(f.sent.Load())
	lost = sent - int(f.came.Load())
	if n := dropped(); n > 0 && lost > 0 {
		tb.Logf("%d datagrams were lost, and this machine's processors have dropped %d packets", lost, n)
		lost = max(lost-n, 0)
	}
	return sent, lost
}

// flood is one at work. One thread both sends and receives, so that neither waits for the
// other's turn.
type flood struct {
	out, in    int
	stop       atomic.Bool
	sent, came atomic.Int64
	givenUp    int64     // of those sent
	since      time.Time // the last arrival
	buf        [64]byte
}

func (f *flood) run() {
	f.since = time.Now()
	for last := time.Now(); !f.stop.Load(); {
		f.receive()
		now := time.Now()
		if now.Sub(last) < spacing { // a timer would be a hundred times as slow
			continue
		}
		if missing := f.missing(); missing-f.givenUp >= underWay {
			if now.Sub(f.since) > gone {
				f.givenUp = missing
			}
			continue
		}
		last = now
		if err := unix.Sendto(f.out, f.buf[:], unix.MSG_DONTWAIT, nil); err != unix.EAGAIN {
			f.sent.Add(1)
		}
	}
	for f.since = time.Now(); f.missing() > 0 && time.Since(f.since) < gone; {
		f.receive()
	}
}

func (f *flood) missing() int64 { return f.sent.Load() - f.came.Load() }

// receive takes what has arrived.
func (f *flood) receive() {
	var b [64]byte
	for {
		if _, _, err := unix.Recvfrom(f.in, b[:], unix.MSG_DONTWAIT); err != nil {
			return
		}
		f.came.Add(1)
		f.since = time.Now()
	}
}

// wait returns when as many have arrived again as shows that the flood flows.
func (f *flood) wait(tb testing.TB) {
	tb.Helper()
	began, enough := time.Now(), f.came.Load()+floodTail
	for f.came.Load() < enough {
		if time.Since(began) > patience {
			tb.Fatalf("%d of %d datagrams arrived", f.came.Load(), f.sent.Load())
		}
		time.Sleep(time.Millisecond)
	}
}
