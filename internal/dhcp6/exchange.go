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
	renTimeout = 10 * time.Second
	renMaxRT   = 10 * time.Minute
	rebTimeout = 10 * time.Second
	rebMaxRT   = 10 * time.Minute
	infTimeout = time.Second
	infMaxRT   = time.Hour
	decTimeout = time.Second
	decMaxRC   = 4
)

// solicit sends the first or the next SOLICIT, and enters SOLICITING.
func (t *step) solicit() {
	if t.s.state != soliciting {
		t.begin(soliciting)
		t.s.best = nil
	}

	m := t.message(dhcpv6.MessageTypeSolicit)
	addIANA(m, t.cfg.IAID, t.s.hint)
	if t.cfg.RapidCommit {
		m.AddOption(&dhcpv6.OptionGeneric{OptionCode: dhcpv6.OptionRapidCommit})
	}

	requestOptions(m, dhcpv6.OptionSolMaxRT)
	t.cfg.addHostName(m)
	t.send(m, solTimeout, cmp.Or(t.s.solMaxRT, solMaxRT), time.Time{})
}

// soliciting handles a message in SOLICITING. It requests an ADVERTISE with preference 255 at once. Until the first
// pause ends, it collects other ADVERTISEs, and keeps the one with the highest preference. Later it requests the
// first one, unless its server is to be avoided. A REPLY counts only with rapid commit.
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
		t.request(t.s.best)
	}
}

// granted returns the lease that a message offers or grants for the address want. If the message does not contain
// want, granted returns the lease of the first usable address. Without a usable address it returns nil and the
// reason, for a trace. The reason is empty if the message has an error status, since the message's description
// contains the status.
func (t *step) granted(m *message, want netip.Addr) (l *Lease6, why string) {
	if s := m.refusal(); statusOf(s) != iana.StatusSuccess {
		return nil, ""
	}

	list, t1, t2, ignored := m.grants()
	i := slices.IndexFunc(list, func(g grant) bool { return g.valid > 0 && g.addr == want })
	if i < 0 {
		i = slices.IndexFunc(list, func(g grant) bool { return g.valid > 0 })
	}

	switch {
	case i >= 0:
		return t.cfg.lease(m, list[i], t1, t2, ignored, t.s.sent), ""
	case len(ignored) > 0:
		return nil, ": " + ignored[0]
	case m.ia == nil:
		return nil, ": no IA_NA of ours"
	case len(list) > 0:
		return nil, fmt.Sprintf(": %s for no time", list[0].addr)
	}

	return nil, ": no address"
}

// solicitingTimeUp requests the best offer, or sends another SOLICIT if there is none.
func (t *step) solicitingTimeUp() {
	if t.s.best != nil {
		t.request(t.s.best)
		return
	}
	t.solicit()
}

// request enters REQUESTING, and requests the lease l, which a server advertised or has forgotten.
func (t *step) request(l *Lease6) {
	t.begin(requesting)
	t.s.requested, t.s.best = l, nil
	t.sendRequest()
}

// sendRequest sends the first or the next REQUEST.
func (t *step) sendRequest() {
	m := t.message(dhcpv6.MessageTypeRequest)
	addServerID(m, t.s.requested.Server)
	addIANA(m, t.cfg.IAID, t.s.requested.Address)
	requestOptions(m, dhcpv6.OptionSolMaxRT)
	t.cfg.addHostName(m)
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
		t.note(m.describe()) // a retry may succeed: the next REQUEST is sent in time
	default:
		t.note(m.describe())
		if s.StatusCode == iana.StatusNotOnLink {
			t.s.hint = netip.Addr{}
		}
		t.requestFailed(fmt.Errorf("%w: %s: REPLY from %s: %s", dhcpc.ErrNAK, asked.Address, asked.Server,
			statusText(s)))
	}
}

// requestFailed gives up a REQUEST that the server does not grant. With a present lease, the client then asks all
// servers for it (REBINDING). Without one, it starts over.
func (t *step) requestFailed(err error) {
	t.shun(t.s.requested.Server)
	if t.s.lease != nil {
		// The client keeps its lease until the lease ends, and asks other servers.
		t.s.trace.Last, t.s.requested = err, nil
		t.begin(rebinding)
		t.s.wake, t.s.listen = t.now.Add(min(rebTimeout, t.s.lease.Expire.Sub(t.now))), time.Time{}
		return
	}
	t.startOver(err)
}

// requestingTimeUp repeats the REQUEST, or gives up after reqMaxRC of them.
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
	case l.Infinite(): // never due
		t.idle(bound, time.Time{})
	case !t.now.Before(l.Expire):
		t.lose(dhcpc.ErrExpired)
	case !t.now.Before(l.Rebind):
		if t.s.state != rebinding {
			t.beginRenewal(rebinding)
		}
		t.renew(dhcpv6.MessageTypeRebind, rebTimeout, rebMaxRT, l.Expire)
	default:
		if t.s.state != renewing {
			t.beginRenewal(renewing)
		}
		t.renew(dhcpv6.MessageTypeRenew, renTimeout, renMaxRT, l.Rebind)
	}
}

// beginRenewal starts an exchange that renews the lease.
func (t *step) beginRenewal(state State) {
	if t.s.state == bound {
		t.s.trace = trace.Trace{Began: t.now}
	}
	t.begin(state)
}

// renew sends the first or the next RENEW or REBIND.
func (t *step) renew(kind dhcpv6.MessageType, irt, mrt time.Duration, end time.Time) {
	l := t.s.lease
	m := t.message(kind)
	if kind == dhcpv6.MessageTypeRenew {
		addServerID(m, l.Server)
	}
	addIANA(m, t.cfg.IAID, l.Address)
	requestOptions(m)
	t.cfg.addHostName(m)
	t.send(m, irt, mrt, end)
}

// renewing handles the answer to a RENEW or a REBIND (RFC 8415, section 18.2.10.1).
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
			t.request(&again)
		}
		return
	}

	list, t1, t2, ignored := m.grants()
	i := slices.IndexFunc(list, func(g grant) bool { return g.addr == l.Address })
	switch {
	case i >= 0 && list[i].valid > 0:
		t.take(t.cfg.lease(m, list[i], t1, t2, ignored, t.s.sent))
	case i >= 0:
		t.revoked(m, list, t1, t2, ignored)
	case len(ignored) > 0:
		t.note(m.describe() + ": " + ignored[0])
	default:
		t.note(m.describe() + ": nothing about " + l.Address.String())
	}
}

// revoked handles a REPLY that gives the present lease no more time. It ends that lease, and uses another address of
// the REPLY if there is one.
func (t *step) revoked(m *message, list []grant, t1, t2 time.Duration, ignored []string) {
	old := t.s.lease
	i := slices.IndexFunc(list, func(g grant) bool { return g.valid > 0 })
	if i < 0 {
		t.lose(fmt.Errorf("%w: REPLY from %s: no more time", dhcpc.ErrNAK, m.server))
		return
	}
	t.out.Lost, t.s.lease = old, nil
	t.take(t.cfg.lease(m, list[i], t1, t2, ignored, t.s.sent))
}

// decline sends a DECLINE for an address that a server granted and the client does not use. The client then starts
// over.
func (t *step) decline(l *Lease6, why error) {
	t.out.Err, t.s.trace.Last = why, why
	t.shun(l.Server)
	if t.s.hint = t.cfg.Address; t.s.hint == l.Address {
		t.s.hint = netip.Addr{}
	}

	if held := t.s.lease; held != nil {
		// The declined lease replaces the present one, or is for the same address. In either case the present lease
		// ends.
		t.out.Lost, t.s.lease = held, nil
	}

	t.begin(declining)
	t.s.requested = l
	t.sendDecline()
}

// sendDecline sends the first or the next DECLINE.
func (t *step) sendDecline() {
	m := t.message(dhcpv6.MessageTypeDecline)
	addServerID(m, t.s.requested.Server)
	addIANA(m, t.cfg.IAID, t.s.requested.Address)
	t.send(m, decTimeout, 0, time.Time{})
}

// decliningTimeUp repeats the DECLINE, or starts over after decMaxRC of them.
func (t *step) decliningTimeUp() {
	if t.s.tries < decMaxRC {
		t.sendDecline()
		return
	}
	t.startOver(nil)
}

// inform sends the first or the next INFORMATION-REQUEST.
func (t *step) inform() {
	if t.s.tries == 0 {
		t.begin(informing)
	}
	m := t.message(dhcpv6.MessageTypeInformationRequest)
	requestOptions(m, dhcpv6.OptionInformationRefreshTime, dhcpv6.OptionInfMaxRT)
	t.send(m, infTimeout, cmp.Or(t.s.infMaxRT, infMaxRT), time.Time{})
}

// informing handles the answer to an INFORMATION-REQUEST.
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

// The times of a CONFIRM (RFC 8415, section 7.6).
const (
	cnfMaxDelay = time.Second
	cnfTimeout  = time.Second
	cnfMaxRT    = 4 * time.Second
	cnfMaxRD    = 10 * time.Second
)

// Confirm returns a Session for a client that still has the lease l. The Session asks any server whether the address
// fits the link (RFC 8415, section 18.2.3). Use it when the machine or the program has restarted, or when the machine
// may have been moved.
//
// If no server answers within ten seconds, the client goes on using the lease. If the lease is due for renewal, or
// Obtained is in the future, the Session renews it instead. If the lease has run out, the Session reports it as lost:
// see Restore. An unusable lease is an error that matches tombolo.ErrInvalid.
func (m *Machine) Confirm(now time.Time, seed uint64, l *Lease6) (Session, error) {
	s, err := m.Restore(now, seed, l)
	if err == nil && (s.wake.IsZero() || now.Before(s.wake)) {
		t := step{Machine: m, s: &s, now: now}

		// Wait for a random time, since all clients of a machine may start at once.
		at := now.Add(t.s.random.Between(0, cnfMaxDelay))
		t.begin(Confirming)
		t.idle(Confirming, at)
	}
	return s, err
}

// confirm sends the first or the next CONFIRM. If no answer has come within cnfMaxRD, or a renewal is due, it returns
// to BOUND with the lease.
func (t *step) confirm() {
	l := t.s.lease
	if t.s.tries == 0 {
		t.s.first = t.now
	}

	end := t.s.first.Add(cnfMaxRD)
	if !l.Infinite() && l.Renew.Before(end) {
		end = l.Renew
	}

	if !t.now.Before(end) {
		t.confirmed()
		return
	}

	m := t.message(dhcpv6.MessageTypeConfirm)
	addIANA(m, t.cfg.IAID, l.Address)
	t.send(m, cnfTimeout, cnfMaxRT, end)
}

// confirmed returns to the state bound after a CONFIRM. It keeps the present lease and schedules its renewal, which
// may be due by now.
func (t *step) confirmed() {
	t.s.trace = trace.Trace{Began: t.now}
	t.idle(bound, t.s.lease.Renew)
}

// confirming handles the answer to a CONFIRM.
func (t *step) confirming(m *message) {
	if m.kind != dhcpv6.MessageTypeReply {
		return
	}
	t.note(m.describe())
	switch statusOf(m.status) {
	case iana.StatusSuccess:
		t.confirmed()
	case iana.StatusNotOnLink:
		t.lose(dhcpc.ErrNAK)
	}
}
