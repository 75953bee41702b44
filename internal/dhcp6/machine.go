package dhcp6

import (
	"bytes"
	"fmt"
	"net/netip"
	"time"

	"github.com/insomniacslk/dhcp/dhcpv6"
	"github.com/insomniacslk/dhcp/rfc1035label"

	"github.com/tombolo-cni/tombolo/dhcpc"
	"github.com/tombolo-cni/tombolo/internal/trace"
)

// Machine is the client's state machine of RFC 8415 for one identity. It has no socket, no clock and no goroutine,
// and keeps nothing between calls. The progress of a client is a Session, which Step takes and returns.
type Machine struct {
	cfg *Config
}

// NewMachine returns a Machine with a copy of the configuration. If a field is not valid, the error matches
// tombolo.ErrInvalid.
func NewMachine(cfg *Config) (*Machine, error) {
	if err := cfg.check(); err != nil {
		return nil, err
	}
	return &Machine{cfg: new(*cfg)}, nil
}

// Session is the progress of one client. It is a value: a copy is a snapshot. Step changes neither its argument nor
// anything that the argument points to.
type Session struct {
	state  State
	random trace.Random // source of transaction identifiers and pauses
	now    time.Time    // the latest time passed to Step
	wake   time.Time
	listen time.Time
	trace  trace.Trace

	xid   uint32
	first time.Time     // when the first message of the exchange was sent
	sent  time.Time     // when the last message of the exchange was sent
	tries int           // messages sent in the exchange
	rt    time.Duration // the pause after the last message

	failures  int      // failures since the last lease; they lengthen the back-off
	best      *Lease6  // the best ADVERTISE so far
	rank      int      // the preference of best, negative for a server to avoid
	avoid     []string // servers whose ADVERTISE or REPLY led to no lease
	hint      netip.Addr
	requested *Lease6 // the lease being requested or checked
	lease     *Lease6 // the present lease
}

// State returns the state of the client.
func (s *Session) State() State { return s.state }

// Lease returns the present lease, or nil if there is none.
func (s *Session) Lease() *Lease6 { return s.lease }

// Wake returns the time to call Step again if no message comes before. The zero time means never.
func (s *Session) Wake() time.Time { return s.wake }

// Verdict is the result of duplicate address detection.
type Verdict uint8

// The results of duplicate address detection. Step ignores them in all states except CHECKING.
const (
	Unused Verdict = iota + 1 // no other host has the address
	InUse                     // another host has the address
)

// Event is the input of a Step. The zero Event means that only time has passed. Message is a received message, or nil.
// Step checks its bytes. Verdict is the answer to Output.Check. Step ignores the Verdict of an Event with a Message.
type Event struct {
	Message []byte
	Verdict Verdict
}

// Output is the result of a Step. It tells the caller the next actions.
type Output struct {
	// Send is a message to send now, or nil. If sending fails, continue as if the network had lost the message.
	Send []byte
	// Check is a lease whose address needs duplicate address detection, or nil. The caller adds the address to the link
	// and waits for the result. The Session then waits for an Event with a Verdict. A Session that still has another
	// lease waits only until that lease ends. Any other Session waits without a time limit.
	Check *Lease6
	// Bound is a lease that a server has just granted or renewed and that passed all checks, or nil.
	Bound *Lease6
	// Lost is a lease that has just ended, or nil. From now on nothing may use its address.
	Lost *Lease6
	// Information holds the options from the answer to an INFORMATION-REQUEST. It is nil otherwise.
	Information *Information
	// Err is the reason for a lost or refused lease, or nil. The Session continues and tries to get another lease.
	Err error
	// Listen is the time until which answers are expected. After it, or if it is the zero time, the caller may close
	// its sockets. It is never later than Session.Wake.
	Listen time.Time
}

// Start returns a Session without an address. seed is a random number. It makes transaction identifiers and pauses
// differ between clients.
func (m *Machine) Start(now time.Time, seed uint64) Session {
	return Session{
		state: initial, random: trace.Random(seed), now: now, wake: now, hint: m.cfg.Address,
		trace: trace.Trace{Began: now},
	}
}

// Inform returns a Session that requests only options, and no address.
func (m *Machine) Inform(now time.Time, seed uint64) Session {
	s := m.Start(now, seed)
	s.state = informing
	return s
}

// Restore returns a Session for a client that still has the lease l. The Session sends nothing until the lease is due
// for renewal. If the lease has run out, the first Step reports it as lost, and the Session requests its address again.
// If Obtained is in the future, the clock was set back, and the Session sends a REBIND at once, unless the lease never
// ends. An unusable lease is an error that matches tombolo.ErrInvalid.
func (m *Machine) Restore(now time.Time, seed uint64, l *Lease6) (Session, error) {

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
			// Move the times into the past by as much as the clock was set back. Otherwise the lease would last longer
			// than the server granted it.
			moved.Renew, moved.Rebind, moved.Expire = now, now, l.Expire.Add(-back)
			if !l.Preferred.IsZero() {
				moved.Preferred = l.Preferred.Add(-back)
			}
		}

		s.lease, s.wake = &moved, moved.Renew
	}

	return s, nil
}

// Step advances a Session to the time now and handles the event. It returns the new Session and the caller's next
// actions. Step may be called late: it then does the work that is due. If now is before the time of an earlier Step,
// the earlier time counts.
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

	t.out.Listen = s.listen
	return s, t.out
}

// step is a call of Step in progress. It works on its own copy of the Session.
type step struct {
	*Machine
	s   *Session
	now time.Time
	out Output
}

// timeUp does the work that is due in the present state.
func (t *step) timeUp() {
	switch t.s.state {
	case initial, soliciting:
		t.solicit()
	case requesting:
		t.requestingTimeUp()
	case checking:
		t.lose(dhcpc.ErrExpired) // the previous lease ended while a new address was checked
	case bound, renewing, rebinding:
		t.leaseTimeUp()
	case informing:
		t.inform()
	}
}

// receive passes a message to the handler of the present state, if the message is for this client.
func (t *step) receive(data []byte) {
	m, err := parse(data, t.cfg.IAID)
	if err != nil {
		t.note("no DHCPv6 message: " + err.Error())
		return
	}

	if why := t.whyForeign(m); why != "" {
		t.note(m.describe() + ": " + why)
		return
	}

	switch t.s.state {
	case soliciting:
		t.soliciting(m)
	case requesting:
		t.requesting(m)
	case renewing, rebinding:
		t.renewing(m)
	case informing:
		t.informing(m)
	default:
		t.note(m.describe() + ": nothing was asked")
	}
}

// whyForeign returns the reason why a message is not part of the client's exchange (RFC 8415, section 16). It returns
// "" if the message is part of the exchange.
func (t *step) whyForeign(m *message) string {
	switch {
	case m.kind != dhcpv6.MessageTypeAdvertise && m.kind != dhcpv6.MessageTypeReply:
		return "not a server's answer"
	case m.xid != t.s.xid:
		return "of another transaction"
	case len(m.server) < minDUID || len(m.server) > maxDUID:
		return fmt.Sprintf("a server identifier of %d bytes", len(m.server))
	case !bytes.Equal(m.client, t.cfg.DUID) && (len(m.client) > 0 || t.s.state != informing):
		return "for another client"
	}

	return ""
}

// isReplyFrom reports whether a message is a REPLY of the given server. It records a REPLY of another server for the
// error that Failure returns.
func (t *step) isReplyFrom(m *message, server dhcpc.Hex) bool {
	isReply, isAsked := m.kind == dhcpv6.MessageTypeReply, bytes.Equal(m.server, server)
	if isReply && !isAsked { // further ADVERTISEs are common, and not worth a note
		t.note(m.describe() + ": not the server that was asked, " + server.String())
	}
	return isReply && isAsked
}

// note records a received message, for the error that Failure returns.
func (t *step) note(what string) { t.s.trace.Heard.Add(what) }

// begin starts an exchange in the given state, with a new transaction identifier.
func (t *step) begin(state State) {
	t.s.state, t.s.tries, t.s.rt = state, 0, 0
	t.s.xid = uint32(t.s.random.Next()) & 0xffffff
	t.s.first = t.now
}

// request returns a message of the exchange that requests an address and further options. A nil server means all
// servers.
func (t *step) request(kind dhcpv6.MessageType, server dhcpc.Hex, a netip.Addr) *dhcpv6.Message {
	m := t.cfg.message(kind, t.s.xid, t.now.Sub(t.s.first), server, a)
	requestOptions(m)

	// The flag S asks the server to enter the address in the DNS.
	if name := t.cfg.HostName; name != "" {
		m.AddOption(&dhcpv6.OptFQDN{Flags: 1, DomainName: &rfc1035label.Labels{Labels: []string{name}}})
	}
	return m
}

// send sends the next message of the exchange, and sets the time of its retransmission (RFC 8415, section 15). The
// first pause is irt. Each further pause doubles, up to mrt. All pauses vary at random by up to a tenth. The exchange
// ends at the time end at the latest; the zero time means never.
func (t *step) send(m *dhcpv6.Message, irt, mrt time.Duration, end time.Time) {
	t.out.Send = m.ToBytes()
	t.s.trace.Sent.Add(m.MessageType.String())
	t.s.sent = t.now
	t.s.tries++
	rt := irt
	if t.s.tries > 1 {
		rt = min(2*t.s.rt, mrt)
	}

	lo := rt - rt/10
	if t.s.state == soliciting && t.s.tries == 1 {
		lo = rt // RFC 8415, section 18.2.1: never shorter
	}

	t.s.rt = t.s.random.Between(lo, rt+rt/10)
	t.s.wake = trace.Earliest(t.now.Add(t.s.rt), end)
	t.s.listen = trace.Earliest(t.s.wake, t.now.Add(answerWait))
}

// answerWait is the longest time that a socket stays open for the answer to one message. Messages of a renewal may be
// ten minutes apart, so without this limit the socket would stay open throughout.
const answerWait = 15 * time.Second

// idle enters a state in which the client expects no message until the time wake. The zero time means never.
func (t *step) idle(state State, wake time.Time) {
	t.s.state, t.s.wake, t.s.listen = state, wake, time.Time{}
}

// startOver returns to INIT after a failure, with a pause that grows with each failure.
func (t *step) startOver(err error) {
	t.out.Err, t.s.trace.Last = err, err
	pause := trace.BackOff(t.s.failures)
	t.s.failures++
	t.s.requested, t.s.best = nil, nil
	t.idle(initial, t.now.Add(pause))
}

// shun records that a server's ADVERTISE or REPLY did not lead to a lease, so that the client prefers other servers
// until the next lease.
func (t *step) shun(server dhcpc.Hex) { t.s.avoid = trace.Shun(t.s.avoid, string(server)) }

// lose ends the present lease, reports it in Output.Lost with the reason why, and begins to look for another lease.
func (t *step) lose(why error) {
	l := t.s.lease
	t.out.Lost, t.s.lease = l, nil
	t.s.trace = trace.Trace{Began: t.now}
	t.s.failures, t.s.hint = 0, l.Address
	t.startOver(fmt.Errorf("%w: %s", why, l.Address))
	t.s.wake = t.now
}

// take handles a lease that a server granted. It declines a lease that Config.Refuse rejects. With
// Config.DetectConflicts, it asks the caller to check an address that the client does not have yet. In all other
// cases, it begins to use the lease.
func (t *step) take(l *Lease6) {
	if refused := t.refused(l); refused != nil {
		t.decline(l, fmt.Errorf("%w: %s: %w", dhcpc.ErrRefused, l.Address, refused))
		return
	}

	held := t.s.lease
	if held != nil && held.Address == l.Address || !t.cfg.DetectConflicts {
		t.bind(l)
		return
	}

	t.s.requested, t.out.Check = l, l
	t.idle(checking, time.Time{})
	if held != nil {
		t.s.wake = held.Expire
	}
}

// refused returns Config.Refuse's reason to refuse a lease, or nil if the lease is acceptable.
func (t *step) refused(l *Lease6) error {
	if t.cfg.Refuse == nil {
		return nil
	}
	return t.cfg.Refuse(l, t.s.lease)
}

// checked declines the address if another host has it, according to duplicate address detection. Otherwise it begins to
// use the lease.
func (t *step) checked(v Verdict) {
	l := t.s.requested
	if v == InUse {
		t.decline(l, fmt.Errorf("%w: %s", dhcpc.ErrDeclined, l.Address))
		return
	}
	t.bind(l)
}

// bind makes l the present lease and reports it in Output.Bound. A present lease of another address is reported as
// lost. Nothing is due until T1.
func (t *step) bind(l *Lease6) {
	if held := t.s.lease; held != nil && held.Address != l.Address {
		t.out.Lost = held
	}
	t.out.Bound, t.s.lease, t.s.hint = l, l, l.Address
	t.s.failures, t.s.avoid, t.s.requested, t.s.best = 0, nil, nil, nil
	t.s.trace = trace.Trace{Began: t.now}
	t.idle(bound, l.Renew)
}

// Failure returns an error with the messages that the Session sent and received, for a caller that gives up because
// of err. op is the failed operation, as a verb and an object. The error matches err. It also matches ErrNAK,
// ErrDeclined or ErrRefused of package dhcpc if the last failure was a server's refusal, a conflict or a refusal by
// Config.Refuse.
func (s *Session) Failure(op string, now time.Time, err error) error {
	return s.trace.Failure(op, now, err, "nothing came of",
		"does a DHCPv6 server serve this network, and do bridge and firewall let UDP ports 546 and 547 pass?")
}

// State is the state of a Session. The package comment has a diagram. Callers need to know only Informed.
type State uint8

// In each state except Informed the client waits: for an answer, for a time or, in checking, for the caller's Verdict.
// A state that waits for a server begins with a message, which the client may repeat.
const (
	initial    State = iota // about to send a SOLICIT, at the start or after a back-off
	soliciting              // SOLICIT sent; waits for ADVERTISEs or, with rapid commit, for a REPLY
	requesting              // REQUEST sent to the server of the best ADVERTISE, or to one that forgot the lease
	checking                // REPLY received; waits until the caller knows whether the address is in use
	bound                   // has a lease; waits for T1
	renewing                // after T1: RENEW sent to the server of the lease
	rebinding               // after T2: REBIND sent to all servers; also the pause after a failed REQUEST
	informing               // INFORMATION-REQUEST sent; needs options and no address
	Informed                // has the options, and is done
)
