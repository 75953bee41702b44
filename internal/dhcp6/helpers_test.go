package dhcp6

import (
	"net"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/insomniacslk/dhcp/dhcpv6"
	"github.com/insomniacslk/dhcp/iana"
	"github.com/insomniacslk/dhcp/rfc1035label"

	"github.com/tombolo-cni/tombolo/dhcpc"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
)

func TestMain(m *testing.M) { nstest.Main(m) }

func ownDUID() dhcpc.Hex    { return DUID([16]byte{7}) }
func serverDUID() dhcpc.Hex { return dhcpc.Hex{0, 3, 0, 1, 2, 0, 0, 0, 0, 1} }
func rogueDUID() dhcpc.Hex  { return dhcpc.Hex{0, 3, 0, 1, 2, 0, 0, 0, 0, 66} }

const ownIAID = 0x01020304

func clientIP() netip.Addr { return netip.MustParseAddr("2001:db8::7") }
func otherIP() netip.Addr  { return netip.MustParseAddr("2001:db8::8") }
func epoch() time.Time     { return time.Date(2026, 5, 1, 12, 0, 0, 0, time.UTC) }

// grant is an address in an IA_NA, with its lifetimes.
type grant struct {
	addr             netip.Addr
	preferred, valid time.Duration
}

// reply is what a server of these tests says, changed by a test where it is to be nasty.
type reply struct {
	kind               dhcpv6.MessageType
	xid                dhcpv6.TransactionID
	client, server     dhcpc.Hex
	iaid               [4]byte
	t1, t2             time.Duration
	addrs              []grant
	inIA, inAddr, top  *dhcpv6.OptStatusCode
	noIA, rapid        bool
	more               []dhcpv6.Option
	preference         int
	preferenceIsToldOf bool
}

func status(c iana.StatusCode) *dhcpv6.OptStatusCode {
	return &dhcpv6.OptStatusCode{StatusCode: c, StatusMessage: "so it is"}
}

func answerTo(m *dhcpv6.Message, kind dhcpv6.MessageType, change ...func(*reply)) []byte {
	r := &reply{
		kind: kind, xid: m.TransactionID, client: ownDUID(), server: serverDUID(), iaid: [4]byte{1, 2, 3, 4},
		t1: 1000 * time.Second, t2: 1600 * time.Second,
		addrs: []grant{{clientIP(), 2000 * time.Second, 3000 * time.Second}},
		more: []dhcpv6.Option{
			dhcpv6.OptDNS(net.ParseIP("2001:db8::53"), net.ParseIP("fe80::53")),
			dhcpv6.OptDomainSearchList(&rfc1035label.Labels{Labels: []string{"example.org", "bad\nname"}}),
		},
	}
	for _, f := range change {
		f(r)
	}
	return r.bytes()
}

func (r *reply) bytes() []byte {
	m := &dhcpv6.Message{MessageType: r.kind, TransactionID: r.xid}
	if r.client != nil {
		m.AddOption(&dhcpv6.OptionGeneric{OptionCode: dhcpv6.OptionClientID, OptionData: r.client})
	}
	if r.server != nil {
		m.AddOption(&dhcpv6.OptionGeneric{OptionCode: dhcpv6.OptionServerID, OptionData: r.server})
	}
	if r.top != nil {
		m.AddOption(r.top)
	}
	if r.rapid {
		m.AddOption(&dhcpv6.OptionGeneric{OptionCode: dhcpv6.OptionRapidCommit})
	}
	if r.preferenceIsToldOf {
		m.AddOption(dhcpv6.OptPreference(uint8(r.preference)))
	}
	if !r.noIA {
		ia := &dhcpv6.OptIANA{IaId: r.iaid, T1: r.t1, T2: r.t2}
		for _, a := range r.addrs {
			one := &dhcpv6.OptIAAddress{IPv6Addr: a.addr.AsSlice(), PreferredLifetime: a.preferred, ValidLifetime: a.valid}
			if r.inAddr != nil {
				one.Options.Add(r.inAddr)
			}
			ia.Options.Add(one)
		}
		if r.inIA != nil {
			ia.Options.Add(r.inIA)
		}
		m.AddOption(ia)
	}
	for _, o := range r.more {
		m.AddOption(o)
	}
	return m.ToBytes()
}

func honest(change ...func(*reply)) func(*dhcpv6.Message) [][]byte {
	return func(m *dhcpv6.Message) [][]byte {
		switch m.MessageType {
		case dhcpv6.MessageTypeSolicit:
			return [][]byte{answerTo(m, dhcpv6.MessageTypeAdvertise, change...)}
		case dhcpv6.MessageTypeRequest, dhcpv6.MessageTypeRenew, dhcpv6.MessageTypeRebind, dhcpv6.MessageTypeDecline, dhcpv6.MessageTypeInformationRequest:
			return [][]byte{answerTo(m, dhcpv6.MessageTypeReply, change...)}
		}
		return nil
	}
}

// world is a clock and a network with one scripted server on it, and one client. Time passes only while the
// client waits.
type world struct {
	t       testing.TB
	m       *Machine
	now     time.Time
	timeout time.Duration
	serve   func(*dhcpv6.Message) [][]byte // nil: nobody is there
	log     []string                       // what was sent
	sent    []*dhcpv6.Message
	at      []time.Duration // when each was, since the epoch
	queue   [][]byte
	inUse   map[netip.Addr]bool
}

func newWorld(t testing.TB, serve func(*dhcpv6.Message) [][]byte, change ...func(*Config)) *world {
	t.Helper()
	w := &world{t: t, now: epoch(), timeout: 30 * time.Second, serve: serve, inUse: map[netip.Addr]bool{}}
	cfg := &Config{DUID: ownDUID(), IAID: ownIAID, HostName: "pod-7", DetectConflicts: true}
	for _, f := range change {
		f(cfg)
	}
	w.m = must.Of(NewMachine(cfg)).Get(t)
	return w
}

// run takes a session's steps until done, or for so long.
func (w *world) run(s Session, timeout time.Duration, done func(Output) bool) error {
	w.t.Helper()
	var e Event
	for limit := w.now.Add(timeout); ; {
		next, out := w.m.Step(s, w.now, e)
		s, e = next, Event{}
		w.say(out.Send)
		switch {
		case done(out):
			return nil
		case out.Check != nil:
			e.Verdict = Unused
			if w.inUse[out.Check.Address] {
				e.Verdict = InUse
			}
		case len(w.queue) > 0 && out.Listen.After(w.now):
			e.Message, w.queue = w.queue[0], w.queue[1:]
		case s.wake.IsZero():
			w.t.Fatalf("waits for ever, after %v", w.log)
		case s.wake.After(w.now):
			w.now = s.wake
			if w.now.After(limit) {
				w.now = limit
				return s.Failure("run", w.now, dhcpc.ErrTimeout)
			}
		}
	}
}

func (w *world) say(data []byte) {
	w.t.Helper()
	if data == nil {
		return
	}
	m := must.Of(dhcpv6.MessageFromBytes(data)).Get(w.t)
	w.log, w.sent, w.at, w.queue = append(w.log, m.MessageType.String()), append(w.sent, m), append(w.at, w.now.Sub(epoch())), nil
	if w.serve != nil {
		w.queue = w.serve(m)
	}
}

func (w *world) tryAcquire() (l *Lease6, err error) {
	w.t.Helper()
	err = w.run(w.m.Start(w.now, 1), w.timeout, func(o Output) bool { l = o.Bound; return l != nil })
	return l, err
}

func (w *world) acquire() *Lease6 {
	w.t.Helper()
	return must.Of(w.tryAcquire()).Get(w.t)
}

// keep keeps a lease until stop says that it is enough, and gives what came of it.
func (w *world) keep(l *Lease6, stop func() bool) []string {
	w.t.Helper()
	s := must.Of(w.m.Restore(w.now, 1, l)).Get(w.t)
	var applied []string
	held := l.Address.String()
	apply := func(next string) { applied, held = append(applied, held+" > "+next), next }
	must.Succeed(w.t, w.run(s, 1000*time.Hour, func(o Output) bool {
		if o.Lost != nil {
			apply("-")
		}
		if o.Bound != nil {
			apply(o.Bound.Address.String())
		}
		return stop()
	}))
	return applied
}

// sent ends a world when so many messages were sent, and all has been heard.
func (w *world) hasSent(n int) func() bool {
	return func() bool { return len(w.log) >= n && len(w.queue) == 0 }
}

// asks ends a world when a message of a kind was sent.
func (w *world) asks(kind string) func() bool {
	return func() bool { return slices.Contains(w.log, kind) }
}
