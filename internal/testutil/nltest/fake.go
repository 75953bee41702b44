package nltest

import (
	"sync"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/nl"
)

// Fake is a kernel that is made up.
type Fake struct {
	mu     sync.Mutex
	answer func([]netlink.Message) [][]byte
	queue  [][]byte
	closed bool
}

// NewFake makes a kernel of a function that gets the requests of one datagram and
// gives the datagrams that answer them.
func NewFake(answer func(requests []netlink.Message) [][]byte) *Fake { return &Fake{answer: answer} }

// AckAll is a kernel with which everything succeeds. Its dumps are empty, and a
// get of one object finds none.
func AckAll(requests []netlink.Message) [][]byte {
	var out [][]byte
	for _, r := range requests {
		switch {
		case r.Header.Flags&unix.NLM_F_DUMP == unix.NLM_F_DUMP:
			out = append(out, Done(r, 0))
		case r.Header.Flags&unix.NLM_F_ACK != 0:
			out = append(out, Ack(r))
		default:
			out = append(out, Error(r, unix.ENOENT, ""))
		}
	}
	return out
}

// Send is nl.Transport's.
func (f *Fake) Send(b []byte) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.closed {
		return unix.EBADF
	}
	f.queue = append(f.queue, f.answer(Split(append([]byte(nil), b...)))...)
	return nil
}

// Receive is nl.Transport's.
func (f *Fake) Receive(b []byte) (int, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.closed {
		return 0, unix.EBADF
	}
	return f.queued(b)
}

func (f *Fake) queued(b []byte) (int, error) {
	if len(f.queue) == 0 {
		return 0, nl.ErrEmpty
	}
	n := copy(b, f.queue[0])
	f.queue = f.queue[1:]
	return n, nil
}

// Close is nl.Transport's. Whatever is done after it fails.
func (f *Fake) Close() error {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.closed = true
	return nil
}

// Recorder keeps what passes between a Conn and its kernel.
type Recorder struct {
	nl.Transport
	mu             sync.Mutex
	sent, received [][]byte
}

// Record wraps a transport.
func Record(t nl.Transport) *Recorder { return &Recorder{Transport: t} }

// Send is nl.Transport's.
func (r *Recorder) Send(b []byte) error {
	r.mu.Lock()
	r.sent = append(r.sent, append([]byte(nil), b...))
	r.mu.Unlock()
	return r.Transport.Send(b)
}

// Receive is nl.Transport's.
func (r *Recorder) Receive(b []byte) (int, error) {
	n, err := r.Transport.Receive(b)
	if err == nil {
		r.mu.Lock()
		r.received = append(r.received, append([]byte(nil), b[:n]...))
		r.mu.Unlock()
	}
	return n, err
}

// Sent gives the datagrams that were sent, and forgets them.
func (r *Recorder) Sent() [][]byte {
	r.mu.Lock()
	defer r.mu.Unlock()
	sent := r.sent
	r.sent = nil
	return sent
}

// Received gives the datagrams that came back, and forgets them.
func (r *Recorder) Received() [][]byte {
	r.mu.Lock()
	defer r.mu.Unlock()
	received := r.received
	r.received = nil
	return received
}
