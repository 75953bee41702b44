package nl

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/fnv"
	"io"
	"io/fs"
	"slices"
	"sync"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo"
)

// Name is the name of an object in errors, such as the name of a link.
type Name string

// String returns the name.
func (n Name) String() string { return string(n) }

// Batch is a list of requests that are sent to the kernel in one sendmsg. It is not a transaction: the kernel
// processes later requests even if an earlier one fails. An exception is nf_tables, which makes a transaction of the
// requests between a begin and an end message.
//
// Add requests to a batch, pass it to Conn.Execute, and look at Err. After Reset, the batch can be used again.
type Batch struct {
	buf  []byte // the encoded messages
	reqs []request
}

// answer is the kind of answer that a request gets.
type answer int

const (
	acknowledgement answer = iota // one NLMSG_ERROR, with errno 0 for success
	object                        // one message of the object's own type, or an error
	nothing                       // only an error, if any
)

type request struct {
	op     string
	object fmt.Stringer
	start  int // position of its header in the batch
	want   answer
	reply  func(netlink.Message) error
	done   bool
	err    error
}

// Add appends a request that changes something. The kernel acknowledges it. op and obj describe the request in
// errors. obj may be nil. Add sets the flags Request and Acknowledge. err is the error from building m. If it is not
// nil, it becomes the request's error, and Execute sends nothing.
func (b *Batch) Add(op string, obj fmt.Stringer, m netlink.Message, err error) {
	m.Header.Flags |= netlink.Acknowledge
	b.append(request{op: op, object: obj, want: acknowledgement, err: err}, m)
}

// AddGet appends a request for one object. Execute calls reply with the answer. reply must not keep the message's
// data. AddGet does not set Acknowledge, since the kernel would then send an acknowledgement after the object.
func (b *Batch) AddGet(op string, obj fmt.Stringer, m netlink.Message, err error, reply func(netlink.Message) error) {
	b.append(request{op: op, object: obj, want: object, reply: reply, err: err}, m)
}

// AddSilent appends a request that the kernel answers only if it fails. It has the parameters of Add.
func (b *Batch) AddSilent(op string, obj fmt.Stringer, m netlink.Message, err error) {
	b.append(request{op: op, object: obj, want: nothing, err: err}, m)
}

// append encodes a message at the end of the batch. Conn.send sets the message's sequence number later.
func (b *Batch) append(r request, m netlink.Message) {

	if b.buf == nil {
		room, count := 1<<10, 8 // bytes and requests: enough for most batches of an ADD
		if r.want == object {
			room, count = 1<<8, 4 // a batch of requests for single objects is small
		}
		b.buf, b.reqs = make([]byte, 0, room), make([]request, 0, count)
	}

	r.start = len(b.buf)
	b.buf = appendHeader(b.buf, m.Header.Type, m.Header.Flags|netlink.Request, align(len(m.Data)))
	b.buf = append(b.buf, m.Data...)
	b.buf = append(b.buf, make([]byte, align(len(m.Data))-len(m.Data))...)

	b.reqs = append(b.reqs, r)
}

// Len returns the number of requests.
func (b *Batch) Len() int { return len(b.reqs) }

// Bytes returns the encoded messages. Tests record them.
func (b *Batch) Bytes() []byte { return b.buf }

// Reset empties the batch and keeps its memory.
func (b *Batch) Reset() {
	b.buf = b.buf[:0]
	clear(b.reqs)
	b.reqs = b.reqs[:0]
}

// Err returns the error of the i-th request, counted from 0, after Execute.
func (b *Batch) Err(i int) error { return b.reqs[i].error() }

// FirstErr returns the error of the first failed request, or nil. It skips errors that match one in the list ignored.
// Errors of later requests are mostly consequences of the first.
func (b *Batch) FirstErr(ignored ...error) error {
	for i := range b.reqs {
		err := b.reqs[i].error()
		if err != nil && !slices.ContainsFunc(ignored, func(one error) bool { return errors.Is(err, one) }) {
			return err
		}
	}
	return nil
}

// unanswered stores err in each request that expects an answer and has not received it.
func (b *Batch) unanswered(err error) {
	for i := range b.reqs {
		if r := &b.reqs[i]; !r.done && r.want != nothing && r.err == nil {
			r.err = err
		}
	}
}

// error returns the request's error as a *tombolo.OpError, or nil.
func (r *request) error() error {
	if r.err == nil {
		return nil
	}
	if _, ok := r.err.(*tombolo.OpError); ok {
		return r.err
	}
	return opError(r.op, r.object, r.err, "")
}

func opError(op string, obj fmt.Stringer, err error, text string) *tombolo.OpError {
	e := &tombolo.OpError{Op: op, Err: err, Message: text}
	if obj != nil {
		e.Object = obj.String()
	}
	return e
}

// ErrNoAnswer means that the kernel accepted a request but did not answer. The kernel answers before sendmsg returns,
// so waiting would not help.
var ErrNoAnswer = errors.New("the kernel gave no answer")

// ErrEmpty is returned by Transport.Receive if no datagram is queued.
var ErrEmpty = errors.New("nothing to receive")

// Transport sends and receives whole netlink datagrams. It is a socket, or a fake kernel in tests.
type Transport interface {
	// Send sends a datagram with one or more messages to the kernel. When Send returns, the kernel has processed
	// them.
	Send(b []byte) error
	// Receive reads the next datagram into b, without waiting, and returns its length. If there is none, it returns
	// ErrEmpty. If the datagram does not fit into b, it returns an error.
	Receive(b []byte) (int, error)
	Close() error
}

// Conn is a netlink connection to the kernel. Several goroutines may call its methods. Concurrent calls run one after
// the other.
type Conn struct {
	mu  sync.Mutex
	t   Transport
	seq uint32
	buf []byte
}

// New returns a Conn that uses and owns the transport t.
func New(t Transport) *Conn { return &Conn{t: t} }

// Of returns s as a Conn. Public packages take such a Conn as a tombolo.Socket. If s is not a Conn, Of returns nil.
func Of(s tombolo.Socket) *Conn {
	c, _ := s.(*Conn)
	return c
}

// Close closes the transport. Later requests, and another Close, return an error that matches tombolo.ErrInvalid.
func (c *Conn) Close() error {
	c.mu.Lock()
	t := c.t
	c.t = closedTransport{}
	c.mu.Unlock()
	return t.Close()
}

// Invalid is an error about an invalid value. It matches tombolo.ErrInvalid.
type Invalid string

func (e Invalid) Error() string { return string(e) }

// Is reports whether target is tombolo.ErrInvalid. The message of e does not contain the text of ErrInvalid.
func (e Invalid) Is(target error) bool { return target == tombolo.ErrInvalid }

// closedTransport is the transport of a closed Conn.
type closedTransport struct{}

func (closedTransport) Send([]byte) error           { return closedTransport{}.Close() }
func (closedTransport) Receive([]byte) (int, error) { return 0, closedTransport{}.Close() }
func (closedTransport) Close() error {
	return &tombolo.OpError{Op: "use connection",
		Err: fmt.Errorf("%w: it is closed: %w", tombolo.ErrInvalid, unix.EBADF)}
}

// receiveSize is the maximum length in bytes of a datagram from the kernel, which is an answer or a part of a listing.
// The longest answer is a link with 64 KiB of alternative names. The unused part of the buffer costs no memory. With a
// buffer of less than 32 KiB, the kernel would split a listing into more parts. Then links that come and go would
// interrupt nearly every listing.
const receiveSize = 80 << 10

// announcementSize is the maximum length in bytes of an announcement.
const announcementSize = 8 << 10

// buffer returns the receive buffer. It allocates the buffer on the first call.
func (c *Conn) buffer() []byte {
	if c.buf == nil {
		c.buf = make([]byte, receiveSize)
	}
	return c.buf
}

// Execute sends a batch and reads the answers. It returns the error of the first failed request. Batch.Err returns the
// error of any request. The kernel processes all requests even if some fail, except in a transaction of nf_tables. If a
// request could not be encoded, or sendmsg fails, the kernel processes none.
func (c *Conn) Execute(b *Batch) error {

	if err := b.FirstErr(); err != nil {
		return err
	}

	if len(b.reqs) == 0 {
		return nil
	}

	c.mu.Lock()
	defer c.mu.Unlock()
	base, err := c.send(b)
	if err == nil {
		err = c.collect(b, base)
	}

	if err != nil {
		c.drain()
		b.unanswered(err)
		return opError(b.reqs[0].op, b.reqs[0].object, err, "")
	}

	return b.FirstErr()
}

// Do calls Execute unless ctx is done. Once a batch is sent, the kernel's work on it cannot be interrupted.
func (c *Conn) Do(ctx context.Context, b *Batch) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	return c.Execute(b)
}

// Change sends one request that changes something. It has the parameters of Batch.Add.
func (c *Conn) Change(ctx context.Context, op string, obj fmt.Stringer, m netlink.Message, err error) error {
	var b Batch
	b.Add(op, obj, m, err)

	return c.Do(ctx, &b)
}

// Get sends one request for an object. It has the parameters of Batch.AddGet.
func (c *Conn) Get(ctx context.Context, op string, obj fmt.Stringer, m netlink.Message, err error,
	reply func(netlink.Message) error) error {
	var b Batch
	b.AddGet(op, obj, m, err, reply)

	return c.Do(ctx, &b)
}

// PassAbsent returns nil for an error about a missing object, and any other error unchanged.
func PassAbsent(err error) error {
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return err
}

// send sets the sequence numbers of all requests, and sends the batch. It returns the first number.
func (c *Conn) send(b *Batch) (base uint32, _ error) {
	base = c.seq + 1
	for i := range b.reqs {
		c.seq++
		binary.NativeEndian.PutUint32(b.buf[b.reqs[i].start+8:], c.seq)
	}

	if err := c.t.Send(b.buf); err != nil {
		return base, fmt.Errorf("send: %w", err)
	}
	return base, nil
}

// collect reads the answers to the batch b until the socket is empty, and passes each to its request. base is the
// sequence number of the first request. The number of answers is not known beforehand: the kernel answers a request
// from AddSilent only if it fails, and may report an error of a whole transaction. No such answer may stay in the
// socket for the next Execute. collect returns an error if it could not read the answers. Errors of requests are in b.
func (c *Conn) collect(b *Batch, base uint32) error {
	buf := c.buffer()
	var lost error
	for {
		n, err := c.t.Receive(buf)
		if errors.Is(err, ErrEmpty) {
			break
		}

		if errors.Is(err, unix.ENOBUFS) && lost == nil {
			// Some answers are lost, but earlier answers are still in the socket. Read these before returning the
			// error.
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
				b.reqs[i].handle(m)
			}
		}
	}

	// Set ErrNoAnswer only if no request failed. If a transaction fails, the kernel answers only the failed requests.
	if lost == nil && b.FirstErr() == nil {
		b.unanswered(ErrNoAnswer)
	}

	return lost
}

// drain empties the socket after an error. After an overflow the kernel sends nothing to the socket until the socket
// is empty. It also starts no new listing before the reader has read the previous one.
func (c *Conn) drain() {
	for {
		if _, err := c.t.Receive(c.buffer()); err != nil {
			return
		}
	}
}

// handle processes the answer to a request. It stores the kernel's error, or calls reply with the object.
func (r *request) handle(m netlink.Message) {
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

// dumpTries is the maximum number of attempts to get a list without interruption. In a test, links that came and went
// interrupted half of all attempts, and ten failures in a row never happened.
const dumpTries = 20

// List requests a list of objects. After the whole list has arrived, it calls the callback each with every object. If
// the list changed while the kernel wrote it (see listing), List requests it again. If all attempts are interrupted, it
// calls each with the objects of the last attempt, and its error matches tombolo.ErrInterrupted. This list may lack
// some objects and repeat others. List sends nothing if ctx is done.
//
// If each returns an error, List stops and returns it. The callback may keep the message's data. List sets Dump in the
// flags of m. err is the error of building m.
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

// Walk requests a list like List, but stores no object. As soon as an object arrives, Walk passes it to each. This
// limits the memory, since a pod may create any number of objects. Walk calls begin before each attempt, including the
// first. An attempt passes all objects to each again, so begin must discard those of the previous attempt. If begin is
// nil, Walk does not check for changes that the kernel does not report (see listing), so it may miss objects. The
// callbacks must not use the Conn.
func (c *Conn) Walk(ctx context.Context, op string, m netlink.Message, err error, begin func(),
	each func(netlink.Message) error) error {
	if err := ctx.Err(); err != nil {
		return err
	}

	var b Batch
	m.Header.Flags |= netlink.Dump
	b.append(request{op: op, want: object, err: err}, m)
	if err := b.FirstErr(); err != nil {
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

// dump sends the request until it has received a consistent list. After dumpTries attempts it returns ErrInterrupted.
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

// readAgain reads the list a second time, split into other parts. If an object was lost between two parts, the two
// lists differ. The kernel makes the first part smaller on a socket that has not received anything yet. isUsed states
// whether c's socket had received something before the first reading. If it had, readAgain opens another socket, which
// needs CAP_NET_ADMIN. If it had not, or if another socket cannot be opened, readAgain reads from c's socket.
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

// reading is the result of one attempt to read a list.
type reading struct {
	interrupted bool   // the list changed while the kernel wrote it
	parts       int    // datagrams with objects
	sum         uint64 // a hash of the objects' identities, in their order
}

// readDump reads a list once, and calls the callback each with every object.
func (c *Conn) readDump(b *Batch, l kind, each func(netlink.Message) error) (r reading, _ error) {
	seq, err := c.send(b)
	if err != nil {
		return r, err
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

// kind describes how to identify an object in a list. header is the length of the fixed header. The first head bytes
// of the header and the attributes in keys identify the object.
type kind struct {
	header, head int
	keys         []uint16
}

// listing returns how to identify the objects of a list that must be checked for consistency. Lists of some kinds can
// be inconsistent without a mark from the kernel. Between two parts of a list, the kernel remembers only how many
// objects it has written, and not the last one. It does not mark lists of routes, neighbours, policy rules and tc
// filters, or of the addresses of one link. Since Linux 6.9, it does not reliably mark lists of all addresses. If such
// a list has several parts, it must be read a second time, in other parts, with the same result.
//
// For other lists, the result has no keys. The kernel marks interrupted lists of links, nf_tables objects and next
// hops. In a list of flows, the kernel itself finds the place where the previous part ended. In a list of sockets, it
// counts only within one bucket of its hash table, so objects are rarely lost.
func listing(ask netlink.HeaderType) kind {
	switch ask {
	case unix.RTM_GETADDR:
		return kind{unix.SizeofIfAddrmsg, unix.SizeofIfAddrmsg, []uint16{unix.IFA_ADDRESS, unix.IFA_LOCAL}}
	case unix.RTM_GETROUTE:
		keys := []uint16{unix.RTA_DST, unix.RTA_OIF, unix.RTA_GATEWAY, unix.RTA_PRIORITY, unix.RTA_TABLE}
		return kind{unix.SizeofRtMsg, 8, keys}
	case unix.RTM_GETNEIGH: // without the state, which traffic changes
		return kind{unix.SizeofNdMsg, 8, []uint16{unix.NDA_DST, unix.NDA_LLADDR}}
	case unix.RTM_GETRULE:
		return kind{unix.SizeofRtMsg, unix.SizeofRtMsg, []uint16{unix.FRA_PRIORITY, unix.FRA_SRC, unix.FRA_DST}}
	case unix.RTM_GETTFILTER: // struct tcmsg has the handle and the priority
		return kind{sizeofTcmsg, sizeofTcmsg, []uint16{unix.TCA_KIND}}
	}
	return kind{}
}

const sizeofTcmsg = 20

// identify adds the bytes that identify an object to the hash sum. If k has no keys, it adds nothing.
func (k kind) identify(sum io.Writer, data []byte) {
	if k.keys == nil {
		return
	}
	_, _ = sum.Write(data[:min(k.head, len(data))]) // a hash returns no error
	_, _ = sum.Write(Pick(data[min(k.header, len(data)):], k.keys...))
}

// dumpError returns the error in the message that ends a listing. It returns nil if the kernel has written the whole
// list.
func dumpError(op string, m netlink.Message) error {
	const errnoLen = 4
	if len(m.Data) < errnoLen {
		return nil
	}

	if errno, text := kernelError(m, errnoLen); errno != 0 {
		return opError(op, nil, errno, text)
	}
	return nil
}
