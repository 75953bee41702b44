package nl

import (
	"encoding/binary"
	"fmt"

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

// AddSilent appends a request that the kernel answers only if it fails. A later request of the batch must request an
// acknowledgement. If none does, the error is lost.
func (b *Batch) AddSilent(op string, obj fmt.Stringer, m netlink.Message, err error) {
	b.append(request{op: op, object: obj, want: nothing, err: err}, m)
}

// append encodes a message at the end of the batch. Execute sets its sequence number later.
func (b *Batch) append(r request, m netlink.Message) {

	if b.buf == nil {
		room, count := 1<<10, 8 // bytes and requests: enough for most batches of an ADD
		if r.want == object {
			room, count = 1<<8, 4 // a batch of requests for single objects is small
		}
		b.buf, b.reqs = make([]byte, 0, room), make([]request, 0, count)
	}

	r.start = len(b.buf)
	n := unix.NLMSG_HDRLEN + align(len(m.Data))
	b.buf = binary.NativeEndian.AppendUint32(b.buf, uint32(n))
	b.buf = binary.NativeEndian.AppendUint16(b.buf, uint16(m.Header.Type))
	b.buf = binary.NativeEndian.AppendUint16(b.buf, uint16(m.Header.Flags|netlink.Request))
	b.buf = append(b.buf, 0, 0, 0, 0, 0, 0, 0, 0) // room for sequence number and port ID
	b.buf = append(b.buf, m.Data...)
	for len(b.buf) < r.start+n {
		b.buf = append(b.buf, 0)
	}

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

// firstErr returns the error of the first failed request. Errors of later requests are mostly consequences of it.
func (b *Batch) firstErr() error {
	for i := range b.reqs {
		if err := b.reqs[i].error(); err != nil {
			return err
		}
	}
	return nil
}

// unanswered sets the error of each request that has not received its answer to err.
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
