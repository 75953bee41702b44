package dhcp6

import (
	"encoding/json"
	"testing"
	"time"

	"github.com/insomniacslk/dhcp/dhcpv6"

	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
)

// FuzzSession feeds a Session in every state, and whatever comes of it has to be a lease that a
// record can hold and that can be given back.
func FuzzSession(f *testing.F) {
	xid := dhcpv6.TransactionID{0, 0, 0}
	for kind, changes := range map[dhcpv6.MessageType]func(*reply){
		dhcpv6.MessageTypeReply:     func(r *reply) { r.rapid = true },
		dhcpv6.MessageTypeAdvertise: func(r *reply) { r.preferenceIsToldOf, r.preference = true, 255 },
	} {
		f.Add(uint8(0), answerTo(&dhcpv6.Message{TransactionID: xid}, kind, changes))
	}
	f.Fuzz(func(t *testing.T, state uint8, data []byte) {
		m, err := NewMachine(&Config{DUID: ownDUID(), IAID: ownIAID, RapidCommit: true, DetectConflicts: state&0x80 != 0})
		must.Succeed(t, err)
		s := m.Start(epoch(), 1)
		now := epoch()
		feed := func(e Event) Output {
			var out Output
			if len(e.Message) >= 4 {
				e.Message[1], e.Message[2], e.Message[3] = byte(s.xid>>16), byte(s.xid>>8), byte(s.xid)
			}
			s, out = m.Step(s, now, e)
			for _, l := range []*Lease6{out.Bound, out.Check, out.Lost} {
				if l == nil {
					continue
				}
				if err := l.Validate(); err != nil {
					t.Fatalf("state %d: %v: %+v", s.State(), err, l)
				}
				must.Succeed(t, expect.Err(Release(l, 1)))
				data, err := json.Marshal(l)
				must.That(t, err == nil && len(data) <= 60_000, "a record of %d bytes, %v", len(data), err)
			}
			must.That(t, s.State() != bound || s.Lease() != nil, "bound without a lease")
			return out
		}
		if state&0x40 != 0 {
			s = m.Inform(now, 1)
		}
		for i := range 8 {
			feed(Event{})
			feed(Event{Message: append([]byte(nil), data...)})
			if state>>i&1 != 0 {
				feed(Event{Verdict: Verdict(1 + i%2)})
			}
			if w := s.Wake(); w.After(now) {
				now = w
			} else {
				now = now.Add(time.Second)
			}
		}
	})
}

// FuzzLease reads what may be on record.
func FuzzLease(f *testing.F) {
	f.Add([]byte(`{"address":"2001:db8::7","server":"00:03:00:01","duid":"00:04:01","iaid":1,"obtained":"2026-05-01T12:00:00Z","renew":"2026-05-01T12:10:00Z","rebind":"2026-05-01T12:20:00Z","expire":"2026-05-01T12:30:00Z"}`))
	f.Fuzz(func(t *testing.T, data []byte) {
		var l Lease6
		if json.Unmarshal(data, &l) != nil || l.Validate() != nil {
			return
		}
		must.Succeed(t, expect.Err(Release(&l, 1)))
		m := must.Of(NewMachine(&Config{DUID: ownDUID()})).Get(t)
		s := must.Of(m.Restore(epoch(), 1, &l)).Get(t)
		now := epoch()
		for range 20 {
			s, _ = m.Step(s, now, Event{})
			if s.Wake().After(now) {
				now = s.Wake()
			}
		}
	})
}
