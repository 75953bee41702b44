package dhcpc

import (
	"fmt"
	"time"

	"github.com/insomniacslk/dhcp/dhcpv4"

	"github.com/tombolo-cni/tombolo/internal/trace"
)

// answerWait is how long an answer to a renewal is waited for with an open socket.
// The next attempt is a minute away or more.
const answerWait = 10 * time.Second

// leaseTimeUp does what is due at this time for the holder of a lease.
func (t *step) leaseTimeUp() {
	l := t.s.lease
	switch {
	case !t.now.Before(l.Expire):
		t.expire()
	case !t.now.Before(l.Rebind):
		t.renew(Rebinding, l.Expire)
	default:
		t.renew(Renewing, l.Rebind)
	}
}

// renew asks for an extension: the server that gave the lease, or any. Each REQUEST
// has an identifier of its own, so that an ACK says which of them it extends from.
func (t *step) renew(state State, end time.Time) {
	l := t.s.lease
	t.newXID()
	if t.s.state == Bound {
		t.s.trace = trace.Trace{Began: t.now}
	}
	t.s.asked = t.now
	t.count()
	d := t.request(dhcpv4.MessageTypeRequest, t.s)
	// The address in ciaddr only, and no server identifier: some servers ignore a
	// renewal that has more (RFC 2131, table 4).
	d.ClientIPAddr = ip(l.Address.Addr())
	dst := l.Server
	if state == Rebinding {
		dst = broadcastAddr()
	}
	p := packet(d, l.Address.Addr(), dst)
	if state == Renewing {
		p.DstMAC = l.ServerMAC
	}
	t.send("REQUEST", p)
	wake := t.now.Add(max(end.Sub(t.now)/2, minRenewWait))
	if wake.After(end) {
		wake = end
	}
	t.enter(state, wake)
	if enough := t.now.Add(answerWait); enough.Before(wake) {
		t.s.listen = enough
	}
}

// renewing hears the answer to a renewal. While only one server was asked, only it is
// heard, though it need not say who it is.
func (t *step) renewing(m *message) {
	l := t.s.lease
	if t.s.state == Renewing && m.server.IsValid() && m.server != l.Server && m.source != l.Server {
		t.note(describe(m) + ": not the server that was asked, " + l.Server.String())
		return
	}
	switch m.MessageType() {
	case dhcpv4.MessageTypeAck:
		renewed := t.acknowledged(m, l)
		if renewed == nil {
			return
		}
		if refused := t.refusal(renewed); refused != nil {
			t.refuse(renewed, refused)
			return
		}
		t.bind(renewed)
	case dhcpv4.MessageTypeNak:
		t.refused(m)
	default:
		t.note(describe(m) + ": not an ACK")
	}
}

// refused takes a NAK of the lease that is held.
func (t *step) refused(m *message) {
	err := refusal(m, t.s.lease.Address.Addr())
	t.lose()
	t.s.hint = t.cfg.Address
	t.startOver(err, 0)
}

// expire gives the lease up and tries to get the same address again at once.
func (t *step) expire() {
	l := t.s.lease
	t.out.Err = fmt.Errorf("%w: %s, at %s", ErrExpired, l.Address.Addr(), l.Expire.Format(time.RFC3339))
	t.s.trace.Last = t.out.Err
	t.lose()
	t.forget()
	t.discover()
}
