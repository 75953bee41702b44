package nl

import (
	"encoding/binary"
	"fmt"

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
	enc  Encoder
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
	reply  func(Message) error
	done   bool
	err    error
}

// Request appends a request that changes something, and that the kernel is to
// acknowledge. op and object describe it in errors; a nil object is left out.
// NLM_F_REQUEST and NLM_F_ACK are set for it.
func (b *Batch) Request(op string, obj fmt.Stringer, typ, flags uint16, body func(*Encoder)) {
	b.add(request{op: op, object: obj, want: acknowledgement}, typ, flags|unix.NLM_F_ACK, body)
}

// Get appends a request for one object, whose message goes to reply. NLM_F_ACK
// is not set: an acknowledgement would follow the object.
func (b *Batch) Get(op string, obj fmt.Stringer, typ, flags uint16, body func(*Encoder), reply func(Message) error) {
	b.add(request{op: op, object: obj, want: object, reply: reply}, typ, flags, body)
}

// Silent appends a request that is answered only if it fails. Something behind
// it in the batch must be acknowledged, or an error of it is lost.
func (b *Batch) Silent(op string, obj fmt.Stringer, typ, flags uint16, body func(*Encoder)) {
	b.add(request{op: op, object: obj, want: nothing}, typ, flags, body)
}

func (b *Batch) add(r request, typ, flags uint16, body func(*Encoder)) {
	if b == nil {
		return // nobody will send it
	}
	r.start = len(b.enc.b)
	b.enc.b = binary.NativeEndian.AppendUint32(b.enc.b, 0) // the length, set below
	b.enc.b = binary.NativeEndian.AppendUint16(b.enc.b, typ)
	b.enc.b = binary.NativeEndian.AppendUint16(b.enc.b, flags|unix.NLM_F_REQUEST)
	b.enc.b = append(b.enc.b, 0, 0, 0, 0, 0, 0, 0, 0) // sequence (set by Execute) and port
	if body != nil {
		body(&b.enc)
	}
	if b.enc.err != nil && r.err == nil {
		r.err = b.enc.err
		b.enc.err = nil
	}
	b.enc.pad()
	binary.NativeEndian.PutUint32(b.enc.b[r.start:], uint32(len(b.enc.b)-r.start))
	b.reqs = append(b.reqs, r)
}

// Len counts the requests.
func (b *Batch) Len() int { return len(b.reqs) }

// Size gives the bytes that the batch has so far.
func (b *Batch) Size() int { return len(b.enc.b) }

// Bytes gives the messages as they would be sent, for tests that record them.
func (b *Batch) Bytes() []byte { return b.enc.b }

// Reset empties the batch and keeps its memory.
func (b *Batch) Reset() {
	b.enc = Encoder{b: b.enc.b[:0]}
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
