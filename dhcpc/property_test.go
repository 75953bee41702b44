package dhcpc

import (
	"math/rand/v2"
	"reflect"
	"testing"
	"time"

	"github.com/insomniacslk/dhcp/dhcpv4"

	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
)

// walker takes a Session through whatever bytes say, and looks at each step whether
// what must always hold does.
type walker struct {
	*bench
	in []byte
}

func (w *walker) byte() byte {
	if len(w.in) == 0 {
		return 0
	}
	b := w.in[0]
	w.in = w.in[1:]
	return b
}

// walk makes one step for some bytes each, until there are none left.
func walk(t testing.TB, in []byte) {
	w := &walker{in: in}
	flags := w.byte()
	w.bench = newBench(t, func(c *Config) {
		c.RapidCommit, c.DetectConflicts = flags&1 != 0, flags&2 != 0
		if flags&8 != 0 {
			c.Last = testLease()
		}
	})
	if flags&4 != 0 {
		restored := must.Of(w.m.Restore(w.now, 1, testLease())).Get(t)
		w.s = restored
	}
	for len(w.in) > 0 {
		switch op := w.byte() % 8; op {
		case 0, 1, 2:
			if wake := w.s.Wake(); wake.After(w.now) {
				w.now = wake
			}
			w.checked(nil, nil)
		case 3:
			w.now = w.now.Add(time.Duration(int8(w.byte())) * time.Minute)
			w.checked(nil, nil)
		case 4:
			a := &ARP{Reply: w.byte()&1 != 0, SenderMAC: otherMAC(), SenderIP: addr(clientIP), TargetIP: addr(clientIP)}
			w.checked(&Packet{ARP: a}, nil)
		default:
			if w.sent != nil {
				p, d := w.anyAnswer()
				w.checked(p, d)
			}
		}
	}
}

// anyAnswer makes an answer with something wrong or nothing, as the bytes say.
func (w *walker) anyAnswer() (*Packet, *dhcpv4.DHCPv4) {
	kinds := []dhcpv4.MessageType{offer, ack, ack, nak}
	var changes []change
	how := w.byte()
	for i, c := range []change{
		func(d *dhcpv4.DHCPv4) { d.TransactionID[how%4] ^= how },
		func(d *dhcpv4.DHCPv4) { d.ClientHWAddr = []byte(otherMAC()) },
		from(rogueIP),
		yiaddr(otherIP),
		set(51, seconds(int(w.byte()))),
		set(80, []byte{}),
	} {
		// The first two are rare, or no walk would get anywhere.
		if how>>(i+2)&1 != 0 && (i >= 2 || w.byte()&3 == 0) {
			changes = append(changes, c)
		}
	}
	p := answer(w.sent, kinds[how%4], changes...)
	d := must.Of(dhcpv4.FromBytes(p.Payload)).Get(w.t)
	return p, d
}

// checked takes a step; d is the message in the event.
func (w *walker) checked(e *Packet, d *dhcpv4.DHCPv4) {
	before, at := w.s, w.s.now
	copied := before
	again, out := w.m.Step(before, w.now, e)
	must.That(w.t, reflect.DeepEqual(before, copied), "Step changed its argument")
	w.step(e)
	must.That(w.t, reflect.DeepEqual(again, w.s) && reflect.DeepEqual(out, w.out),
		"the same step twice gives two things")
	w.checkTimes(at)
	w.checkLease(&before, d)
}

func (w *walker) checkTimes(at time.Time) {
	s, out := &w.s, &w.out
	switch {
	case s.now.Before(at):
		w.t.Fatalf("time went from %s to %s", at, s.now)
	case s.wake.IsZero() && (s.state != bound || !s.lease.Infinite()):
		w.t.Fatalf("%s: never wakes", s.state)
	case !s.wake.IsZero() && !s.wake.After(s.now) && out.Bound == nil:
		w.t.Fatalf("%s: wakes at %s, which is past at %s", s.state, s.wake, s.now)
	case out.Listen.After(s.wake):
		w.t.Fatalf("%s: listens until %s, wakes at %s", s.state, out.Listen, s.wake)
	}
}

func (w *walker) checkLease(before *Session, d *dhcpv4.DHCPv4) {
	s, out := &w.s, &w.out
	ours := d == nil || string(d.ClientHWAddr) == string(ownMAC()) && xidOf(d) == before.xid
	if !ours && (s.lease != before.lease && out.Lost == nil || out.Bound != nil && out.Bound != before.lease && out.Bound != before.offer) {
		w.t.Fatalf("%s: took what is another's: %s", before.state, d.Summary())
	}
	if l := out.Bound; l != nil {
		err := l.Validate()
		must.That(w.t, err == nil && s.lease == l, "bound to %+v: %v", l, err)
		if d != nil && l != before.lease && (d.MessageType() != ack || !d.YourIPAddr.Equal(l.Address.Addr().AsSlice())) {
			w.t.Fatalf("bound to %s by %s", l.Address, d.Summary())
		}
	}
	must.That(w.t, out.Lost == nil || out.Lost == before.lease, "lost %v, had %v", out.Lost, before.lease)
	must.That(w.t, before.lease == nil || s.lease != nil || out.Lost != nil,
		"%s to %s: lost a lease without a word", before.state, s.state)
	holds := s.state == bound || s.state == renewing || s.state == rebinding
	if holds != (s.lease != nil) && (s.state == initial || s.state == selecting || s.state == requesting || holds) {
		w.t.Fatalf("%s with the lease %v", s.state, s.lease)
	}
	if holds && !s.lease.Infinite() && out.Bound == nil && !s.now.Before(s.lease.Expire) {
		w.t.Fatalf("%s at %s, with a lease until %s", s.state, s.now, s.lease.Expire)
	}
}

func xidOf(d *dhcpv4.DHCPv4) uint32 {
	x := d.TransactionID
	return uint32(x[0])<<24 | uint32(x[1])<<16 | uint32(x[2])<<8 | uint32(x[3])
}

func TestWhateverHappens(t *testing.T) {
	t.Parallel()
	seen := map[state]bool{}
	r := rand.New(rand.NewPCG(1, 2))
	for range 500 {
		in := make([]byte, 200)
		for i := range in {
			in[i] = byte(r.Uint32())
		}
		walk(t, in)
	}
	// A walk that never got anywhere would prove nothing.
	for range 200 {
		w := &walker{bench: newBench(t, func(c *Config) {
			c.DetectConflicts = len(seen)%2 == 0
			if r.Uint32()%2 == 0 {
				c.Last = testLease()
			}
		})}
		for range 60 {
			w.in = []byte{byte(r.Uint32()) & 0x47, byte(r.Uint32()), 1, 1, 1}
			if w.sent != nil && r.Uint32()%3 > 0 {
				p, d := w.anyAnswer()
				w.checked(p, d)
			} else {
				w.now = w.s.Wake()
				if w.now.IsZero() {
					break
				}
				w.checked(nil, nil)
			}
			seen[w.s.state] = true
		}
	}
	for s := initial; s <= rebinding; s++ {
		expect.That(t, seen[s], "never came to %s", s)
	}
}
