package nl

import (
	"encoding/binary"
	"errors"
	"fmt"
	"sync"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo"
)

// ErrNoAnswer is the cause of an error where the kernel took a request and left
// nothing in the socket to read. It answers before sendmsg returns, so that
// waiting would not help.
var ErrNoAnswer = errors.New("the kernel gave no answer")

// ErrEmpty is what a Transport's Receive returns when nothing is queued.
var ErrEmpty = errors.New("nothing to receive")

// Transport carries whole netlink datagrams: a socket, or a test's fake kernel.
type Transport interface {
	// Send hands a datagram of one or more messages to the kernel, which works on
	// them before it returns.
	Send(b []byte) error
	// Receive takes the next datagram, and never waits: ErrEmpty if there is none.
	// A datagram that does not fit into b is an error.
	Receive(b []byte) (int, error)
	Close() error
}

// Conn is a connection to the kernel's netlink. Its methods may be called from
// several goroutines, which take turns.
type Conn struct {
	mu  sync.Mutex
	t   Transport
	seq uint32
	buf []byte
}

// New makes a Conn over a transport, which it then owns.
func New(t Transport) *Conn { return &Conn{t: t} }

// Of is the connection that a public package was given as a Socket; nil, which Usable
// refuses, where it is another kind of Socket.
func Of(s tombolo.Socket) *Conn {
	c, _ := s.(*Conn)
	return c
}

// Close closes the transport. All later calls, another Close too, fail with tombolo.ErrInvalid.
func (c *Conn) Close() error {
	if err := c.Usable(); err != nil {
		return err
	}
	c.mu.Lock()
	t := c.t
	c.t = closed{}
	c.mu.Unlock()
	return t.Close()
}

// Usable says what is wrong with a Conn that is nil, was never opened, or has been
// closed. The error matches tombolo.ErrInvalid.
func (c *Conn) Usable() error {
	if c == nil {
		return errNoConn()
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	switch c.t.(type) {
	case nil:
		return errNoConn()
	case closed:
		return closed{}.Close()
	}
	return nil
}

func errNoConn() error {
	return &tombolo.OpError{Op: "use connection", Err: fmt.Errorf("%w: it was not opened by Dial", tombolo.ErrInvalid)}
}

// Invalid is the error about a value that is not valid. It matches tombolo.ErrInvalid.
type Invalid string

func (e Invalid) Error() string { return string(e) }

// Is makes it match tombolo.ErrInvalid, which its text leaves out.
func (e Invalid) Is(target error) bool { return target == tombolo.ErrInvalid }

// closed is the transport of a Conn after Close.
type closed struct{}

func (closed) Send([]byte) error           { return closed{}.Close() }
func (closed) Receive([]byte) (int, error) { return 0, closed{}.Close() }
func (closed) Close() error {
	return &tombolo.OpError{Op: "use connection", Err: fmt.Errorf("%w: it is closed: %w", tombolo.ErrInvalid, unix.EBADF)}
}

// receiveSize is the longest datagram of the kernel's, be it an answer or a part of a dump. The longest is a link,
// which can have 64 KiB of alternative names. The unused part costs no memory. With small buffers, nearly every
// listing is interrupted under churn.
const receiveSize = 80 << 10

// announcementSize is the longest announcement.
const announcementSize = 8 << 10

// buffer is made when it is first needed.
func (c *Conn) buffer() []byte {
	if c.buf == nil {
		c.buf = make([]byte, receiveSize)
	}
	return c.buf
}

// Execute sends a batch and reads the answers. It returns the first request's error, in the order of the requests;
// those of the others are in Batch.Err. After an error too, all requests have been tried, except where one could
// not be encoded or sent: then none was.
func (c *Conn) Execute(b *Batch) error {
	if err := c.Usable(); err != nil {
		return err
	}
	if err := b.firstErr(); err != nil {
		return err
	}
	if len(b.reqs) == 0 {
		return nil
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	base := c.number(b)
	if err := c.t.Send(b.buf); err != nil {
		err = fmt.Errorf("send: %w", err)
		b.unanswered(err)
		return opError(b.reqs[0].op, b.reqs[0].object, err, "")
	}
	if err := c.collect(b, base); err != nil {
		c.drain()
		b.unanswered(err)
		return opError(b.reqs[0].op, b.reqs[0].object, err, "")
	}
	return b.firstErr()
}

// number gives each request its sequence number, and returns the first.
func (c *Conn) number(b *Batch) uint32 {
	base := c.seq + 1
	for i := range b.reqs {
		c.seq++
		binary.NativeEndian.PutUint32(b.buf[b.reqs[i].start+8:], c.seq)
	}
	return base
}

// collect reads until the socket is empty, so that an error of a silent request,
// or of a transaction as a whole, is never left for the next Execute to find.
func (c *Conn) collect(b *Batch, base uint32) error {
	buf := c.buffer()
	var lost error
	for {
		n, err := c.t.Receive(buf)
		if errors.Is(err, ErrEmpty) {
			break
		}
		if errors.Is(err, unix.ENOBUFS) && lost == nil {
			// Some answers are lost, those before them are still there.
			lost = fmt.Errorf("receive: %w", err)
			continue
		}
		if err != nil {
			return fmt.Errorf("receive: %w", err)
		}
		for rest := buf[:n]; len(rest) > 0; {
			var m netlink.Message
			if m, rest, err = next(rest); err != nil {
				return err
			}
			if i := m.Header.Sequence - base; i < uint32(len(b.reqs)) {
				b.reqs[i].take(m)
			}
		}
	}
	// A failed transaction answers only for what failed.
	if lost == nil && b.firstErr() == nil {
		b.unanswered(ErrNoAnswer)
	}
	return lost
}

// drain empties the socket after an error: the kernel sends nothing more to one
// that has overflown, and begins no dump on one that has another under way.
func (c *Conn) drain() {
	for {
		if _, err := c.t.Receive(c.buffer()); err != nil {
			return
		}
	}
}

func (r *request) take(m netlink.Message) {
	switch {
	case m.Header.Type == netlink.Error:
		errno, text, err := ackError(m)
		if err != nil {
			r.err = err
		} else if errno != 0 && r.err == nil {
			r.err = opError(r.op, r.object, errno, text)
		}
	case m.Header.Type < unix.NLMSG_MIN_TYPE:
		return // NLMSG_NOOP and the like
	case r.reply != nil && !r.done:
		if err := r.reply(m); err != nil {
			r.err = err
		}
	}
	r.done = true
}

// dumpTries bounds how often an interrupted dump is tried again. Under a churn of
// links that interrupted half of all dumps, ten in a row failed never.
const dumpTries = 20

// List asks for a list of objects and calls each for every one, after the whole
// list has arrived. A list that changed while the kernel wrote it is asked for
// again; tombolo.ErrInterrupted says that this did not help. An error of each ends
// it. The message's data is the callback's to keep. Dump is set in the flags of m; err is
// what building m returned.
func (c *Conn) List(op string, m netlink.Message, err error, each func(netlink.Message) error) error {
	var list []netlink.Message
	err = c.Walk(op, m, err, func() { list = nil }, func(m netlink.Message) error {
		list = append(list, m)
		return nil
	})
	if err != nil {
		return err
	}
	for _, m := range list {
		if err := each(m); err != nil {
			return opError(op, nil, err, "")
		}
	}
	return nil
}

// Walk is List that calls each as the objects arrive, and keeps none: a pod may have any number. It calls begin
// before the first, and again where the list is asked for again. Neither may use the connection.
func (c *Conn) Walk(op string, m netlink.Message, err error, begin func(), each func(netlink.Message) error) error {
	if err := c.Usable(); err != nil {
		return err
	}
	var b Batch
	m.Header.Flags |= netlink.Dump
	b.append(request{op: op, want: object, err: err}, m)
	if err := b.firstErr(); err != nil {
		return err
	}
	c.mu.Lock()
	err = c.dump(&b, begin, each)
	c.mu.Unlock()
	var opErr *tombolo.OpError
	if err == nil || errors.As(err, &opErr) {
		return err
	}
	return opError(op, nil, err, "")
}

func (c *Conn) dump(b *Batch, begin func(), each func(netlink.Message) error) error {
	for range dumpTries {
		begin()
		seq := c.number(b)
		if err := c.t.Send(b.buf); err != nil {
			return fmt.Errorf("send: %w", err)
		}
		interrupted, err := c.readDump(b.reqs[0].op, seq, each)
		if err != nil {
			c.drain()
		}
		if err != nil || !interrupted {
			return err
		}
	}
	return tombolo.ErrInterrupted
}

func (c *Conn) readDump(op string, seq uint32, each func(netlink.Message) error) (interrupted bool, _ error) {
	buf := c.buffer()
	for {
		n, err := c.t.Receive(buf)
		if errors.Is(err, ErrEmpty) {
			return false, ErrNoAnswer
		}
		if err != nil {
			return false, fmt.Errorf("receive: %w", err)
		}
		part := append([]byte(nil), buf[:n]...)
		for len(part) > 0 {
			var m netlink.Message
			if m, part, err = next(part); err != nil {
				return false, err
			}
			if m.Header.Sequence != seq {
				continue
			}
			interrupted = interrupted || m.Header.Flags&netlink.DumpInterrupted != 0
			switch m.Header.Type {
			case netlink.Done:
				return interrupted, dumpError(op, m)
			case netlink.Error:
				errno, text, err := ackError(m)
				if err == nil {
					err = opError(op, nil, errno, text)
				}
				return false, err
			default:
				if err := each(m); err != nil {
					return false, err
				}
			}
		}
	}
}

// dumpError reads the errno that ends a dump: 0, or why the kernel gave up
// within it.
func dumpError(op string, m netlink.Message) error {
	if len(m.Data) < 4 {
		return nil
	}
	errno := unix.Errno(-int32(binary.NativeEndian.Uint32(m.Data)))
	if errno == 0 {
		return nil
	}
	text := ""
	if m.Header.Flags&netlink.AcknowledgeTLVs != 0 {
		text = extAck(m.Data[4:])
	}
	return opError(op, nil, errno, text)
}
