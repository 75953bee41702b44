package dhcpc

import (
	"bytes"
	"cmp"
	"fmt"
	"net/netip"
	"slices"
	"time"

	"github.com/insomniacslk/dhcp/dhcpv4"

	"github.com/tombolo-cni/tombolo/internal/trace"
)

const (
	// requestTries is the number of REQUESTs for an offered address before the client gives the server up. RFC 2131
	// suggests four, but asking another server takes less time than waiting a minute for this one.
	requestTries = 2
	// betterOffer is the time that the client waits for a better OFFER. It waits if the server of the present OFFER
	// is in the list of servers to avoid, or if Config.Refuse refused the lease.
	betterOffer = time.Second
	// broadcastTry is the number of the first DISCOVER that asks servers to broadcast their answers. A switch, a
	// relay or a server may lose packets to an address that the client does not have yet.
	broadcastTry = 3
)

// discover sends a DISCOVER, as the first of an attempt or as a repetition, and enters SELECTING.
func (t *step) discover() {
	if t.s.tries == 0 && t.s.offer == nil {
		t.newXID()
		t.s.askBroadcast, t.s.others, t.s.unbelieved = false, nil, nil
	}

	t.s.tries++
	t.s.askBroadcast = t.s.askBroadcast || t.s.tries >= broadcastTry
	t.count()
	d := t.request(dhcpv4.MessageTypeDiscover)
	if t.s.hint.IsValid() {
		d.UpdateOption(dhcpv4.OptRequestedIPAddress(ip(t.s.hint)))
	}

	if t.cfg.RapidCommit {
		d.UpdateOption(dhcpv4.OptGeneric(dhcpv4.OptionRapidCommit, nil))
	}

	t.send("DISCOVER", t.broadcast(d))
	wake := t.now.Add(t.retransmission(t.s.tries))
	if t.s.last != nil && t.now.Before(t.s.giveUp) {
		wake = trace.Earliest(wake, t.s.giveUp)
	}

	t.enter(selecting, wake)
}

// reboot sends a REQUEST for the previous lease's address, so that servers confirm it (RFC 2131, section 3.2).
func (t *step) reboot() {
	t.newXID()
	t.s.offer, t.s.hint = t.s.last, t.s.last.Address.Addr()
	t.s.giveUp = t.now.Add(min(silence, t.cfg.Timeout/2))
	d := t.request(dhcpv4.MessageTypeRequest)
	d.UpdateOption(dhcpv4.OptRequestedIPAddress(ip(t.s.hint)))
	t.send("REQUEST", t.broadcast(d))
	t.enter(rebooting, trace.Earliest(t.now.Add(confirmWait), t.s.giveUp))
}

// selecting handles an answer to a DISCOVER. It requests the first OFFER that Config.Refuse accepts and whose server is
// not in the list of servers to avoid. It remembers another OFFER for the case that no better one comes. It does not
// compare acceptable OFFERs: nothing shows which one is better, and waiting would delay every client. It also accepts
// an ACK with rapid commit, and a late ACK of an address that the client requested before.
func (t *step) selecting(m *message) {
	isACK := m.MessageType() == dhcpv4.MessageTypeAck
	rapid := isACK && t.cfg.RapidCommit && m.Options.Has(dhcpv4.OptionRapidCommit)
	if isACK && !rapid && t.s.offer != nil {
		t.answered(m, t.s.offer)
		return
	}

	if m.MessageType() != dhcpv4.MessageTypeOffer && !rapid {
		t.note(describe(m) + ": not an OFFER")
		return
	}

	l := t.grantedLease(m)
	if l == nil {
		return
	}

	if l.Server = m.sender(); !usable(l.Server) { // without an identifier the source address counts, as in udhcpc
		t.note(describe(m) + ": no server identifier")
		return
	}

	refused, description := t.refusal(l), describe(m)
	if refused != nil {
		description += ": " + refused.Error()
	}

	t.note(description)
	switch {
	case rapid:
		t.accept(l)
	case refused != nil || slices.Contains(t.s.avoid, l.Server):
		// Keep this OFFER for the case that no better one comes. An OFFER cannot be declined: a DECLINE must be about
		// an address that the server granted.
		t.s.others = trace.Shun(t.s.others, l.Server)
		if t.s.other == nil {
			t.s.other = l
			if soon := t.now.Add(betterOffer); soon.Before(t.s.wake) {
				t.enter(selecting, soon)
			}
		}
	default:
		t.choose(l)
	}
}

// grantedLease returns the lease in an OFFER or an ACK, or nil if no host could use it.
func (t *step) grantedLease(m *message) *Lease {
	l, err := t.lease(m, t.s.requestSent)
	if err != nil {
		t.note(describe(m) + ": " + err.Error())
		return nil
	}
	l.Others = slices.DeleteFunc(slices.Clone(t.s.others), func(server netip.Addr) bool { return server == l.Server })
	l.Ignored = append(l.Ignored, t.s.unbelieved...)
	return l
}

func (t *step) selectingTimeUp() {
	last := t.s.last
	switch {
	case t.s.other != nil:
		t.choose(t.s.other)
		return
	case last != nil && !t.now.Before(t.s.giveUp):
		t.s.last = nil
		if last.Left(t.now) != 0 && t.refusal(last) == nil {
			t.accept(last.unconfirmed(t.now))
			return
		}
	}

	t.discover()
}

// choose accepts an offer: it sends a REQUEST for its address.
func (t *step) choose(offer *Lease) {
	t.s.offer, t.s.other, t.s.tries = offer, nil, 0
	t.sendRequest()
}

func (t *step) sendRequest() {
	t.s.tries++
	d := t.request(dhcpv4.MessageTypeRequest)
	d.UpdateOption(dhcpv4.OptRequestedIPAddress(ip(t.s.offer.Address.Addr())))
	d.UpdateOption(dhcpv4.OptServerIdentifier(ip(t.s.offer.Server)))
	t.send("REQUEST", t.broadcast(d))
	t.enter(requesting, t.now.Add(t.retransmission(t.s.tries)))
}

// answered handles an answer to a REQUEST for the address of the lease in the parameter requested. This is an OFFER,
// Config.Last or the present lease. It accepts an ACK from any server, since some servers share their leases, or have
// several identifiers.
//
// In REQUESTING it accepts a NAK only from the selected server, since other servers may refuse an address that they do
// not manage. In RENEWING it ignores a NAK that names another server than the lease's. In other states it accepts a NAK
// from any server.
func (t *step) answered(m *message, requested *Lease) {
	isOffer := t.s.state == requesting
	switch m.MessageType() {
	case dhcpv4.MessageTypeAck:
		if l := t.acknowledged(m, requested); l != nil {
			t.accept(l)
		}
	case dhcpv4.MessageTypeNak:
		if (isOffer || t.s.state == renewing && m.server.IsValid()) && t.isAnothers(m, requested) {
			return
		}

		t.note(describe(m))
		if isOffer {
			t.shun(requested.Server)
		}

		t.lose()
		t.s.hint = t.cfg.Address
		t.startOver(refusal(m, requested.Address.Addr()), 0)
	default:
		t.isAnothers(m, requested) // ignore duplicates of the OFFER, which are common
	}
}

// isAnothers reports whether a message comes from a server other than the server of the requested lease. If so, it
// records the server for Lease.Others, unless the server is unknown.
func (t *step) isAnothers(m *message, requested *Lease) bool {
	if m.sender() == requested.Server || m.source == requested.Server {
		return false
	}
	t.note(describe(m) + ": not the server that was asked, " + requested.Server.String())
	if m.sender().IsValid() {
		t.s.others = trace.Shun(t.s.others, m.sender())
	}
	return true
}

// acknowledged returns the lease in an ACK. It returns nil if the ACK is unusable, or if its address is not the
// requested one. If the ACK has no server identifier, the result has the server of the requested lease. If the result
// has that server but the ACK's source MAC is unknown, the result also has the ServerMAC of the requested lease.
func (t *step) acknowledged(m *message, requested *Lease) *Lease {
	if m.address != requested.Address.Addr() {
		t.note(describe(m) + ": asked for " + requested.Address.Addr().String())
		return nil
	}

	l := t.grantedLease(m)
	if l == nil {
		return nil
	}

	l.Server = cmp.Or(l.Server, requested.Server)
	if len(l.ServerMAC) == 0 && l.Server == requested.Server {
		l.ServerMAC = requested.ServerMAC
	}

	return l
}

// requestingTimeUp repeats the REQUEST. After requestTries of them it avoids the server, and sends a DISCOVER to all
// servers. It remembers the offer for a late ACK, since the server may only be slow.
func (t *step) requestingTimeUp() {
	if t.s.tries < requestTries {
		t.sendRequest()
		return
	}
	t.shun(t.s.offer.Server)
	t.s.tries, t.s.other = 0, nil
	t.discover()
}

// refusal returns Config.Refuse's reason to refuse a lease, or nil if the lease is acceptable.
func (t *step) refusal(l *Lease) error {
	if t.cfg.Refuse == nil {
		return nil
	}
	return t.cfg.Refuse(l, t.s.lease)
}

// refuse declines a granted address because Config.Refuse refused it, ends the present lease and avoids the server
// until the next lease.
func (t *step) refuse(l *Lease, why error) {
	t.lose()
	t.shun(l.Server)
	t.decline(l, fmt.Errorf("%w: %s, by %s: %w", ErrRefused, l.Address.Addr(), l.Server, why))
}

// decline sends a DECLINE for an address that a server granted, and starts over. The next DISCOVER does not request
// this address.
func (t *step) decline(l *Lease, why error) {
	t.newXID()
	t.send("DECLINE", declineOf(l, t.s.xid))
	if t.s.hint = t.cfg.Address; t.s.hint == l.Address.Addr() {
		t.s.hint = netip.Addr{}
	}
	t.startOver(why, declineBackOff)
}

// accept begins to use a lease that a server acknowledged, or Config.Last if no server answered. If Config.Refuse
// refuses the lease, it declines the address instead. With Config.DetectConflicts it first probes the address, unless
// the client has a lease already.
func (t *step) accept(l *Lease) {
	refused := t.refusal(l)
	switch {
	case refused != nil:
		t.refuse(l, refused)
	case t.cfg.DetectConflicts && t.s.lease == nil:
		t.s.offer, t.s.tries = l, 0
		t.enter(probing, t.now.Add(t.s.random.Between(0, probeWait)))
	default:
		t.bind(l)
	}
}

// The constants of RFC 5227, section 1.1.
const (
	probeCount   = 3
	probeWait    = time.Second // the longest pause before the first probe
	probeMin     = time.Second // the shortest pause between two probes
	probeMax     = 2 * time.Second
	announceWait = 2 * time.Second // the wait for answers after the last probe
)

// probe sends the next ARP probe. After the last one and the wait for its answers, it begins to use the lease. If the
// lease ends during the probes, it sends a DISCOVER.
func (t *step) probe() {
	switch {
	case t.s.offer.Left(t.now) == 0:
		t.forget()
		t.discover()
		return
	case t.s.tries == probeCount:
		t.bind(t.s.offer)
		return
	}

	t.s.tries++
	pause := t.s.random.Between(probeMin, probeMax)
	if t.s.tries == probeCount {
		pause = announceWait
	}

	// A probe's sender address is 0.0.0.0, so that no host changes a neighbour entry.
	t.send("probe", &Packet{
		SrcMAC: Hex(t.cfg.MAC),
		ARP:    &ARP{SenderMAC: Hex(t.cfg.MAC), SenderIP: netip.IPv4Unspecified(), TargetIP: t.s.offer.Address.Addr()},
	})
	t.enter(probing, t.now.Add(pause))
}

// handleARP handles an ARP packet while the client probes. It declines the address if another host has it, or probes
// for it at the same time (RFC 5227, section 2.1.1).
func (t *step) handleARP(a *ARP) {
	if t.s.state != probing || bytes.Equal(a.SenderMAC, t.cfg.MAC) {
		return
	}
	address := t.s.offer.Address.Addr()
	has := a.SenderIP == address
	wants := !a.Reply && a.SenderIP == netip.IPv4Unspecified() && a.TargetIP == address
	if !has && !wants {
		return
	}
	t.decline(t.s.offer, fmt.Errorf("%w: %s, by %s", ErrDeclined, address, a.SenderMAC))
}

const (
	// answerWait is the longest time that a socket stays open for the answer to a REQUEST that renews a lease.
	answerWait = 15 * time.Second
	// secondRenewal is the pause after the first REQUEST in RENEWING, and again in REBINDING. It doubles with each
	// REQUEST, up to half of the time to T2 or to the end of the lease, or to minRenewWait if that is longer (RFC 2131,
	// section 4.4.5).
	secondRenewal = 10 * time.Second
)

// leaseTimeUp renews or ends the present lease, whichever is due.
func (t *step) leaseTimeUp() {
	l := t.s.lease
	switch {
	case !t.now.Before(l.Expire):
		t.out.Err = fmt.Errorf("%w: %s, at %s", ErrExpired, l.Address.Addr(), l.Expire.Format(time.RFC3339))
		t.s.trace.Last = t.out.Err
		t.lose()
		t.forget()
		t.discover() // request the same address at once
	case !t.now.Before(l.Rebind):
		t.renew(rebinding, l.Expire)
	default:
		t.renew(renewing, l.Rebind)
	}
}

// renew sends a REQUEST to extend the lease. In RENEWING the first one goes to the server that granted the lease. All
// others go to all servers. Each REQUEST has its own transaction identifier, so that an ACK shows which REQUEST it
// answers: the extension counts from that REQUEST. No REQUEST has a server identifier (RFC 2131, table 4).
//
// The first, third, … REQUEST has the address only in ciaddr: some servers ignore a renewal with the option 50 or 54.
// Every second REQUEST has the form for a rebooted client, with option 50, and asks for a broadcast answer. Such a
// REQUEST reaches a server behind a relay, and isFromLAN accepts its broadcast answer from any port and address.
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
	t.count()
	d := t.request(dhcpv4.MessageTypeRequest)
	src, dst, dstMAC := l.Address.Addr(), broadcastAddr(), Hex(nil)
	if t.s.tries%2 == 0 {
		d.UpdateOption(dhcpv4.OptRequestedIPAddress(ip(src)))
		d.SetBroadcast()
		src = netip.IPv4Unspecified()
	} else if state == renewing && t.s.tries == 1 {
		dst, dstMAC = l.Server, l.ServerMAC
	}

	d.ClientIPAddr = ip(src)
	p := packet(d, src, dst)
	p.DstMAC = dstMAC
	t.send("REQUEST", p)

	pause := trace.Doubled(secondRenewal, t.s.tries-1, max(end.Sub(t.now)/2, minRenewWait))
	t.enter(state, trace.Earliest(t.now.Add(pause), end))
	t.s.listen = trace.Earliest(t.s.wake, t.now.Add(answerWait))
}
