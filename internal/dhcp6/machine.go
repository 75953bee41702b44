package dhcp6

import (
	"bytes"
	"fmt"
	"net/netip"
	"strconv"
	"time"

	"github.com/insomniacslk/dhcp/dhcpv6"

	"github.com/tombolo-cni/tombolo/dhcpc"
	"github.com/tombolo-cni/tombolo/internal/trace"
)

// Machine is the client's side of RFC 8415 for one identity. It has no socket, no clock and no
// goroutine, and keeps nothing between calls: where the client stands is a Session, which Step
// takes and gives back.
type Machine struct {
	cfg *Config
}

// NewMachine checks a configuration.
func NewMachine(cfg *Config) (*Machine, error) {
	c, err := cfg.own()
	if err != nil {
		return nil, err
	}
	return &Machine{cfg: c}, nil
}

// Session is where a client stands. It is a value: a copy is a snapshot, and Step changes neither
// its argument nor what that points to.
type Session struct {
	state  State
	random trace.Random // transaction identifiers and pauses come from it
	now    time.Time    // the latest that Step was told
	wake   time.Time
	listen time.Time
	trace  trace.Trace

	xid   uint32
	first time.Time     // when the exchange's first message was sent
	sent  time.Time     // when its last one was
	tries int           // messages of the exchange
	rt    time.Duration // the pause after the last of them

	solMaxRT, infMaxRT time.Duration

	failures int      // since the last lease: they make the back-off longer
	best     *Lease   // the best ADVERTISE so far
	rank     int      // its preference, less for a server to avoid
	avoid    []string // servers that advertised and then refused, or fell silent
	hint     netip.Addr
	asked    *Lease // what is being requested, checked or declined
	lease    *Lease // what is held
}

// State gives the state.
func (s *Session) State() State { return s.state }

// Lease gives the lease that is held, else nil.
func (s *Session) Lease() *Lease { return s.lease }

// Wake gives the time of the next Step, as the last Output did.
func (s *Session) Wake() time.Time { return s.wake }

// Verdict is what duplicate address detection found.
type Verdict uint8

// In CHECKING only; elsewhere they mean nothing.
const (
	Unused Verdict = iota + 1 // the address is the client's
	InUse                     // another host has it
)

// Event is what a Session is told; the zero value is that time has passed. Step checks what was received: it may be
// any bytes.
type Event struct {
	Message []byte
	Verdict Verdict
}

// Output is what a Step asks of its caller.
type Output struct {
	// Send is to be sent now. If it cannot be, let time pass: it is sent again.
	Send []byte
	// Check is a lease whose address is to be looked for on the link. The Session waits, for ever if
	// need be, for an Event with a Verdict.
	Check *Lease
	// Bound is a lease that a server granted or renewed just now, and that was checked.
	Bound *Lease
	// Lost is a lease that has ended: nothing may use its address any more.
	Lost *Lease
	// Information is what an INFORMATION-REQUEST brought.
	Information *Information
	// Err is why a lease was lost or refused. The Session goes on and tries to get another.
	Err error
	// Wake is when to call Step again if nothing comes before; the zero time: never.
	Wake time.Time
	// Listen is until when answers are expected: after that, and where it is the zero time,
	// sockets need not stay open. It is not later than Wake.
	Listen time.Time
}

// Start begins a Session without an address. The seed makes transaction identifiers and pauses
// differ between clients: a random number.
func (m *Machine) Start(now time.Time, seed uint64) Session {
	return Session{state: initial, random: trace.Random(seed), now: now, wake: now, hint: m.cfg.Address, trace: trace.Trace{Began: now}}
}

// Inform begins a Session that asks for options and no address.
func (m *Machine) Inform(now time.Time, seed uint64) Session {
	s := m.Start(now, seed)
	s.state = informing
	return s
}

// Restore takes up a lease whose address this client still has: it is renewed when it is due,
// and nothing is sent before. A lease that has run out is lost at the first Step, and its address
// asked for. For a lease of the future any server is asked at once: the clock was set. The
// error matches tombolo.ErrInvalid.
func (m *Machine) Restore(now time.Time, seed uint64, l *Lease) (Session, error) {
	if err := l.Validate(); err != nil {
		return Session{}, err
	}
	s := m.Start(now, seed)
	s.hint, s.lease, s.state, s.wake = l.Address, l, bound, l.Renew
	if now.Before(l.Obtained) {
		moved := *l
		back := l.Obtained.Sub(now)
		moved.Obtained = now
		if !l.Infinite() {
			// It lasts no longer than it was granted for.
			moved.Renew, moved.Rebind, moved.Expire = now, now, l.Expire.Add(-back)
			if !l.Preferred.IsZero() {
				moved.Preferred = l.Preferred.Add(-back)
			}
		}
		s.lease, s.wake = &moved, moved.Renew
	}
	return s, nil
}

// Step tells a Session that time has passed and what has happened. Times may come late: Step then does all that is
// due. A time before that of an earlier Step is taken for that one.
func (m *Machine) Step(s Session, now time.Time, e Event) (Session, Output) {
	if now.Before(s.now) {
		now = s.now
	}
	s.now = now
	t := step{Machine: m, s: &s, now: now}
	switch {
	case e.Message != nil:
		t.receive(e.Message)
	case e.Verdict != 0 && s.state == checking:
		t.checked(e.Verdict)
	}
	if !s.wake.IsZero() && !now.Before(s.wake) && t.out.Send == nil && t.out.Bound == nil && t.out.Check == nil {
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
		t.solicit()
	case soliciting:
		t.solicitingTimeUp()
	case requesting:
		t.requestingTimeUp()
	case checking:
		t.lose(dhcpc.ErrExpired) // the lease before, of which a server had given another address
	case bound, renewing, rebinding:
		t.leaseTimeUp()
	case declining:
		t.decliningTimeUp()
	case informing:
		t.inform()
	case Confirming:
		t.confirm()
	}
}

func (t *step) receive(data []byte) {
	m, err := parse(data, t.cfg.IAID)
	if err != nil {
		t.note("no DHCPv6 message: " + err.Error())
		return
	}
	if why := t.foreign(m); why != "" {
		t.note(m.describe() + ": " + why)
		return
	}
	t.s.solMaxRT = m.maxRT(dhcpv6.OptionSolMaxRT, t.s.solMaxRT)
	t.s.infMaxRT = m.maxRT(dhcpv6.OptionInfMaxRT, t.s.infMaxRT)
	switch t.s.state {
	case soliciting:
		t.soliciting(m)
	case requesting:
		t.requesting(m)
	case renewing, rebinding:
		t.renewing(m)
	case declining:
		if t.fromAsked(m, t.s.asked.Server) {
			t.startOver(nil)
		}
	case informing:
		t.informing(m)
	case Confirming:
		t.confirming(m)
	default:
		t.note(m.describe() + ": nothing was asked")
	}
}

// foreign says why a message is none for this client, or none of its exchange: RFC 8415, section 16.
func (t *step) foreign(m *message) string {
	switch {
	case m.kind != dhcpv6.MessageTypeAdvertise && m.kind != dhcpv6.MessageTypeReply:
		return "not a server's answer"
	case m.xid != t.s.xid:
		return "of another transaction"
	case len(m.server) < minDUID || len(m.server) > maxDUID:
		return fmt.Sprintf("a server identifier of %d bytes", len(m.server))
	case len(m.client) == 0 && t.s.state == informing:
		return ""
	case !bytes.Equal(m.client, t.cfg.DUID):
		return "for another client"
	}
	return ""
}

// fromAsked says whether a message is the REPLY of the server that was asked.
func (t *step) fromAsked(m *message, server dhcpc.Hex) bool {
	switch {
	case m.kind != dhcpv6.MessageTypeReply:
		return false // more ADVERTISEs are common, and no news
	case !bytes.Equal(m.server, server):
		t.note(m.describe() + ": not the server that was asked, " + server.String())
		return false
	}
	return true
}

// note counts something heard, for the error if no lease comes of it.
func (t *step) note(what string) { t.s.trace.Heard.Add(what) }

// begin begins an exchange, with a transaction identifier of its own.
func (t *step) begin(state State) {
	t.s.state, t.s.tries, t.s.rt = state, 0, 0
	t.s.xid = uint32(t.s.random.Next()) & 0xffffff
	t.s.first = t.now
}

// message begins a message of the exchange.
func (t *step) message(kind dhcpv6.MessageType) *dhcpv6.Message {
	return t.cfg.write(kind, t.s.xid, t.now.Sub(t.s.first))
}

// send sends the exchange's next message, and waits for an answer as RFC 8415, section 15, has
// it: first irt, and then twice the pause before, up to mrt, all a tenth more or less. end is
// when the exchange is over at the latest, the zero time if never.
func (t *step) send(m *dhcpv6.Message, irt, mrt time.Duration, end time.Time) {
	t.out.Send = m.ToBytes()
	t.s.trace.Sent.Add(m.MessageType.String())
	t.s.sent = t.now
	t.s.tries++
	rt := irt
	if t.s.tries > 1 {
		rt = 2 * t.s.rt
	}
	if mrt > 0 && rt > mrt {
		rt = mrt
	}
	lo := rt - rt/10
	if t.s.state == soliciting && t.s.tries == 1 {
		lo = rt // RFC 8415, section 18.2.1: not less
	}
	t.s.rt = t.s.random.Between(lo, rt+rt/10)
	t.s.wake = t.now.Add(t.s.rt)
	if !end.IsZero() && t.s.wake.After(end) {
		t.s.wake = end
	}
	t.s.listen = t.s.wake
	if enough := t.now.Add(answerWait); enough.Before(t.s.listen) {
		t.s.listen = enough
	}
}

// answerWait is how long an answer is waited for with an open socket: renewals are minutes apart.
const answerWait = 15 * time.Second

// idle goes to a state in which nothing is waited for but the time.
func (t *step) idle(state State, wake time.Time) {
	t.s.state, t.s.wake, t.s.listen = state, wake, time.Time{}
}

// startOver goes back to INIT after a failure, for a while that grows with each. The error is
// nil where it has been told.
func (t *step) startOver(err error) {
	if err != nil {
		t.out.Err, t.s.trace.Last = err, err
	}
	pause := trace.BackOff(t.s.failures)
	t.s.failures++
	t.s.asked, t.s.best = nil, nil
	t.idle(initial, t.now.Add(pause))
}

// shun remembers that a server's ADVERTISE led to nothing.
func (t *step) shun(server dhcpc.Hex) { t.s.avoid = trace.Shun(t.s.avoid, string(server)) }

// lose ends the lease that is held, and looks for another.
func (t *step) lose(why error) {
	l := t.s.lease
	t.out.Lost, t.s.lease = l, nil
	t.s.trace = trace.Trace{Began: t.now}
	t.s.failures = 0
	if l == nil {
		t.startOver(why)
		return
	}
	t.s.hint = l.Address
	t.startOver(fmt.Errorf("%w: %s", why, l.Address))
	t.s.wake = t.now
}

// take goes on with a lease that was granted: its address is looked for, unless it is held already.
func (t *step) take(l *Lease) {
	if refused := t.refused(l); refused != nil {
		t.decline(l, fmt.Errorf("%w: %s: %w", dhcpc.ErrRefused, l.Address, refused))
		return
	}
	held := t.s.lease
	if held != nil && held.Address == l.Address || !t.cfg.DetectConflicts {
		t.bind(l)
		return
	}
	t.s.asked, t.out.Check = l, l
	t.idle(checking, time.Time{})
	if held != nil {
		t.s.wake = held.Expire
	}
}

// refused is the caller's word on a lease, nil if it may be taken.
func (t *step) refused(l *Lease) error {
	if t.cfg.Refuse == nil {
		return nil
	}
	return t.cfg.Refuse(l, t.s.lease)
}

func (t *step) checked(v Verdict) {
	l := t.s.asked
	if v == InUse {
		t.decline(l, fmt.Errorf("%w: %s", dhcpc.ErrDeclined, l.Address))
		return
	}
	t.bind(l)
}

// bind takes a lease: the session's work is done until T1.
func (t *step) bind(l *Lease) {
	if held := t.s.lease; held != nil && held.Address != l.Address {
		t.out.Lost = held
	}
	t.out.Bound, t.s.lease, t.s.hint = l, l, l.Address
	t.s.failures, t.s.avoid, t.s.asked, t.s.best = 0, nil, nil, nil
	t.s.trace = trace.Trace{Began: t.now}
	t.idle(bound, l.Renew)
}

// Failure makes an error of what a Session sent and heard so far, for a caller that gives up at a time, because
// of err. It matches err, and ErrNAK, ErrDeclined or ErrRefused of package dhcpc if such a thing happened last.
func (s *Session) Failure(op string, now time.Time, err error) error {
	return s.trace.Failure(op, now, err, "nothing came of",
		"does a DHCPv6 server serve this network, and do bridge and firewall let UDP ports 546 and 547 pass?")
}

// State is where a Session stands. The package's comment has a diagram; those that have a name here
// are what a caller may have to know.
type State uint8

// Each is a wait: what is sent in it was sent on the way into it, or again since.
const (
	initial    State = iota // about to send a SOLICIT: at the start, or after a back-off
	soliciting              // SOLICIT sent; waits for ADVERTISEs, or for a REPLY where rapid commit is on
	requesting              // REQUEST sent to the server whose ADVERTISE was the best
	checking                // a REPLY came; waits until its caller has looked whether the address is in use
	bound                   // holds a lease; waits for T1
	renewing                // past T1: RENEW sent to the server that gave the lease
	rebinding               // past T2: REBIND sent to any server
	declining               // DECLINE, or RELEASE, of an address that another host has, or that Config.Refuse refused
	informing               // INFORMATION-REQUEST sent: wants options and no address
	Informed                // has them, and is done
	Confirming              // holds a lease; asks whether its address fits the link: see Machine.Confirm
)

// String gives the name in capitals.
func (s State) String() string {
	names := [...]string{"INIT", "SOLICITING", "REQUESTING", "CHECKING", "BOUND", "RENEWING", "REBINDING", "DECLINING", "INFORMING", "INFORMED", "CONFIRMING"}
	if int(s) < len(names) {
		return names[s]
	}
	return "state " + strconv.Itoa(int(s))
}
