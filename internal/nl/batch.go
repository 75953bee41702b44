package nl

import (
	"encoding/binary"
	"fmt"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo"
)

// Name is an object that is named by a plain string: a link's name, say.
type Name string

// String gives the name.
func (n Name) String() string { return string(n) }

// Batch is a row of requests that go to the kernel in one sendmsg. It is not a
// transaction: the kernel runs a later request after an earlier one failed.
// (nf_tables makes one of what stands between its own begin and end messages.)
//
// Build a batch, hand it to Conn.Execute, look at Err. It can be used again
// after Reset.
type Batch struct {
	buf  []byte // the messages as they go to the kernel
	reqs []request
}

// answer is what a request waits for.
type answer int

const (
	acknowledgement answer = iota // one NLMSG_ERROR, with errno 0 for success
	object                        // one message of the object's own type, or an error
	nothing                       // an error, or silence
)

type request struct {
	op     string
	object fmt.Stringer
	start  int // where its header is in the batch
	want   answer
	reply  func(netlink.Message) error
	done   bool
	err    error
}

// Add appends a request that changes something, and that the kernel acknowledges. op
// and obj describe it in errors; a nil obj is left out. Request and Acknowledge are set
// in the message's flags. err is what building the message returned: it becomes the
// error of the request, and then nothing of the batch is sent.
func (b *Batch) Add(op string, obj fmt.Stringer, m netlink.Message, err error) {
	m.Header.Flags |= netlink.Acknowledge
	b.append(request{op: op, object: obj, want: acknowledgement, err: err}, m)
}

// AddGet appends a request for one object, whose message goes to reply, which must not
// keep its data. Acknowledge is not set: an acknowledgement would follow the object.
func (b *Batch) AddGet(op string, obj fmt.Stringer, m netlink.Message, err error, reply func(netlink.Message) error) {
	b.append(request{op: op, object: obj, want: object, reply: reply, err: err}, m)
}

// AddSilent appends a request that is answered only if it fails. A request behind it in
// the batch must be acknowledged, or its error is lost.
func (b *Batch) AddSilent(op string, obj fmt.Stringer, m netlink.Message, err error) {
	b.append(request{op: op, object: obj, want: nothing, err: err}, m)
}

// append writes a message behind the others. Its sequence number is set by Execute.
func (b *Batch) append(r request, m netlink.Message) {
	if b.buf == nil {
		room, count := 1<<10, 8 // of a pod, most have room in that
		if r.want == object {
			room, count = 1<<8, 4 // a question has few beside it
		}
		b.buf, b.reqs = make([]byte, 0, room), make([]request, 0, count)
	}
	r.start = len(b.buf)
	n := unix.NLMSG_HDRLEN + align(len(m.Data))
	b.buf = binary.NativeEndian.AppendUint32(b.buf, uint32(n))
	b.buf = binary.NativeEndian.AppendUint16(b.buf, uint16(m.Header.Type))
	b.buf = binary.NativeEndian.AppendUint16(b.buf, uint16(m.Header.Flags|netlink.Request))
	b.buf = append(b.buf, 0, 0, 0, 0, 0, 0, 0, 0) // sequence and port
	b.buf = append(b.buf, m.Data...)
	for len(b.buf) < r.start+n {
		b.buf = append(b.buf, 0)
	}
	b.reqs = append(b.reqs, r)
}

// Len counts the requests.
func (b *Batch) Len() int { return len(b.reqs) }

// Bytes gives the messages as they would be sent, for tests that record them.
func (b *Batch) Bytes() []byte { return b.buf }

// Reset empties the batch and keeps its memory.
func (b *Batch) Reset() {
	b.buf = b.buf[:0]
	clear(b.reqs)
	b.reqs = b.reqs[:0]
}

// Err gives the error of request i, in the order in which they were appended,
// after an Execute.
func (b *Batch) Err(i int) error { return b.reqs[i].error() }

// firstErr gives the first error: those behind it are mostly its consequences.
func (b *Batch) firstErr() error {
	for i := range b.reqs {
		if err := b.reqs[i].error(); err != nil {
			return err
		}
	}
	return nil
}

// unanswered gives an error to each request that waits for an answer in vain.
func (b *Batch) unanswered(err error) {
	for i := range b.reqs {
		if r := &b.reqs[i]; !r.done && r.want != nothing && r.err == nil {
			r.err = err
		}
	}
}

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
