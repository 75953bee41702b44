package dhcp6

import (
	"time"

	"github.com/insomniacslk/dhcp/dhcpv6"
	"github.com/insomniacslk/dhcp/iana"

	"github.com/tombolo-cni/tombolo/dhcpc"
	"github.com/tombolo-cni/tombolo/dhcpc/internal/trace"
)

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
