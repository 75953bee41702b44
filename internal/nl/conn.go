package nl

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/fnv"
	"io"
	"io/fs"
	"sync"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo"
)

// ErrNoAnswer means that the kernel accepted a request and left no answer in the socket. The kernel answers before
// sendmsg returns, so waiting would not help.
var ErrNoAnswer = errors.New("the kernel gave no answer")

// ErrEmpty is returned by a Transport's Receive if nothing is queued.
var ErrEmpty = errors.New("nothing to receive")

// Transport sends and receives whole netlink datagrams. It is a socket or a test's fake kernel.
type Transport interface {
	// Send passes a datagram of one or more messages to the kernel. The kernel processes them before Send returns.
	Send(b []byte) error
	// Receive returns the next datagram without waiting, and ErrEmpty if there is none. A datagram that does not fit
	// into b is an error.
	Receive(b []byte) (int, error)
	Close() error
}

// Conn is a netlink connection to the kernel. Several goroutines may call its methods; the calls run one after the
// other.
type Conn struct {
	mu  sync.Mutex
	t   Transport
	seq uint32
	buf []byte
}

// New returns a Conn over a transport, which it then owns.
func New(t Transport) *Conn { return &Conn{t: t} }

// Of returns the connection that a public package received as a Socket. It returns nil, which cannot be used, if s is
// another kind of Socket.
func Of(s tombolo.Socket) *Conn {
	c, _ := s.(*Conn)
	return c
}

// Close closes the transport. All later calls, including another Close, return tombolo.ErrInvalid.
func (c *Conn) Close() error {
	c.mu.Lock()
	t := c.t
	c.t = closed{}
	c.mu.Unlock()
	return t.Close()
}

// Invalid is an error about an invalid value. It matches tombolo.ErrInvalid.
type Invalid string

func (e Invalid) Error() string { return string(e) }

// Is reports a match with tombolo.ErrInvalid, whose text is not part of the message.
func (e Invalid) Is(target error) bool { return target == tombolo.ErrInvalid }

// closed is the transport of a Conn after Close.
type closed struct{}

func (closed) Send([]byte) error           { return closed{}.Close() }
func (closed) Receive([]byte) (int, error) { return 0, closed{}.Close() }
func (closed) Close() error {
	return &tombolo.OpError{Op: "use connection",
		Err: fmt.Errorf("%w: it is closed: %w", tombolo.ErrInvalid, unix.EBADF)}
}

// receiveSize is the size of the longest datagram from the kernel, an answer or a part of a dump. The longest one is
// a link with 64 KiB of alternative names. The unused part costs no memory. With smaller buffers, nearly every
// listing is interrupted while links come and go.
const receiveSize = 80 << 10

// announcementSize is the size of the longest announcement.
const announcementSize = 8 << 10

// buffer returns the receive buffer, and allocates it on the first call.
func (c *Conn) buffer() []byte {
	if c.buf == nil {
		c.buf = make([]byte, receiveSize)
	}
	return c.buf
}

// Execute sends a batch and reads the answers. It returns the error of the first failed request; Batch.Err has the
// others. Also after an error, the kernel has tried all requests. The exception is a request that could not be
// encoded or sent: then it has tried none.
func (c *Conn) Execute(b *Batch) error {

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

// Do calls Execute unless ctx is done. Once a batch is sent, the kernel's work on it cannot be interrupted.
func (c *Conn) Do(ctx context.Context, b *Batch) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	return c.Execute(b)
}

// PassAbsent returns nil for an error about a missing object, and any other error unchanged.
func PassAbsent(err error) error {
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return err
}

// number sets the sequence number of each request, and returns the first.
func (c *Conn) number(b *Batch) uint32 {
	base := c.seq + 1
	for i := range b.reqs {
		c.seq++
		binary.NativeEndian.PutUint32(b.buf[b.reqs[i].start+8:], c.seq)
	}
	return base
}

// collect reads answers until the socket is empty. So an error of a silent request, or of a whole transaction, never
// stays in the socket for the next Execute.
func (c *Conn) collect(b *Batch, base uint32) error {
	buf := c.buffer()
	var lost error
	for {
		n, err := c.t.Receive(buf)
		if errors.Is(err, ErrEmpty) {
			break
		}

		if errors.Is(err, unix.ENOBUFS) && lost == nil {
			// Some answers are lost. The ones before them are still there.
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

	// After a failed transaction the kernel answers only the failed requests.
	if lost == nil && b.firstErr() == nil {
		b.unanswered(ErrNoAnswer)
	}

	return lost
}

// drain empties the socket after an error. After an overflow the kernel sends nothing more to the socket, and it
// starts no dump while another is in progress.
func (c *Conn) drain() {
	for {
		if _, err := c.t.Receive(c.buffer()); err != nil {
			return
		}
	}
}

// take stores the answer to a request.
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
		return // ignore NLMSG_NOOP and other control messages
	case r.reply != nil && !r.done:
		if err := r.reply(m); err != nil {
			r.err = err
		}
	}

	r.done = true
}

// dumpTries is the number of attempts of an interrupted dump. In a test where links that came and went interrupted
// half of all dumps, ten failures in a row never happened.
const dumpTries = 20

// List requests a list of objects. After the whole list has arrived, it calls each for every object. If the list
// changed while the kernel wrote it (see listing), List requests it again. If that did not help, it calls each for the
// objects of the last attempt, which may lack some and repeat others, and returns tombolo.ErrInterrupted. It sends
// nothing if ctx is done.
//
// An error of each ends the list. The callback may keep the message's data. List sets Dump in the flags of m. err is
// the error of building m.
func (c *Conn) List(ctx context.Context, op string, m netlink.Message, err error,
	each func(netlink.Message) error) error {
	var list []netlink.Message
	err = c.Walk(ctx, op, m, err, func() { list = nil }, func(m netlink.Message) error {
		list = append(list, m)
		return nil
	})
	if err != nil && !errors.Is(err, tombolo.ErrInterrupted) {
		return err
	}

	for _, m := range list {
		if err := each(m); err != nil {
			return opError(op, nil, err, "")
		}
	}
	return err
}

// Walk requests a list like List, but calls each while the objects arrive and keeps none, since a pod may have any
// number of them. It calls begin before each attempt. Without begin it does not go by listing, and each may miss an
// object. Neither callback may use the connection.
func (c *Conn) Walk(ctx context.Context, op string, m netlink.Message, err error, begin func(),
	each func(netlink.Message) error) error {
	if err := ctx.Err(); err != nil {
		return err
	}

	var b Batch
	m.Header.Flags |= netlink.Dump
	b.append(request{op: op, want: object, err: err}, m)
	if err := b.firstErr(); err != nil {
		return err
	}
	l := listing(m.Header.Type)
	if begin == nil {
		begin, l = func() {}, kind{}
	}
	c.mu.Lock()
	err = c.dump(&b, l, begin, each)
	c.mu.Unlock()
	var opErr *tombolo.OpError
	if err == nil || errors.As(err, &opErr) {
		return err
	}

	return opError(op, nil, err, "")
}

// dump sends the request until a list is trusted.
func (c *Conn) dump(b *Batch, l kind, begin func(), each func(netlink.Message) error) error {
	for range dumpTries {
		begin()
		isUsed := c.buf != nil
		r, err := c.readDump(b, l, each)
		if err == nil && r.parts > 1 && l.keys != nil && !r.interrupted {
			var again reading
			again, err = c.readAgain(b, l, isUsed)
			r.interrupted = again.interrupted || again.sum != r.sum
		}
		if err != nil {
			c.drain()
		}
		if err != nil || !r.interrupted {
			return err
		}
	}

	return tombolo.ErrInterrupted
}

// readAgain reads a list in parts that begin elsewhere: a loss between two parts could happen in both lists alike. The
// first part is smaller on a socket that has not received anything yet. Without CAP_NET_ADMIN readAgain opens none.
func (c *Conn) readAgain(b *Batch, l kind, isUsed bool) (reading, error) {
	if _, isReal := c.t.(*socket); isReal && isUsed {
		var t *socket
		if err := c.Within(func() (err error) { t, err = newSocket(unix.NETLINK_ROUTE); return err }); err == nil {
			defer t.Close()
			c = New(t)
		}
	}
	return c.readDump(b, l, func(netlink.Message) error { return nil })
}

// reading is the result of one attempt of a list.
type reading struct {
	interrupted bool   // the kernel marked the list as changed
	parts       int    // datagrams with objects
	sum         uint64 // a hash of the objects' identities, in their order
}

// readDump reads a list once, and calls each for every object.
func (c *Conn) readDump(b *Batch, l kind, each func(netlink.Message) error) (r reading, _ error) {
	seq := c.number(b)
	if err := c.t.Send(b.buf); err != nil {
		return r, fmt.Errorf("send: %w", err)
	}
	sum := fnv.New64a()
	buf := c.buffer()
	for {
		n, err := c.t.Receive(buf)
		if errors.Is(err, ErrEmpty) {
			return r, ErrNoAnswer
		}

		if err != nil {
			return r, fmt.Errorf("receive: %w", err)
		}
		before := r.parts
		part := append([]byte(nil), buf[:n]...)
		for len(part) > 0 {
			var m netlink.Message
			if m, part, err = next(part); err != nil {
				return r, err
			}

			if m.Header.Sequence != seq {
				continue
			}
			r.interrupted = r.interrupted || m.Header.Flags&netlink.DumpInterrupted != 0
			switch m.Header.Type {
			case netlink.Done:
				r.sum = sum.Sum64()
				return r, dumpError(b.reqs[0].op, m)
			case netlink.Error:
				errno, text, err := ackError(m)
				if err == nil {
					err = opError(b.reqs[0].op, nil, errno, text)
				}
				return r, err
			default:
				r.parts = before + 1
				l.identify(sum, m.Data)
				if err := each(m); err != nil {
					return r, err
				}
			}
		}
	}
}

// kind describes a kind of objects: how long the fixed header is, how much of it identifies an object, and which
// attributes also identify it.
type kind struct {
	header, head int
	keys         []uint16
}

// listing returns the kind of objects in a list whose parts can contradict each other though the kernel does not mark
// it as interrupted. Between two parts, a kernel counts objects instead of remembering the last one; it marks no list
// of the addresses of one link, nor any of routes, neighbours, rules or filters, and since Linux 6.9 a list of all
// addresses not reliably. If such a list comes in several parts, it is trusted only if a second one in other parts is
// the same.
//
// The kind of other lists has no keys: links, nf_tables and next hops are marked, and flows and sockets are found again
// by themselves.
func listing(ask netlink.HeaderType) kind {
	switch ask {
	case unix.RTM_GETADDR:
		return kind{unix.SizeofIfAddrmsg, unix.SizeofIfAddrmsg, []uint16{unix.IFA_ADDRESS, unix.IFA_LOCAL}}
	case unix.RTM_GETROUTE:
		keys := []uint16{unix.RTA_DST, unix.RTA_OIF, unix.RTA_GATEWAY, unix.RTA_PRIORITY, unix.RTA_TABLE}
		return kind{unix.SizeofRtMsg, 8, keys}
	case unix.RTM_GETNEIGH: // without the state, which changes with each packet
		return kind{unix.SizeofNdMsg, 8, []uint16{unix.NDA_DST, unix.NDA_LLADDR}}
	case unix.RTM_GETRULE:
		return kind{unix.SizeofRtMsg, unix.SizeofRtMsg, []uint16{unix.FRA_PRIORITY, unix.FRA_SRC, unix.FRA_DST}}
	case unix.RTM_GETTFILTER: // struct tcmsg has the handle and the priority
		return kind{sizeofTcmsg, sizeofTcmsg, []uint16{unix.TCA_KIND}}
	}
	return kind{}
}

const sizeofTcmsg = 20

// identify adds to a sum the bytes of an object's message that identify the object.
func (k kind) identify(sum io.Writer, data []byte) {
	if k.keys == nil {
		return
	}
	_, _ = sum.Write(data[:min(k.head, len(data))]) // a hash returns no error
	_, _ = sum.Write(Pick(data[min(k.header, len(data)):], k.keys...))
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
