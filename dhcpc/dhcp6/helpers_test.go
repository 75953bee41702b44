package dhcp6

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"os"
	"testing"
	"time"

	"github.com/insomniacslk/dhcp/dhcpv6"
	"github.com/insomniacslk/dhcp/iana"
	"github.com/insomniacslk/dhcp/rfc1035label"

	"github.com/tombolo-cni/tombolo/dhcpc"
	"github.com/tombolo-cni/tombolo/internal/nstest"
)

func TestMain(m *testing.M) { nstest.Main(m) }

func ownDUID() dhcpc.Hex    { return DUID([16]byte{7}) }
func serverDUID() dhcpc.Hex { return dhcpc.Hex{0, 3, 0, 1, 2, 0, 0, 0, 0, 1} }
func rogueDUID() dhcpc.Hex  { return dhcpc.Hex{0, 3, 0, 1, 2, 0, 0, 0, 0, 66} }

const ownIAID = 0x01020304

func clientIP() netip.Addr { return netip.MustParseAddr("2001:db8::7") }
func otherIP() netip.Addr  { return netip.MustParseAddr("2001:db8::8") }
func epoch() time.Time     { return time.Date(2026, 5, 1, 12, 0, 0, 0, time.UTC) }

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

// answerTo is an honest server's answer.
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

// honest answers everything as it should be.
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

// world is a clock and a network with one scripted server on it. Time passes only while somebody waits.
type world struct {
	t     testing.TB
	now   time.Time
	serve func(*dhcpv6.Message) [][]byte // nil: nobody is there
	queue [][]byte
	log   []string // what was sent
	sent  []*dhcpv6.Message
	at    []time.Duration // when each was, since the epoch
	open  int
	inUse map[netip.Addr]bool
	stop  func(w *world) bool
	end   context.CancelFunc
}

func newWorld(t testing.TB, serve func(*dhcpv6.Message) [][]byte, change ...func(*Config)) (*world, *Client) {
	t.Helper()
	w := &world{t: t, now: epoch(), serve: serve, inUse: map[netip.Addr]bool{}}
	cfg := &Config{DUID: ownDUID(), IAID: ownIAID, Clock: w, Dial: w.dial, HostName: "pod-7",
		InUse: func(_ context.Context, l *Lease) (bool, error) { return w.inUse[l.Address], nil }}
	for _, f := range change {
		f(cfg)
	}
	c, err := New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if w.open != 0 {
			t.Errorf("%d transports left open: %v", w.open, w.log)
		}
	})
	return w, c
}

func (w *world) Now() time.Time { return w.now }

func (w *world) Wait(ctx context.Context, until time.Time) error {
	if w.stop != nil && w.stop(w) {
		w.end()
	}
	if ctx.Err() != nil {
		return ctx.Err()
	}
	if until.IsZero() {
		w.t.Fatalf("waits for ever, after %v", w.log)
	}
	if until.After(w.now) {
		w.now = until
	}
	return nil
}

func (w *world) dial(context.Context) (Transport, error) {
	w.open++
	w.queue = nil
	return &line{w}, nil
}

type line struct{ *world }

func (l *line) Send(_ context.Context, data []byte) error {
	m, err := dhcpv6.MessageFromBytes(data)
	if err != nil {
		return err
	}
	l.log, l.sent, l.at = append(l.log, m.MessageType.String()), append(l.sent, m), append(l.at, l.now.Sub(epoch()))
	if l.serve != nil {
		l.queue = append(l.queue, l.serve(m)...)
	}
	return nil
}

func (l *line) Receive(ctx context.Context, until time.Time) ([]byte, error) {
	if len(l.queue) > 0 {
		p := l.queue[0]
		l.queue = l.queue[1:]
		return p, nil
	}
	if err := l.Wait(ctx, until); err != nil {
		return nil, err
	}
	return nil, os.ErrDeadlineExceeded
}

func (l *line) Close() error {
	l.open--
	return nil
}

// keep has a client keep a lease until stop says that it is enough, and gives what was applied.
func (w *world) keep(c *Client, l *Lease, stop func(*world) bool) []string {
	w.t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	w.stop, w.end = stop, cancel
	var applied []string
	err := c.Run(ctx, l, func(old, next *Lease) error {
		text := func(l *Lease) string {
			if l == nil {
				return "-"
			}
			return l.Address.String()
		}
		applied = append(applied, text(old)+" > "+text(next))
		return nil
	})
	if !errors.Is(err, context.Canceled) {
		w.t.Fatalf("Run: %v", err)
	}
	w.stop = nil
	return applied
}

// sentBy ends a world when so many messages were sent.
func sentBy(n int) func(*world) bool { return func(w *world) bool { return len(w.log) >= n } }
