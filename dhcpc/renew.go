package dhcpc

import (
	"fmt"
	"net/netip"
	"time"

	"github.com/insomniacslk/dhcp/dhcpv4"

	"github.com/tombolo-cni/tombolo/internal/trace"
)

const (
	// answerWait is how long a socket stays open for the answer to a REQUEST that renews a lease.
	answerWait = 15 * time.Second
	// secondRenewal is the pause after the first REQUEST of a renewal. It doubles with each REQUEST, up to half of
	// the remaining time (RFC 2131, section 4.4.5).
	secondRenewal = 10 * time.Second
)

// leaseTimeUp renews or ends the present lease, whichever is due.
func (t *step) leaseTimeUp() {
	l := t.s.lease
	switch {
	case !t.now.Before(l.Expire):
		t.expire()
	case !t.now.Before(l.Rebind):
		t.renew(rebinding, l.Expire)
	default:
		t.renew(renewing, l.Rebind)
	}
}

// renew sends a REQUEST to extend the lease: the first one to the server that granted the lease, later ones to all
// servers. Each REQUEST has its own transaction identifier, so that an ACK shows which REQUEST it answers: the
// extension counts from that REQUEST.
//
// Every second REQUEST has the form for a rebooted client and asks for a broadcast answer. Such a REQUEST reaches a
// server behind a relay. Its answer may come from another port or address.
func (t *step) renew(state state, end time.Time) {
	l := t.s.lease
	t.newXID()
	if t.s.state == bound {
		t.s.trace = trace.Trace{Began: t.now}
	}

	if t.s.state != state {
		t.s.tries = 0
	}

	t.s.tries++
	t.s.requestSent = t.now
	t.count()
	d := t.request(dhcpv4.MessageTypeRequest, t.s)
	if t.s.tries%2 == 0 {
		d.UpdateOption(dhcpv4.OptRequestedIPAddress(ip(l.Address.Addr())))
		d.SetBroadcast()
		t.send("REQUEST", packet(d, netip.IPv4Unspecified(), broadcastAddr()))
	} else {
		t.send("REQUEST", t.extension(d, state == renewing && t.s.tries == 1))
	}

	wake := t.now.Add(trace.Doubled(secondRenewal, t.s.tries-1, max(end.Sub(t.now)/2, minRenewWait)))
	if wake.After(end) {
		wake = end
	}

	t.enter(state, wake)
	if enough := t.now.Add(answerWait); enough.Before(wake) {
		t.s.listen = enough
	}
}

// extension returns a packet with a renewal's REQUEST from the leased address, to the lease's server or to all
// servers. The message has the address only in ciaddr, and no server identifier, since some servers ignore a renewal
// with more (RFC 2131, table 4).
func (t *step) extension(d *dhcpv4.DHCPv4, toServer bool) *Packet {
	l := t.s.lease
	d.ClientIPAddr = ip(l.Address.Addr())
	if !toServer {
		return packet(d, l.Address.Addr(), broadcastAddr())
	}
	p := packet(d, l.Address.Addr(), l.Server)
	p.DstMAC = l.ServerMAC
	return p
}

// renewing handles an answer to a renewal. It accepts an ACK from any server. Before T2 it accepts a NAK only from
// the lease's server.
func (t *step) renewing(m *message) {
	l := t.s.lease
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
		if t.s.state == renewing && m.server.IsValid() && t.isAnothers(m, l) {
			return
		}
		t.refused(m)
	default:
		t.note(describe(m) + ": not an ACK")
	}
}

// refused ends the present lease after a NAK, and starts over.
func (t *step) refused(m *message) {
	err := refusal(m, t.s.lease.Address.Addr())
	t.lose()
	t.s.hint = t.cfg.Address
	t.startOver(err, 0)
}

// expire ends the lease and at once sends a DISCOVER that requests the same address.
func (t *step) expire() {
	l := t.s.lease
	t.out.Err = fmt.Errorf("%w: %s, at %s", ErrExpired, l.Address.Addr(), l.Expire.Format(time.RFC3339))
	t.s.trace.Last = t.out.Err
	t.lose()
	t.forget()
	t.discover()
}
