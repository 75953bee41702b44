package dhcp6

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"
	"time"

	"github.com/insomniacslk/dhcp/dhcpv6"
	"github.com/insomniacslk/dhcp/iana"

	"github.com/tombolo-cni/tombolo/dhcpc"
	"github.com/tombolo-cni/tombolo/internal/trace"
)

// The times and retry counts of RFC 8415, section 7.6.
const (
	solTimeout = time.Second
	solMaxRT   = time.Hour
	reqTimeout = time.Second
	reqMaxRT   = 30 * time.Second
	reqMaxRC   = 10
	renTimeout = 10 * time.Second // also REB_TIMEOUT
	renMaxRT   = 10 * time.Minute // also REB_MAX_RT
	infTimeout = time.Second
	infMaxRT   = time.Hour
)

// solicit requests the best offer. If there is none, it sends the first or the next SOLICIT, and enters SOLICITING.
func (t *step) solicit() {
	switch {
	case t.s.best != nil:
		t.choose(t.s.best)
		return
	case t.s.state != soliciting:
		t.begin(soliciting)
	}

	m := t.request(dhcpv6.MessageTypeSolicit, nil, t.s.hint)
	if t.cfg.RapidCommit {
		m.AddOption(&dhcpv6.OptionGeneric{OptionCode: dhcpv6.OptionRapidCommit})
	}
	t.send(m, solTimeout, solMaxRT, time.Time{})
}

// soliciting handles a message in SOLICITING. It ignores an ADVERTISE that has no usable address, or that Config.Refuse
// refuses. Until the pause ends, it keeps the ADVERTISE with the highest preference, and ranks servers to avoid
// (Session.avoid) last. It requests the address of an ADVERTISE at once if the server is not one to avoid, and the
// preference is 255 or the first pause is over. A REPLY counts only with rapid commit.
func (t *step) soliciting(m *message) {
	rapid := m.kind == dhcpv6.MessageTypeReply && m.rapid && t.cfg.RapidCommit
	if m.kind == dhcpv6.MessageTypeReply && !rapid {
		t.note(m.describe() + ": a lease that was not asked for")
		return
	}

	l, why := t.granted(m, t.s.hint)
	if l == nil {
		t.note(m.describe() + why)
		return
	}

	if rapid {
		t.take(l)
		return
	}

	rank := int(m.preference)
	if refused := t.refused(l); refused != nil {
		t.note(m.describe() + ": " + refused.Error())
		return
	}

	t.note(fmt.Sprintf("%s of %s", m.describe(), l.Address))
	if slices.Contains(t.s.avoid, string(l.Server)) {
		rank -= 1 << 10
	}

	if t.s.best == nil || rank > t.s.rank {
		t.s.best, t.s.rank = l, rank
	}

	if rank == 255 || t.s.tries > 1 && rank >= 0 {
		t.choose(t.s.best)
	}
}

// granted returns the lease that a message offers or grants for the address want. If the message does not contain want,
// granted returns the lease of the first usable address. Without a usable address it returns nil and the reason, for
// step.note. The reason is empty if the message has an error status, since the description contains the status.
func (t *step) granted(m *message, want netip.Addr) (l *Lease6, why string) {
	if s := m.refusal(); statusOf(s) != iana.StatusSuccess {
		return nil, ""
	}

	list, why := t.cfg.leases(m, t.s.sent)
	if l = pick(list, want); l != nil {
		return l, ""
	}
	return nil, why
}

// pick returns the lease of the address want. If list has none, or one whose lifetime is 0, it returns the first lease
// with a lifetime. It returns nil if there is no such lease.
func pick(list []*Lease6, want netip.Addr) *Lease6 {
	list = slices.DeleteFunc(slices.Clone(list), func(l *Lease6) bool { return l.Left(l.Obtained) == 0 })
	i := slices.IndexFunc(list, func(l *Lease6) bool { return l.Address == want })
	if len(list) == 0 {
		return nil
	}
	return list[max(i, 0)]
}

// choose enters REQUESTING, and requests the lease l, which a server advertised or has forgotten.
func (t *step) choose(l *Lease6) {
	t.begin(requesting)
	t.s.requested, t.s.best = l, nil
	t.sendRequest()
}

// sendRequest sends the first or the next REQUEST.
func (t *step) sendRequest() {
	m := t.request(dhcpv6.MessageTypeRequest, t.s.requested.Server, t.s.requested.Address)
	var end time.Time
	if t.s.lease != nil {
		end = t.s.lease.Expire // the REQUEST is part of a renewal
	}
	t.send(m, reqTimeout, reqMaxRT, end)
}

// requesting handles a message in REQUESTING. It accepts only messages of the selected server.
func (t *step) requesting(m *message) {
	asked := t.s.requested
	if !t.isReplyFrom(m, asked.Server) {
		return
	}

	switch s := m.refusal(); statusOf(s) {
	case iana.StatusSuccess:
		if l, why := t.granted(m, asked.Address); l != nil {
			t.take(l)
		} else {
			t.note(m.describe() + why)
			t.requestFailed(fmt.Errorf("%w: REPLY from %s%s", dhcpc.ErrNAK, asked.Server, why))
		}

	case iana.StatusUnspecFail, iana.StatusUseMulticast:
		t.note(m.describe()) // a retry may succeed: requestingTimeUp sends the next REQUEST
	default:
		t.note(m.describe())
		if s.StatusCode == iana.StatusNotOnLink {
			t.s.hint = netip.Addr{}
		}
		t.requestFailed(fmt.Errorf("%w: %s: REPLY from %s: %s", dhcpc.ErrNAK, asked.Address, asked.Server,
			statusText(s)))
	}
}

// requestFailed gives up a REQUEST that the server does not grant, and avoids the server until the next lease. With a
// present lease, the client waits in REBINDING for at most 10 s. Then it sends a REBIND or, before T2, another RENEW.
// Without a present lease, it starts over.
func (t *step) requestFailed(err error) {
	t.shun(t.s.requested.Server)
	if t.s.lease != nil {
		t.s.trace.Last, t.s.requested = err, nil
		t.begin(rebinding)
		t.s.wake, t.s.listen = t.now.Add(min(renTimeout, t.s.lease.Expire.Sub(t.now))), time.Time{}
		return
	}
	t.startOver(err)
}

// requestingTimeUp repeats the REQUEST until it was sent reqMaxRC times. Then it avoids the server, and continues with
// the present lease (see requestFailed) or, without one, sends a SOLICIT. If the present lease has ended, it reports
// the lease as lost.
func (t *step) requestingTimeUp() {
	switch {
	case t.s.lease != nil && t.s.lease.Left(t.now) == 0:
		t.lose(dhcpc.ErrExpired)
	case t.s.tries < reqMaxRC:
		t.sendRequest()
	case t.s.lease != nil:
		t.requestFailed(fmt.Errorf("%w: no answer from %s", dhcpc.ErrTimeout, t.s.requested.Server))
	default:
		t.shun(t.s.requested.Server)
		t.s.requested = nil
		t.solicit()
	}
}

// leaseTimeUp sends the message that is due for the present lease: RENEW after T1, REBIND after T2. At the end of the
// lease it gives the lease up.
func (t *step) leaseTimeUp() {
	l := t.s.lease
	switch {
	case !t.now.Before(l.Expire):
		t.lose(dhcpc.ErrExpired)
	case !t.now.Before(l.Rebind):
		t.renew(rebinding, dhcpv6.MessageTypeRebind, nil, l.Expire)
	default:
		t.renew(renewing, dhcpv6.MessageTypeRenew, l.Server, l.Rebind)
	}
}

// renew enters a state that renews the lease, and sends the first or the next RENEW or REBIND. The nil server of a
// REBIND means all servers. The exchange ends at the time end.
func (t *step) renew(state State, kind dhcpv6.MessageType, server dhcpc.Hex, end time.Time) {
	if t.s.state == bound {
		t.s.trace = trace.Trace{Began: t.now}
	}

	if t.s.state != state {
		t.begin(state)
	}

	t.send(t.request(kind, server, t.s.lease.Address), renTimeout, renMaxRT, end)
}

// renewing handles the answer to a RENEW or a REBIND (RFC 8415, section 18.2.10.1). It takes the extended lease, or
// another lease that the server grants in its place. If the server has forgotten the lease, it sends a REQUEST. If
// the server ends the lease and grants no other, the lease is lost.
func (t *step) renewing(m *message) {
	l := t.s.lease
	if m.kind != dhcpv6.MessageTypeReply || t.s.state == renewing && !t.isReplyFrom(m, l.Server) {
		return
	}

	if s := m.refusal(); statusOf(s) != iana.StatusSuccess {
		t.note(m.describe())
		if s.StatusCode == iana.StatusNoBinding && statusOf(m.status) == iana.StatusSuccess {
			// The server has forgotten the lease. It may grant the address again, so request it.
			again := *l
			again.Server = slices.Clone(m.server)
			t.choose(&again)
		}
		return
	}

	list, why := t.cfg.leases(m, t.s.sent)
	next := pick(list, l.Address)
	switch {
	case !slices.ContainsFunc(list, func(one *Lease6) bool { return one.Address == l.Address }):
		t.note(m.describe() + cmp.Or(why, ": nothing about "+l.Address.String()))
	case next == nil:
		t.lose(fmt.Errorf("%w: REPLY from %s: no more time", dhcpc.ErrNAK, m.server))
	case next.Address != l.Address: // the present lease gets no more time
		t.out.Lost, t.s.lease = l, nil
		t.take(next)
	default:
		t.take(next)
	}
}

// decline sends a DECLINE for an address that a server granted and the client does not use. The client ends its present
// lease, avoids the server until the next lease, and starts over.
func (t *step) decline(l *Lease6, why error) {
	t.shun(l.Server)
	if t.s.hint = t.cfg.Address; t.s.hint == l.Address {
		t.s.hint = netip.Addr{}
	}

	if held := t.s.lease; held != nil {
		// The declined lease replaces the present one, or is for the same address. In either case the present lease
		// ends.
		t.out.Lost, t.s.lease = held, nil
	}

	t.begin(initial)
	t.out.Send = t.cfg.message(dhcpv6.MessageTypeDecline, t.s.xid, 0, l.Server, l.Address).ToBytes()
	t.s.trace.Sent.Add("DECLINE")
	t.startOver(why)
}

// inform sends the first or the next INFORMATION-REQUEST.
func (t *step) inform() {
	if t.s.tries == 0 {
		t.begin(informing)
	}
	m := t.cfg.write(dhcpv6.MessageTypeInformationRequest, t.s.xid, t.now.Sub(t.s.first))
	requestOptions(m, dhcpv6.OptionInformationRefreshTime)
	t.send(m, infTimeout, infMaxRT, time.Time{})
}

// informing handles the answer to an INFORMATION-REQUEST, and reports the options in Output.Information.
func (t *step) informing(m *message) {
	if m.kind != dhcpv6.MessageTypeReply || statusOf(m.status) != iana.StatusSuccess {
		t.note(m.describe())
		return
	}

	var l Lease6
	info := &Information{DNS: m.dns(&l), Search: m.search(&l)}
	info.Ignored = l.Ignored

	// Refresh is a day by default, and at least ten minutes (RFC 8415, section 21.23).
	const day, least = 24 * time.Hour, 10 * time.Minute
	info.Refresh = max(m.options.InformationRefreshTime(day), least)
	t.out.Information = info
	t.idle(Informed, time.Time{})
}

// Information holds the options that a client without a lease receives.
type Information struct {
	DNS     []netip.Addr  // name servers, best first
	Search  []string      // domain search list
	Refresh time.Duration // time until the next request, at least 10 min
	Ignored []string      // parts of the answer that cannot be used, with the reasons
}
