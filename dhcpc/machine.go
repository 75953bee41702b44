package dhcpc

import (
	"math"
	"net/netip"
	"strconv"
	"time"

	"github.com/tombolo-cni/tombolo/internal/trace"
)

// Machine is the state machine of RFC 2131 for one client's identity. It has no
// socket, no clock and no goroutine, and keeps nothing between calls: where the
// client stands is a Session, which Step takes and gives back. So a program with a
// thousand leases holds a thousand Sessions and one heap of their wake-up times.
type Machine struct {
	cfg *Config
}

// NewMachine checks a configuration. Dial, Clock and Timeout are not used.
func NewMachine(cfg *Config) (*Machine, error) {
	c, err := cfg.withDefaults()
	if err != nil {
		return nil, err
	}
	return &Machine{cfg: c}, nil
}

// Session is where a client stands. It is a value: a copy is a snapshot, and Step
// changes neither its argument nor what that points to.
type Session struct {
	state  State
	random trace.Random // xids and pauses come from it
	now    time.Time    // the latest that Step was told
	wake   time.Time
	listen time.Time
	trace  trace.Trace

	xid      uint32
	secs     uint16    // since it began, as of the last DISCOVER, or REQUEST that follows none
	asked    time.Time // when the last REQUEST was sent, or DISCOVER with rapid commit
	tries    int       // of what is being sent in this state
	failures int       // since the last lease: they make the back-off longer

	askBroadcast bool // servers are asked to broadcast their answers, see broadcastTry

	offer *Lease       // what is being requested, or probed
	other *Lease       // an OFFER of a server to avoid, taken if there is no better
	avoid []netip.Addr // servers that offered and then refused, or fell silent
	hint  netip.Addr   // the address to ask for in a DISCOVER

	last   *Lease    // Config.Last, until a server answers
	giveUp time.Time // when to take it up

	others     []netip.Addr // servers that answered besides the one that was asked, for Lease.Others
	unbelieved []string     // answers, for Lease.Ignored, see doubt

	lease *Lease // what is held
}

// Failure returns an error that matches err and lists the messages that the Session sent and received.
func (s *Session) Failure(op string, now time.Time, err error) error {
	return s.trace.Failure(op, now, err, "no lease after",
		"does a DHCP server serve this network, and do bridge and firewall let UDP ports 67 and 68 pass?")
}

// State gives the state.
func (s *Session) State() State { return s.state }

// Lease gives the lease that is held: in BOUND, RENEWING and REBINDING; else nil.
func (s *Session) Lease() *Lease { return s.lease }

// Wake gives the time of the next Step, as the last Output did.
func (s *Session) Wake() time.Time { return s.wake }

// Output is what a Step asks of its caller.
type Output struct {
	// Send is to be sent now. If it cannot be, let time pass: it is sent again.
	Send *Packet
	// Bound is a lease that a server granted, renewed or confirmed just now: its
	// address, routes and lifetimes are to be applied.
	Bound *Lease
	// Lost is a lease that has ended: nothing may use its address any more.
	Lost *Lease
	// Err is why a lease was lost or refused: it matches ErrNAK, ErrDeclined,
	// ErrRefused or ErrExpired. The Session goes on and tries to get another.
	Err error
	// Unbelieved describes an answer that was passed over, and why, for a log: its server is none of Config.Servers,
	// or it may come from outside the LAN.
	Unbelieved string
	// Wake is when to call Step again if nothing comes before; the zero time: never.
	Wake time.Time
	// Listen is until when answers are expected: after that, and where it is the
	// zero time, sockets need not stay open. It is not later than Wake.
	Listen time.Time
}

// Start begins a Session without an address. The seed makes transaction
// identifiers and pauses differ between clients: a random number.
func (m *Machine) Start(now time.Time, seed uint64) Session {
	s := Session{state: initial, random: trace.Random(seed), now: now, wake: now, hint: m.cfg.Address, trace: trace.Trace{Began: now}}
	if m.cfg.Last.Left(now) != 0 {
		s.last = m.cfg.Last
	}
	return s
}

// Restore takes up a lease whose address this client still has, as a restarted
// program does: it is renewed when it is due, and nothing is sent before. A lease
// that has run out is gone, and its address is asked for in the first DISCOVER. For a
// lease of the future any server is asked at once: the clock was set. The error
// matches tombolo.ErrInvalid.
func (m *Machine) Restore(now time.Time, seed uint64, l *Lease) (Session, error) {
	if err := l.Validate(); err != nil {
		return Session{}, err
	}
	s := m.Start(now, seed)
	s.last = nil
	s.hint, s.lease, s.others = l.Address.Addr(), l, l.Others
	s.state, s.wake = Bound, l.Renew
	if now.Before(l.Obtained) && !l.Infinite() {
		s.lease, s.wake = l.unconfirmed(now), now
	}
	return s, nil
}

// Step tells a Session that time has passed and what has happened. Times may come late: Step then does all that is
// due. A time before that of an earlier Step is taken for that one: nothing runs backwards. The time for which the
// machine was suspended, which Go's clock does not count, is the caller's to add: see unix.CLOCK_BOOTTIME.
func (m *Machine) Step(s Session, now time.Time, heard *Packet) (Session, Output) {
	if now.Before(s.now) {
		now = s.now
	}
	s.now = now
	t := step{Machine: m, s: &s, now: now}
	if heard != nil {
		t.receive(heard)
	}
	// A message that changed the state set a new wake-up time, even if that is past.
	if !s.wake.IsZero() && !now.Before(s.wake) && t.out.Send == nil && t.out.Bound == nil {
		t.timeUp()
	}
	t.out.Wake, t.out.Listen = s.wake, s.listen
	return s, t.out
}

// step is one Step at work, on its own copy of the Session.
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
	case Bound, Renewing, Rebinding:
		t.leaseTimeUp()
	}
}

func (t *step) receive(p *Packet) {
	if p.ARP != nil {
		t.hearARP(p.ARP)
		return
	}
	m, err := parse(p)
	if err != nil {
		t.note("packet without a DHCP message")
		return
	}
	if why := t.foreign(t.s, m); why != "" {
		t.note(describe(m) + ": " + why)
		return
	}
	if why := t.doubt(t.s, m, p); why != "" {
		t.out.Unbelieved = describe(m) + ": " + why
		t.s.unbelieved = trace.Shun(t.s.unbelieved, t.out.Unbelieved)
		t.note(t.out.Unbelieved)
		if t.s.lease != nil && t.s.tries == 1 {
			t.s.wake = t.now // a broadcast tells whether the server meant it
		}
		return
	}
	t.s.last = nil // a server is there
	switch t.s.state {
	case rebooting:
		t.rebooting(m)
	case selecting:
		t.selecting(m)
	case requesting:
		t.requesting(m)
	case Renewing, Rebinding:
		t.renewing(m)
	default:
		t.note(describe(m) + ": nothing was asked")
	}
}

// note counts something heard, for the error if no lease comes of it.
func (t *step) note(what string) { t.s.trace.Heard.Add(what) }

// enter goes to a state, for a wait until some time at which it is heard no more.
func (t *step) enter(state State, wake time.Time) {
	t.s.state, t.s.wake, t.s.listen = state, wake, wake
}

// idle goes to a state in which nothing is waited for but the time.
func (t *step) idle(state State, wake time.Time) {
	t.s.state, t.s.wake, t.s.listen = state, wake, time.Time{}
}

func (t *step) send(what string, p *Packet) {
	t.out.Send = p
	t.s.trace.Sent.Add(what)
}

// count writes down how long this has taken already. It goes into each message, by
// which a relay may see that a client is in need.
func (t *step) count() {
	t.s.secs = uint16(min(max(t.now.Sub(t.s.trace.Began)/time.Second, 0), math.MaxUint16))
}

// newXID changes the transaction identifier.
func (t *step) newXID() { t.s.xid = uint32(t.s.random.Next()) }

// retransmission is the pause after the n-th transmission, 1 being the first: RFC
// 2131, section 4.1.
func (t *step) retransmission(n int) time.Duration {
	d := trace.Doubled(t.cfg.Retransmit, n-1, maxRetransmit)
	jitter := min(time.Second, d/4)
	return t.s.random.Between(d-jitter, d+jitter)
}

// declineBackOff is the least pause after a conflict: RFC 2131, section 3.1, 5.
const declineBackOff = 10 * time.Second

// startOver goes back to INIT after a failure, for a while that grows with each.
func (t *step) startOver(err error, atLeast time.Duration) {
	t.out.Err, t.s.trace.Last = err, err
	pause := max(trace.BackOff(t.s.failures), atLeast)
	t.s.failures++
	t.forget()
	t.idle(initial, t.now.Add(pause))
}

// forget drops what belongs to an attempt.
func (t *step) forget() {
	t.s.tries, t.s.offer, t.s.other = 0, nil, nil
}

// shun remembers that a server's OFFER led to nothing.
func (t *step) shun(server netip.Addr) { t.s.avoid = trace.Shun(t.s.avoid, server) }

// lose ends the lease that is held, if one is.
func (t *step) lose() {
	if t.s.lease == nil {
		return
	}
	t.out.Lost, t.s.lease = t.s.lease, nil
	t.s.trace.Began = t.now
}

// bind takes a lease: the session's work is done until T1.
func (t *step) bind(l *Lease) {
	t.out.Bound, t.s.lease = l, l
	t.s.hint = l.Address.Addr()
	t.s.failures, t.s.avoid = 0, nil
	t.s.trace, t.s.unbelieved = trace.Trace{Began: t.now}, nil
	t.forget()
	// Nothing is to be heard until then.
	t.idle(Bound, t.renewAt(l))
}

// renewAt is T1, or somewhat later, so that clients that began together do not all
// come back together (RFC 2131, section 4.4.5); the zero time for what is for ever.
func (t *step) renewAt(l *Lease) time.Time {
	if l.Infinite() {
		return time.Time{}
	}
	return l.Renew.Add(t.s.random.Between(0, min(l.Rebind.Sub(l.Renew)/8, time.Minute)))
}

// State is one of the states of RFC 2131, figure 5, or Probing. Each is a wait:
// what is sent in it was sent on the way into it, or again since.
type State uint8

// The package's comment has a diagram of them.
const (
	initial    State = iota // about to send a DISCOVER: at the start, or after a back-off
	rebooting               // REQUEST for the address of Config.Last sent; waits for an ACK or a NAK
	selecting               // DISCOVER sent; waits for an OFFER, or for an ACK where rapid commit is on
	requesting              // REQUEST for an offered address sent; waits for the server's ACK or NAK
	probing                 // an ACK came; asks by ARP whether a host has the address (RFC 5227)
	Bound                   // holds a lease; waits for T1
	Renewing                // past T1: REQUEST sent to the server that gave the lease
	Rebinding               // past T2: REQUEST sent to any server
)

// String gives the name in RFC 2131's spelling.
func (s State) String() string {
	names := [...]string{"INIT", "REBOOTING", "SELECTING", "REQUESTING", "PROBING", "BOUND", "RENEWING", "REBINDING"}
	if int(s) < len(names) {
		return names[s]
	}
	return "state " + strconv.Itoa(int(s))
}
