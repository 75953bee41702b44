package dhcp6

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/insomniacslk/dhcp/dhcpv6"
	"github.com/insomniacslk/dhcp/iana"

	"github.com/tombolo-cni/tombolo/dhcpc"
)

// withPrefix has a server delegate prefixes besides, and a test change that.
func withPrefix(change func(pd *dhcpv6.OptIAPD), prefixes ...*dhcpv6.OptIAPrefix) func(*reply) {
	return func(r *reply) {
		pd := &dhcpv6.OptIAPD{IaId: r.iaid, T1: 900 * time.Second, T2: 1500 * time.Second}
		for _, p := range prefixes {
			pd.Options.Add(p)
		}
		if change != nil {
			change(pd)
		}
		r.more = append(slices.Clip(r.more), pd)
	}
}

func prefix(text string, preferred, valid time.Duration) *dhcpv6.OptIAPrefix {
	ip, p, err := net.ParseCIDR(text)
	if err != nil {
		panic(err)
	}
	return &dhcpv6.OptIAPrefix{PreferredLifetime: preferred, ValidLifetime: valid, Prefix: &net.IPNet{IP: ip, Mask: p.Mask}}
}

func good() *dhcpv6.OptIAPrefix { return prefix("2001:db8:7::/56", 1800*time.Second, 2500*time.Second) }

func wantsPrefix(c *Config) { c.PrefixLength = 56 }

// asksFor gives the prefix of a message's IA_PD.
func asksFor(t *testing.T, m *dhcpv6.Message) string {
	t.Helper()
	pd := m.Options.OneIAPD()
	if pd == nil || pd.IaId != [4]byte{1, 2, 3, 4} || len(pd.Options.Prefixes()) != 1 {
		t.Fatalf("%s: %v", m.MessageType, pd)
	}
	return pd.Options.Prefixes()[0].Prefix.String()
}

func TestAPrefixIsLeasedWithTheAddress(t *testing.T) {
	w, c := newWorld(t, honest(withPrefix(nil, good())), wantsPrefix)
	l := acquire(t, c)
	// The times are those of whichever is shorter.
	if l.Prefix.String() != "2001:db8:7::/56" || l.Address != clientIP() || l.Renew.Sub(l.Obtained) != 900*time.Second ||
		l.Rebind.Sub(l.Obtained) != 1500*time.Second || l.Preferred.Sub(l.Obtained) != 1800*time.Second || l.Expire.Sub(l.Obtained) != 2500*time.Second {
		t.Errorf("lease %+v", l)
	}
	if a, b := asksFor(t, w.sent[0]), asksFor(t, w.sent[1]); a != "::/56" || b != "2001:db8:7::/56" {
		t.Errorf("asked for %s, then %s", a, b)
	}
	if got := w.keep(c, l, sentBy(3)); len(got) != 1 || asksFor(t, w.sent[2]) != "2001:db8:7::/56" || w.log[2] != "RENEW" {
		t.Errorf("applied %q, sent %v", got, w.log)
	}
	data, err := Release(l, 7)
	if err != nil {
		t.Fatal(err)
	}
	m, err := dhcpv6.MessageFromBytes(data)
	if err != nil || asksFor(t, m) != "2001:db8:7::/56" || m.Options.OneIANA() == nil {
		t.Errorf("%v, %v", m, err)
	}
	if w, c := newWorld(t, honest(withPrefix(nil, good()))); acquire(t, c).Prefix.IsValid() || w.sent[0].Options.OneIAPD() != nil {
		t.Error("a prefix that nobody asked for")
	}
	for _, bits := range []int{-1, 128} {
		if _, err := NewMachine(&Config{DUID: ownDUID(), PrefixLength: bits}); !errors.Is(err, dhcpc.ErrInvalid) {
			t.Errorf("%d bits: %v", bits, err)
		}
	}
}

// What a server may get wrong about prefixes, and the one beside it is taken.
func nastyPrefixes() map[string]func(*reply) {
	only := func(p *dhcpv6.OptIAPrefix) func(*reply) { return withPrefix(nil, p) }
	return map[string]func(*reply){
		"no IA_PD":                        func(*reply) {},
		"no prefix":                       withPrefix(nil),
		"another IAID":                    withPrefix(func(pd *dhcpv6.OptIAPD) { pd.IaId[0]++ }, good()),
		"T1 after T2":                     withPrefix(func(pd *dhcpv6.OptIAPD) { pd.T1 = time.Hour }, good()),
		"NoPrefixAvail":                   withPrefix(func(pd *dhcpv6.OptIAPD) { pd.Options.Add(status(iana.StatusNoPrefixAvail)) }),
		"NoPrefixAvail and a prefix":      withPrefix(func(pd *dhcpv6.OptIAPD) { pd.Options.Add(status(iana.StatusNoPrefixAvail)) }, good()),
		"no time":                         only(prefix("2001:db8:7::/56", 0, 0)),
		"preferred for longer than valid": only(prefix("2001:db8:7::/56", time.Hour, time.Minute)),
		"all of IPv6":                     only(prefix("::/0", time.Hour, time.Hour)),
		"the whole Internet":              only(prefix("2000::/3", time.Hour, time.Hour)),
		"half of IPv6":                    only(prefix("::/1", time.Hour, time.Hour)),
		"one address":                     only(prefix("2001:db8::9/128", time.Hour, time.Hour)),
		"the links' own":                  only(prefix("fe80::/64", time.Hour, time.Hour)),
		"multicast":                       only(prefix("ff00::/8", time.Hour, time.Hour)),
		"a host's bits":                   only(prefix("2001:db8:7::1/56", time.Hour, time.Hour)),
		"a prefix of IPv4":                only(&dhcpv6.OptIAPrefix{ValidLifetime: time.Hour, Prefix: &net.IPNet{IP: net.ParseIP("::ffff:10.0.0.0"), Mask: net.CIDRMask(104, 128)}}),
	}
}

func TestNothingComesOfAPrefixThatAServerGetsWrong(t *testing.T) {
	for name, wrong := range nastyPrefixes() {
		t.Run(name, func(t *testing.T) {
			w, c := newWorld(t, honest(wrong), wantsPrefix)
			if l, err := c.Acquire(context.Background()); !errors.Is(err, dhcpc.ErrTimeout) || slices.Contains(w.log, "REQUEST") {
				t.Fatalf("lease %+v, %v, sent %v", l, err, w.log)
			}
			_, c = newWorld(t, func(m *dhcpv6.Message) [][]byte {
				return append(honest(wrong, func(r *reply) { r.server = rogueDUID() })(m), honest(withPrefix(nil, good()))(m)...)
			}, wantsPrefix)
			l := acquire(t, c)
			if l.Prefix.String() != "2001:db8:7::/56" {
				t.Errorf("lease %+v", l)
			}
			// A renewal that says so leaves both as they were, to their end.
			w, c = newWorld(t, honest(wrong), wantsPrefix)
			l = &Lease{}
			w.serve = honest(withPrefix(nil, good()))
			*l = *acquire(t, c)
			w.serve, w.log = honest(wrong), nil
			start := w.now
			got := w.keep(c, l, func(w *world) bool { return slices.Contains(w.log, "SOLICIT") })
			if strings.Join(got, " ") != "2001:db8::7 > -" || w.now.Sub(start) < 2500*time.Second-time.Second {
				t.Errorf("applied %q after %s", got, w.now.Sub(start))
			}
		})
	}
}

func TestAServerMayMoveAPrefix(t *testing.T) {
	w, c := newWorld(t, honest(withPrefix(nil, good())), wantsPrefix)
	l := acquire(t, c)
	w.serve = honest(withPrefix(nil, prefix("2001:db8:7::/56", 0, 0), prefix("2001:db8:8::/56", time.Hour, time.Hour)))
	ctx, cancel := context.WithCancel(context.Background())
	var moved netip.Prefix
	err := c.Run(ctx, l, func(old, next *Lease) error {
		if old != l || next.Address != l.Address {
			t.Errorf("%+v, %+v", old, next)
		}
		moved = next.Prefix
		cancel()
		return nil
	})
	if !errors.Is(err, context.Canceled) || moved.String() != "2001:db8:8::/56" {
		t.Errorf("%s, %v", moved, err)
	}
}

// ownPrefix gives a lease a prefix.
func ownPrefix(l *Lease) { l.Prefix = netip.MustParsePrefix("2001:db8:7::/56") }

func forEver(l *Lease) { l.Renew, l.Rebind, l.Expire = time.Time{}, time.Time{}, time.Time{} }

// A CONFIRM is about addresses; so any server is asked to renew a lease with a prefix: RFC 8415, section 18.2.12.
func TestALeaseWithAPrefixIsReboundAndNotConfirmed(t *testing.T) {
	c := newConfirming(t, ownPrefix)
	if c.wakes(); len(c.sent) != 1 || c.sent[0].MessageType != dhcpv6.MessageTypeRebind || c.at[0] > time.Second ||
		c.sent[0].GetOneOption(dhcpv6.OptionServerID) != nil || asksFor(t, c.sent[0]) != "2001:db8:7::/56" {
		t.Fatalf("sent %v at %v", c.sent, c.at)
	}
	out := c.step(Event{Message: answerTo(c.sent[0], dhcpv6.MessageTypeReply, withPrefix(nil, good()), func(r *reply) { r.server = rogueDUID() })})
	if out.Bound == nil || out.Bound.Address != clientIP() || out.Bound.Prefix.String() != "2001:db8:7::/56" || out.Lost != nil || c.s.State() != Bound {
		t.Errorf("%s, %+v", c.s.State(), out)
	}
	if err := (&Lease{Address: clientIP(), Prefix: netip.MustParsePrefix("fe80::/64"), Server: serverDUID(), DUID: ownDUID(), Obtained: epoch()}).Validate(); !errors.Is(err, dhcpc.ErrInvalid) {
		t.Error(err)
	}
}

func TestAPrefixThatNobodyRebindsGoesOn(t *testing.T) {
	for name, change := range map[string]func(*Lease){"with an end": func(*Lease) {}, "for ever": forEver} {
		c := newConfirming(t, func(l *Lease) { ownPrefix(l); change(l) })
		renew := c.s.Lease().Renew
		for c.s.State() == Confirming {
			if out := c.wakes(); out.Lost != nil || out.Err != nil {
				t.Fatalf("%s: %+v", name, out)
			}
		}
		if len(c.sent) < 3 || c.now.Sub(epoch())-c.at[0] != 10*time.Second || c.s.State() != Bound || !c.s.Wake().Equal(renew) || !c.s.Lease().Renew.Equal(renew) {
			t.Errorf("%s: sent at %v, %s at %s", name, c.at, c.s.State(), c.now.Sub(epoch()))
		}
	}
}

func TestAPrefixThatDoesNotFitTheLinkIsLost(t *testing.T) {
	c := newConfirming(t, ownPrefix)
	c.wakes()
	out := c.step(Event{Message: answerTo(c.sent[0], dhcpv6.MessageTypeReply, func(r *reply) {
		r.addrs = []grant{{clientIP(), 0, 0}}
	}, withPrefix(nil, prefix("2001:db8:7::/56", 0, 0)))})
	if out.Lost == nil || c.s.Lease() != nil {
		t.Fatalf("%s, %+v", c.s.State(), out)
	}
	if c.wakes(); c.sent[1].MessageType != dhcpv6.MessageTypeSolicit {
		t.Errorf("sent %s", c.sent[1].Summary())
	}
}

// On a link with two servers the one that has not given a prefix may be quicker.
func TestAPrefixIsAskedForAnewWhereNoServerKnowsOfIt(t *testing.T) {
	noBinding := func(r *reply) {
		r.server, r.addrs, r.inIA = rogueDUID(), nil, status(iana.StatusNoBinding)
	}
	for name, change := range map[string]func(*Lease){"with an end": func(*Lease) {}, "for ever": forEver} {
		c := newConfirming(t, func(l *Lease) { ownPrefix(l); change(l) })
		c.wakes()
		if out := c.step(Event{Message: answerTo(c.sent[0], dhcpv6.MessageTypeReply, noBinding)}); out.Send != nil || out.Lost != nil || c.s.State() != Confirming {
			t.Fatalf("%s: %s, %+v", name, c.s.State(), out)
		}
		known := c.s
		known, out := c.m.Step(known, c.now, Event{Message: answerTo(c.sent[0], dhcpv6.MessageTypeReply, withPrefix(nil, good()))})
		if out.Bound == nil || out.Lost != nil || known.State() != Bound {
			t.Errorf("%s: %s, %+v", name, known.State(), out)
		}
		c.wakes()
		if c.step(Event{Message: answerTo(c.sent[1], dhcpv6.MessageTypeReply, noBinding)}); c.sent[len(c.sent)-1].MessageType != dhcpv6.MessageTypeRequest {
			t.Fatalf("%s: sent %v", name, c.sent)
		}
		// That one falls silent, and what is held is held on.
		for c.s.State() == Requesting {
			if out := c.wakes(); out.Lost != nil {
				t.Fatalf("%s: %+v", name, out)
			}
		}
		if c.s.Lease() == nil {
			t.Errorf("%s: no lease", name)
		}
	}
}
