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

// The times of RFC 8415, section 7.6.
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

// solicit sends a SOLICIT, the first of an exchange or another.
func (t *step) solicit() {
	if t.s.state != soliciting {
		t.begin(soliciting)
		t.s.best = nil
	}
	m := t.message(dhcpv6.MessageTypeSolicit)
	identity(m, t.cfg.IAID, t.s.hint)
	if t.cfg.RapidCommit {
		m.AddOption(&dhcpv6.OptionGeneric{OptionCode: dhcpv6.OptionRapidCommit})
	}
	askFor(m, dhcpv6.OptionSolMaxRT)
	t.cfg.name(m)
	t.send(m, solTimeout, cmp.Or(t.s.solMaxRT, solMaxRT), time.Time{})
}

// soliciting hears ADVERTISEs for the first pause, to take the one of the highest preference;
// after it the first.
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

// granted makes a lease of a message's first usable address, or of one that is wanted.
func (t *step) granted(m *message, want netip.Addr) (l *Lease, why string) {
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

func (t *step) solicitingTimeUp() {
	if t.s.best != nil {
		t.request(t.s.best)
		return
	}
	t.solicit()
}

// request asks a server for what it advertised.
func (t *step) request(l *Lease) {
	t.begin(requesting)
	t.s.asked, t.s.best = l, nil
	t.sendRequest()
}

func (t *step) sendRequest() {
	m := t.message(dhcpv6.MessageTypeRequest)
	to(m, t.s.asked.Server)
	identity(m, t.cfg.IAID, t.s.asked.Address)
	askFor(m, dhcpv6.OptionSolMaxRT)
	t.cfg.name(m)
	var end time.Time
	if t.s.lease != nil {
		end = t.s.lease.Expire // a renewal's
	}
	t.send(m, reqTimeout, reqMaxRT, end)
}

// requesting hears the selected server only.
func (t *step) requesting(m *message) {
	asked := t.s.asked
	if !t.fromAsked(m, asked.Server) {
		return
	}
	switch s := m.refusal(); statusOf(s) {
	case iana.StatusSuccess:
		if l, why := t.granted(m, asked.Address); l != nil {
			t.take(l)
		} else {
			t.note(m.describe() + why)
			t.unable(fmt.Errorf("%w: REPLY from %s%s", dhcpc.ErrNAK, asked.Server, why))
		}
	case iana.StatusUnspecFail, iana.StatusUseMulticast:
		t.note(m.describe()) // it may think better of it: asked again in time
	default:
		t.note(m.describe())
		if s.StatusCode == iana.StatusNotOnLink {
			t.s.hint = netip.Addr{}
		}
		t.unable(fmt.Errorf("%w: %s: REPLY from %s: %s", dhcpc.ErrNAK, asked.Address, asked.Server, statusText(s)))
	}
}

// unable ends a REQUEST that a server does not grant.
func (t *step) unable(err error) {
	t.shun(t.s.asked.Server)
	if t.s.lease != nil {
		// The client keeps its lease until that ends, and asks other servers.
		t.s.trace.Last, t.s.asked = err, nil
		t.begin(rebinding)
		t.s.wake, t.s.listen = t.now.Add(min(rebTimeout, t.s.lease.Expire.Sub(t.now))), time.Time{}
		return
	}
	t.startOver(err)
}

func (t *step) requestingTimeUp() {
	switch {
	case t.s.lease != nil && t.s.lease.Left(t.now) == 0:
		t.lose(dhcpc.ErrExpired)
	case t.s.tries < reqMaxRC:
		t.sendRequest()
	case t.s.lease != nil:
		t.unable(fmt.Errorf("%w: no answer from %s", dhcpc.ErrTimeout, t.s.asked.Server))
	default:
		t.shun(t.s.asked.Server)
		t.s.asked = nil
		t.solicit()
	}
}

// leaseTimeUp does what is due at this time for the holder of a lease.
func (t *step) leaseTimeUp() {
	l := t.s.lease
	switch {
	case l.Infinite(): // nothing ever is
		t.idle(bound, time.Time{})
	case !t.now.Before(l.Expire):
		t.lose(dhcpc.ErrExpired)
	case !t.now.Before(l.Rebind):
		if t.s.state != rebinding {
			t.begun(rebinding)
		}
		t.renew(dhcpv6.MessageTypeRebind, rebTimeout, rebMaxRT, l.Expire)
	default:
		if t.s.state != renewing {
			t.begun(renewing)
		}
		t.renew(dhcpv6.MessageTypeRenew, renTimeout, renMaxRT, l.Rebind)
	}
}

// begun begins a renewal.
func (t *step) begun(state State) {
	if t.s.state == bound {
		t.s.trace = trace.Trace{Began: t.now}
	}
	t.begin(state)
}

func (t *step) renew(kind dhcpv6.MessageType, irt, mrt time.Duration, end time.Time) {
	l := t.s.lease
	m := t.message(kind)
	if kind == dhcpv6.MessageTypeRenew {
		to(m, l.Server)
	}
	identity(m, t.cfg.IAID, l.Address)
	askFor(m)
	t.cfg.name(m)
	t.send(m, irt, mrt, end)
}

// renewing hears the answer to a RENEW or a REBIND: RFC 8415, section 18.2.10.1.
func (t *step) renewing(m *message) {
	l := t.s.lease
	if m.kind != dhcpv6.MessageTypeReply || t.s.state == renewing && !t.fromAsked(m, l.Server) {
		return
	}
	if s := m.refusal(); statusOf(s) != iana.StatusSuccess {
		t.note(m.describe())
		if s.StatusCode == iana.StatusNoBinding && statusOf(m.status) == iana.StatusSuccess {
			// It has forgotten, and may give the address anew.
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

// revoked ends a lease that a server has given no more time, and takes what it gave instead.
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

// decline tells the server that an address which it granted is not taken, and then starts over.
func (t *step) decline(l *Lease, why error) {
	t.out.Err, t.s.trace.Last = why, why
	t.shun(l.Server)
	if t.s.hint = t.cfg.Address; t.s.hint == l.Address {
		t.s.hint = netip.Addr{}
	}
	if held := t.s.lease; held != nil {
		// It is another that is declined, or the same: then nothing may use it any more.
		t.out.Lost, t.s.lease = held, nil
	}
	t.begin(declining)
	t.s.asked = l
	t.sendDecline()
}

func (t *step) sendDecline() {
	m := t.message(dhcpv6.MessageTypeDecline)
	to(m, t.s.asked.Server)
	identity(m, t.cfg.IAID, t.s.asked.Address)
	t.send(m, decTimeout, 0, time.Time{})
}

func (t *step) decliningTimeUp() {
	if t.s.tries < decMaxRC {
		t.sendDecline()
		return
	}
	t.startOver(nil)
}

// inform sends an INFORMATION-REQUEST.
func (t *step) inform() {
	if t.s.tries == 0 {
		t.begin(informing)
	}
	m := t.message(dhcpv6.MessageTypeInformationRequest)
	askFor(m, dhcpv6.OptionInformationRefreshTime, dhcpv6.OptionInfMaxRT)
	t.send(m, infTimeout, cmp.Or(t.s.infMaxRT, infMaxRT), time.Time{})
}

func (t *step) informing(m *message) {
	if m.kind != dhcpv6.MessageTypeReply || statusOf(m.status) != iana.StatusSuccess {
		t.note(m.describe())
		return
	}
	var l Lease
	info := &Information{DNS: m.dns(&l), Search: m.search(&l)}
	info.Ignored = l.Ignored
	// RFC 8415, section 21.23: a day if the server says nothing, and ten minutes at least.
	const day, least = 24 * time.Hour, 10 * time.Minute
	info.Refresh = max(m.options.InformationRefreshTime(day), least)
	t.out.Information = info
	t.idle(Informed, time.Time{})
}

// Information is what a client without a lease learns.
type Information struct {
	DNS     []netip.Addr  // name servers, best first
	Search  []string      // domain search list
	Refresh time.Duration // when to ask again, 10 min or more
	Ignored []string      // what could not be used, and why
}

// The times of a CONFIRM: RFC 8415, section 7.6.
const (
	cnfMaxDelay = time.Second
	cnfTimeout  = time.Second
	cnfMaxRT    = 4 * time.Second
	cnfMaxRD    = 10 * time.Second
)

// Confirm takes up a lease that this client still has, and asks any server whether its address fits the
// link: after the machine or the program was started again, or may have been moved (RFC 8415, section
// 18.2.3). Where none
// answers within ten seconds, the lease goes on. A lease that is due to be renewed or is of the future is renewed
// instead, and one that has run out is lost: see Restore.
// The error matches tombolo.ErrInvalid.
func (m *Machine) Confirm(now time.Time, seed uint64, l *Lease) (Session, error) {
	s, err := m.Restore(now, seed, l)
	if err == nil && (s.wake.IsZero() || now.Before(s.wake)) {
		t := step{Machine: m, s: &s, now: now}
		// At random, since all clients of a machine may start at once.
		at := now.Add(t.s.random.Between(0, cnfMaxDelay))
		t.begin(Confirming)
		t.idle(Confirming, at)
	}
	return s, err
}

// confirm sends a CONFIRM, or the next, until it has been long enough.
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
	identity(m, t.cfg.IAID, l.Address)
	t.send(m, cnfTimeout, cnfMaxRT, end)
}

// confirmed goes on with the lease, which may be due to be renewed meanwhile.
func (t *step) confirmed() {
	t.s.trace = trace.Trace{Began: t.now}
	t.idle(bound, t.s.lease.Renew)
}

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
