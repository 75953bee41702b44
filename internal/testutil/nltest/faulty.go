package nltest

import (
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"sync"
	"testing"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/nl"
	"github.com/tombolo-cni/tombolo/netns"
)

// Faulty is a kernel, in general a real one, that fails requests of the test's
// choice. The kernel does not see those; the others of the same datagram go
// through, and the answers come back in the order of the requests.
//
// A transaction of nf_tables that has such a request in it is held back whole, and
// only that request is answered: as the kernel does it.
type Faulty struct {
	t      nl.Transport
	mu     sync.Mutex
	faults []*Fault
	queue  [][]byte
}

// Fault says which requests fail, and how. The fields down to Match say which;
// those that are not set are any.
type Fault struct {
	Type uint16 // RTM_NEWLINK, …; 0 is any
	// Nth fails the nth of the requests that match, from 1, and 0 each of them.
	Nth int
	// Match looks at the request itself.
	Match func(netlink.Message) bool

	Errno unix.Errno // what the request is answered with
	Text  string     // and the kernel's words
	// Interrupt passes the request, a dump, on, and marks what comes back as
	// interrupted (NLM_F_DUMP_INTR), in place of Errno.
	Interrupt bool
	// Times is how often to fire at most; 0 is without limit.
	Times int

	mu    sync.Mutex
	seen  int
	fired int
	marks []uint32 // sequence numbers of the dumps to mark
}

// Dial opens a connection to a namespace's kernel that fails as the faults say, all of which have to
// have fired when the test ends.
func Dial(tb testing.TB, family int, ns *netns.NS, faults ...*Fault) *nl.Conn {
	tb.Helper()
	t, err := nl.Open(family, ns)
	if err != nil {
		tb.Fatal(err)
	}
	conn := nl.New(NewFaulty(t, faults...))
	tb.Cleanup(func() { conn.Close() })
	MustHaveFired(tb, faults...)
	return conn
}

// NoIPv6 refuses, as a kernel without IPv6, what is said of a link's IPv6.
func NoIPv6() *Fault {
	return &Fault{Type: unix.RTM_NEWLINK, Match: speaksOfIPv6, Errno: unix.EAFNOSUPPORT}
}

func speaksOfIPv6(m netlink.Message) (speaks bool) {
	if len(m.Data) < unix.SizeofIfInfomsg {
		return false // nf_tables' begin of a transaction has the same type
	}
	nl.Decode(m.Data[unix.SizeofIfInfomsg:], func(ad *netlink.AttributeDecoder) {
		if ad.Type() == unix.IFLA_AF_SPEC {
			ad.Nested(func(families *netlink.AttributeDecoder) error {
				for families.Next() {
					speaks = speaks || families.Type() == unix.AF_INET6
				}
				return nil
			})
		}
	})
	return speaks
}

// NewFaulty wraps a transport.
func NewFaulty(t nl.Transport, faults ...*Fault) *Faulty { return &Faulty{t: t, faults: faults} }

// Fired counts how often the fault has struck. A test that passes without is no
// test of it.
func (f *Fault) Fired() int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.fired
}

// MustHaveFired fails the test at its end unless each fault has struck.
func MustHaveFired(tb testing.TB, faults ...*Fault) {
	tb.Cleanup(func() {
		for i, f := range faults {
			if f.Fired() == 0 {
				tb.Errorf("fault %d (message type %d, %v) never fired", i, f.Type, f.Errno)
			}
		}
	})
}

// strikes says whether the fault takes a request, and counts it.
func (f *Fault) strikes(m netlink.Message) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.Type != 0 && f.Type != uint16(m.Header.Type) || f.Match != nil && !f.Match(m) {
		return false
	}
	f.seen++
	if f.Nth != 0 && f.Nth != f.seen || f.Times != 0 && f.fired >= f.Times {
		return false
	}
	f.fired++
	if f.Interrupt {
		f.marks = append(f.marks, m.Header.Sequence)
	}
	return true
}

// Add arms further faults, from the next datagram on.
func (f *Faulty) Add(faults ...*Fault) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.faults = append(f.faults, faults...)
}

// Send is nl.Transport's.
func (f *Faulty) Send(b []byte) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	requests := Split(append([]byte(nil), b...))
	answers := make([][]byte, len(requests)) // those of the faults
	failed := false
	for i, m := range requests {
		for _, fault := range f.faults {
			if fault.strikes(m) && !fault.Interrupt {
				answers[i] = Error(m, fault.Errno, fault.Text)
				failed = true
				break
			}
		}
	}
	if !failed {
		return f.t.Send(b)
	}
	return f.sendOthers(requests, answers)
}

func (f *Faulty) sendOthers(requests []netlink.Message, answers [][]byte) error {
	held := heldBack(requests, answers)
	var pass []byte
	for i, m := range requests {
		if !held[i] {
			pass = append(pass, Bytes(m)...)
		}
	}
	var fromKernel []netlink.Message
	if len(pass) > 0 {
		if err := f.t.Send(pass); err != nil {
			return err
		}
		var err error
		if fromKernel, err = f.drain(); err != nil {
			return err
		}
	}
	for i, m := range requests {
		if answers[i] != nil {
			f.queue = append(f.queue, answers[i])
		}
		for _, k := range fromKernel {
			if k.Header.Sequence == m.Header.Sequence {
				f.queue = append(f.queue, Bytes(k))
			}
		}
	}
	return nil
}

// heldBack says which requests the kernel is not to see: those that fail, and the
// transactions that they belong to.
func heldBack(requests []netlink.Message, answers [][]byte) []bool {
	held := make([]bool, len(requests))
	begin := -1
	for i, m := range requests {
		held[i] = answers[i] != nil
		switch {
		case len(m.Data) >= unix.SizeofIfInfomsg:
			// An RTM_NEWLINK or RTM_DELLINK, which have the same numbers.
		case m.Header.Type == unix.NFNL_MSG_BATCH_BEGIN:
			begin = i
		case m.Header.Type == unix.NFNL_MSG_BATCH_END:
			if begin >= 0 && slices.Contains(held[begin:i+1], true) {
				for j := begin; j <= i; j++ {
					held[j] = true
				}
			}
			begin = -1
		}
	}
	return held
}

func (f *Faulty) drain() ([]netlink.Message, error) {
	var list []netlink.Message
	for {
		buf := make([]byte, 1<<16)
		n, err := f.t.Receive(buf)
		if errors.Is(err, nl.ErrEmpty) {
			return list, nil
		}
		if err != nil {
			return nil, err
		}
		list = append(list, Split(buf[:n])...)
	}
}

// Receive is nl.Transport's.
func (f *Faulty) Receive(b []byte) (int, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if len(f.queue) > 0 {
		if len(b) < len(f.queue[0]) {
			return 0, fmt.Errorf("nltest: %d bytes do not fit into %d", len(f.queue[0]), len(b))
		}
		n := copy(b, f.queue[0])
		f.queue = f.queue[1:]
		return n, nil
	}
	n, err := f.t.Receive(b)
	if err != nil {
		return n, err
	}
	for _, fault := range f.faults {
		fault.mark(b[:n])
	}
	return n, nil
}

// mark sets NLM_F_DUMP_INTR on the messages of the dumps to interrupt.
func (f *Fault) mark(b []byte) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for len(f.marks) > 0 && len(b) >= 16 {
		if slices.Contains(f.marks, binary.NativeEndian.Uint32(b[8:])) {
			binary.NativeEndian.PutUint16(b[6:], binary.NativeEndian.Uint16(b[6:])|unix.NLM_F_DUMP_INTR)
		}
		n := int(binary.NativeEndian.Uint32(b))
		b = b[min((n+3)/4*4, len(b)):]
	}
}

// Close is nl.Transport's.
func (f *Faulty) Close() error { return f.t.Close() }
