package dhcpc

import (
	"cmp"
	"math"
	"net/netip"
	"time"

	"github.com/tombolo-cni/tombolo/internal/trace"
)

// Machine is the state machine of RFC 2131 for the identity of one client. It has no socket, no clock and no goroutine,
// and keeps nothing between calls. The client's state is a Session, which Step takes and returns. So one goroutine can
// serve a thousand clients, with a heap of their Sessions' wake-up times.
type Machine struct {
	cfg *Config
}

// NewMachine checks a configuration and returns a Machine. It ignores the configuration's Dial.
func NewMachine(cfg *Config) (*Machine, error) {
	if err := cfg.check(); err != nil {
		return nil, err
	}
	return &Machine{cfg: cfg.withDefaults()}, nil
}

// Session is the state of a client. It is a value: a copy is a snapshot, and Step changes neither the Session that it
// gets, nor anything that this Session points to.
type Session struct {
	state  state
	random trace.Random // the source of transaction identifiers and pauses
	now    time.Time    // the latest time given to Step
	wake   time.Time
	listen time.Time
	trace  trace.Trace

	xid         uint32
	secs        uint16    // seconds from the start of the attempt to its last DISCOVER or renewal
	requestSent time.Time // the time of the last REQUEST or DISCOVER
	tries       int       // how often the message of this state was sent
	failures    int       // failed exchanges since the last lease; each makes the back-off longer

	askBroadcast bool // servers are asked to broadcast their answers, see broadcastTry

	offer *Lease       // the lease that is being requested or probed; in SELECTING kept for a late ACK
	other *Lease       // an OFFER that is refused or from a server to avoid, used if no better one comes
	avoid []netip.Addr // servers that did not grant their OFFER, or granted a lease that Config.Refuse refused
	hint  netip.Addr   // the address to request in a DISCOVER

	last   *Lease    // Config.Last, until a server answers
	giveUp time.Time // when the search ends and the client uses last

	others     []netip.Addr // other servers that answered too, for Lease.Others
	unbelieved []string     // rejected answers, for Lease.Ignored; see whyDoubtful

	lease *Lease // the present lease
}

// Failure returns an error that matches err and lists the messages that the Session sent and received. op is the
// failed operation, as a verb and an object.
func (s *Session) Failure(op string, now time.Time, err error) error {
	return s.trace.Failure(op, now, err, "no lease after",
		"does a DHCP server serve this network, and do bridge and firewall let UDP ports 67 and 68 pass?")
}

// State returns the name of the state in RFC 2131's spelling: INIT, REBOOTING, SELECTING, REQUESTING, PROBING, BOUND,
// RENEWING or REBINDING.
func (s *Session) State() string { return s.state.String() }

// Lease returns the present lease, or nil. There is one in BOUND, RENEWING and REBINDING.
func (s *Session) Lease() *Lease { return s.lease }

// Wake returns the time to call Step again if nothing comes before. The zero time means never. In BOUND it is T1 or up
// to a minute later, at random, so that clients that began together do not all renew together.
func (s *Session) Wake() time.Time { return s.wake }

// Output is the result of a Step. It tells the caller the next actions.
type Output struct {
	// Send is a packet that the caller must send now, or nil. If sending fails, continue as if the network had lost the
	// packet.
	Send *Packet
	// Bound is a lease to use from now on, or nil. A server has just granted, renewed or confirmed it, or it is
	// Config.Last and no server has answered. The caller must apply its address, routes and lifetimes.
	Bound *Lease
	// Lost is a lease that has just ended, or nil. From now on nothing may use its address.
	Lost *Lease
	// Err is the reason for a lost or refused lease, or nil. It matches ErrNAK, ErrDeclined, ErrRefused or
	// ErrExpired. The Session continues and tries to get another lease.
	Err error
	// Unbelieved describes a rejected answer and the reason, for a log. Its server is not in Config.Servers, or a
	// machine outside the LAN may have sent it. "" means that no answer was rejected.
	Unbelieved string
	// Listen is the time until which answers are expected. After it, and if it is the zero time, sockets need not
	// stay open. It is not later than Session.Wake.
	Listen time.Time
}

// Start begins a Session without an address. If Config.Last has not ended, the Session first asks servers to confirm
// it. The seed is a random number. It makes transaction identifiers and pauses differ between clients.
func (m *Machine) Start(now time.Time, seed uint64) Session {
	s := Session{state: initial, random: trace.Random(seed), now: now, wake: now, hint: m.cfg.Address,
		trace: trace.Trace{Began: now}}
	if m.cfg.Last.Left(now) != 0 {
		s.last = m.cfg.Last
	}
	return s
}

// Restore continues a lease whose address the client still has, as after a restart of the program. The Session sends
// nothing until the lease is due for renewal. If the lease has expired, the next Step ends it, and requests its address
// in a DISCOVER. If Obtained is in the future, the clock was set back. Then the next Step asks servers to confirm the
// lease, unless the lease never ends. For an unusable lease, the error matches tombolo.ErrInvalid.
func (m *Machine) Restore(now time.Time, seed uint64, l *Lease) (Session, error) {
	if err := l.Validate(); err != nil {
		return Session{}, err
	}

	s := m.Start(now, seed)
	s.last = nil
	s.hint, s.lease, s.others = l.Address.Addr(), l, l.Others
	s.state, s.wake = bound, l.Renew
	if now.Before(l.Obtained) && !l.Infinite() {
		s.lease, s.wake = l.unconfirmed(now), now
	}
	return s, nil
}

// Step advances a Session to the time now and processes the packet heard, unless that is nil. It returns the new
// Session and the caller's next actions.
//
// Step may be called late: it then does the work that is due. If now is before the time of an earlier Step, the earlier
// time counts, so a Session's time never runs backwards. Go's monotonic clock stops while the machine is suspended, so
// the caller must add that time to now: see unix.CLOCK_BOOTTIME.
func (m *Machine) Step(s Session, now time.Time, heard *Packet) (Session, Output) {
	if now.Before(s.now) {
		now = s.now
	}

	s.now = now
	t := step{Machine: m, s: &s, now: now}
	if heard != nil {
		t.receive(heard)
	}

	// If the packet led to a lease or to a packet to send, do no more in this Step, even if the wake-up time has come.
	if !s.wake.IsZero() && !now.Before(s.wake) && t.out.Send == nil && t.out.Bound == nil {
		t.timeUp()
	}

	t.out.Listen = s.listen
	return s, t.out
}

// step is one call of Step in progress, with its copy of the Session.
type step struct {
	*Machine
	s   *Session
	now time.Time
	out Output
}

func (t *step) timeUp() {
	switch t.s.state {
	case initial:
		if t.s.last != nil {
			t.reboot()
			return
		}
		t.discover()
	case rebooting:
		t.forget()
		t.discover()
	case selecting:
		t.selectingTimeUp()
	case requesting:
		t.requestingTimeUp()
	case probing:
		t.probe()
	case bound, renewing, rebinding:
		t.leaseTimeUp()
	}
}

func (t *step) receive(p *Packet) {
	if p.ARP != nil {
		t.handleARP(p.ARP)
		return
	}

	m, err := parse(p)
	if err != nil {
		t.note("packet without a DHCP message")
		return
	}

	if why := t.whyForeign(t.s, m); why != "" {
		t.note(describe(m) + ": " + why)
		return
	}

	if why := t.whyDoubtful(t.s, m, p); why != "" {
		t.out.Unbelieved = describe(m) + ": " + why
		t.s.unbelieved = trace.Shun(t.s.unbelieved, t.out.Unbelieved)
		t.note(t.out.Unbelieved)
		if t.s.lease != nil && t.s.tries == 1 {
			t.s.wake = t.now // the next REQUEST, a broadcast, shows whether the answer was genuine
		}
		return
	}

	t.s.last = nil // a server exists
	switch t.s.state {
	case selecting:
		t.selecting(m)
	case rebooting, requesting, renewing, rebinding:
		t.answered(m, cmp.Or(t.s.lease, t.s.offer))
	default:
		t.note(describe(m) + ": nothing was asked")
	}
}

// note records a received message, for the error text if the attempt to get a lease fails.
func (t *step) note(what string) { t.s.trace.Heard.Add(what) }

// enter changes to a state that waits for answers. The wait ends at the time wake.
func (t *step) enter(state state, wake time.Time) {
	t.s.state, t.s.wake, t.s.listen = state, wake, wake
}

// idle changes to a state that expects no message. The state ends at the time wake; the zero time means never.
func (t *step) idle(state state, wake time.Time) {
	t.s.state, t.s.wake, t.s.listen = state, wake, time.Time{}
}

func (t *step) send(what string, p *Packet) {
	t.out.Send = p
	t.s.trace.Sent.Add(what)
}

// count sets secs to the seconds since the attempt began. Each DISCOVER and REQUEST contains this number. A relay can
// use it to recognize a client that has waited for long.
func (t *step) count() {
	t.s.secs = uint16(min(max(t.now.Sub(t.s.trace.Began)/time.Second, 0), math.MaxUint16))
}

// newXID chooses a new transaction identifier.
func (t *step) newXID() { t.s.xid = uint32(t.s.random.Next()) }

// retransmission returns the pause after the n-th transmission, counted from 1 (RFC 2131, section 4.1).
func (t *step) retransmission(n int) time.Duration {
	d := trace.Doubled(t.cfg.Retransmit, n-1, maxRetransmit)
	jitter := min(time.Second, d/4)
	return t.s.random.Between(d-jitter, d+jitter)
}

// declineBackOff is the shortest pause after a DECLINE (RFC 2131, section 3.1, step 5).
const declineBackOff = 10 * time.Second

// startOver returns to INIT after a failure, and waits there for at least atLeast. The wait grows with each failure. It
// reports err in Output.Err.
func (t *step) startOver(err error, atLeast time.Duration) {
	t.out.Err, t.s.trace.Last = err, err
	pause := max(trace.BackOff(t.s.failures), atLeast)
	t.s.failures++
	t.forget()
	t.idle(initial, t.now.Add(pause))
}

// forget clears the offers and the count of tries of the current attempt.
func (t *step) forget() {
	t.s.tries, t.s.offer, t.s.other = 0, nil, nil
}

// shun adds a server to the servers that the client avoids. Until the next lease, the client prefers other servers.
func (t *step) shun(server netip.Addr) { t.s.avoid = trace.Shun(t.s.avoid, server) }

// lose ends the present lease, if there is one, and reports it in Output.Lost.
func (t *step) lose() {
	if t.s.lease == nil {
		return
	}
	t.out.Lost, t.s.lease = t.s.lease, nil
	t.s.trace.Began = t.now
}

// bind makes l the present lease, reports it in Output.Bound, and enters BOUND until T1.
func (t *step) bind(l *Lease) {
	t.out.Bound, t.s.lease = l, l
	t.s.hint = l.Address.Addr()
	t.s.failures, t.s.avoid = 0, nil
	t.s.trace, t.s.unbelieved = trace.Trace{Began: t.now}, nil
	t.forget()

	// BOUND expects no message before T1.
	t.idle(bound, t.renewAt(l))
}

// renewAt returns T1, or at random a somewhat later time, so that clients that began together do not all renew
// together (RFC 2131, section 4.4.5). It returns the zero time for a lease that never ends.
func (t *step) renewAt(l *Lease) time.Time {
	if l.Infinite() {
		return time.Time{}
	}
	return l.Renew.Add(t.s.random.Between(0, min(l.Rebind.Sub(l.Renew)/8, time.Minute)))
}

// state is one of the states of RFC 2131, figure 5, or probing. In each state the client waits for a time or an
// answer. States that wait for a server begin with a message, which the client may repeat. The package comment has a
// diagram.
type state uint8

const (
	initial    state = iota // about to send the first message: at the start, or after a back-off
	rebooting               // sent a REQUEST for the address of Config.Last; waits for an ACK or a NAK
	selecting               // sent a DISCOVER; waits for an OFFER, or for an ACK with rapid commit
	requesting              // sent a REQUEST for an offered address; waits for the server's ACK or NAK
	probing                 // has an ACK or reuses Config.Last; asks by ARP whether a host has the address (RFC 5227)
	bound                   // has a lease; waits for T1
	renewing                // past T1: sent a REQUEST, the first one to the lease's server only
	rebinding               // past T2: sent a REQUEST to all servers
)

func (s state) String() string {
	return [...]string{"INIT", "REBOOTING", "SELECTING", "REQUESTING", "PROBING", "BOUND", "RENEWING", "REBINDING"}[s]
}
