package dhcp6

import (
	"errors"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/insomniacslk/dhcp/dhcpv6"
	"github.com/insomniacslk/dhcp/iana"

	"github.com/tombolo-cni/tombolo"
	"github.com/tombolo-cni/tombolo/dhcpc"
	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
)

// confirming is a session that has a lease of long ago, and asks whether its address fits.
type confirming struct {
	*testing.T
	m    *Machine
	s    Session
	now  time.Time
	sent []*dhcpv6.Message
	at   []time.Duration
}

func newConfirming(t *testing.T, change func(l *Lease6)) *confirming {
	t.Helper()
	l := &Lease6{Address: clientIP(), Server: serverDUID(), DUID: ownDUID(), IAID: ownIAID, Obtained: epoch().Add(-time.Minute),
		Renew: epoch().Add(time.Hour), Rebind: epoch().Add(2 * time.Hour), Expire: epoch().Add(3 * time.Hour)}
	change(l)
	cfg := &Config{DUID: ownDUID(), IAID: ownIAID, Address: clientIP(), DetectConflicts: true}
	m := must.Of(NewMachine(cfg)).Get(t)
	c := &confirming{T: t, m: m, now: epoch()}
	c.s = must.Of(m.Confirm(c.now, 4, l)).Get(t)
	return c
}

// until lets time pass until a message is sent or the session stops listening to any.
func (c *confirming) step(e Event) Output {
	c.Helper()
	var out Output
	c.s, out = c.m.Step(c.s, c.now, e)
	if out.Send != nil {
		m := must.Of(dhcpv6.MessageFromBytes(out.Send)).Get(c)
		c.sent, c.at = append(c.sent, m), append(c.at, c.now.Sub(epoch()))
	}
	return out
}

func (c *confirming) wakes() Output {
	c.Helper()
	if w := c.s.Wake(); w.After(c.now) {
		c.now = w
	}
	return c.step(Event{})
}

// RFC 8415, section 18.2.3.
func TestConfirmAsksAnyServerWhetherTheAddressFitsTheLink(t *testing.T) {
	c := newConfirming(t, func(*Lease6) {})
	if out := c.step(Event{}); out.Send != nil || c.s.Lease() == nil || c.s.Wake().Sub(c.now) > time.Second {
		t.Fatalf("at once: %+v, wakes after %s", out, c.s.Wake().Sub(c.now))
	}
	c.wakes()
	m := c.sent[0]
	ia := m.Options.OneIANA()
	if m.MessageType != dhcpv6.MessageTypeConfirm || m.GetOneOption(dhcpv6.OptionServerID) != nil || m.GetOneOption(dhcpv6.OptionORO) != nil ||
		ia == nil || ia.Options.OneAddress() == nil || ia.Options.OneAddress().ValidLifetime != 0 || ia.T1 != 0 {
		t.Errorf("sent %s", m.Summary())
	}
	for _, wrong := range []func(*reply){
		func(r *reply) { r.xid[0]++ }, func(r *reply) { r.client = rogueDUID() }, func(r *reply) { r.server = nil },
		func(r *reply) { r.kind = dhcpv6.MessageTypeAdvertise }, func(r *reply) { r.top = status(iana.StatusUnspecFail) },
		func(r *reply) { r.xid[2]++; r.top = status(iana.StatusNotOnLink) },
		func(r *reply) { r.client = rogueDUID(); r.top = status(iana.StatusNotOnLink) },
	} {
		if out := c.step(Event{Message: answerTo(m, dhcpv6.MessageTypeReply, wrong)}); out.Lost != nil || c.s.State() != Confirming {
			t.Errorf("state %d, %+v", c.s.State(), out)
		}
	}
	// By any server, with nothing in it but that.
	out := c.step(Event{Message: answerTo(m, dhcpv6.MessageTypeReply, func(r *reply) { r.server, r.noIA, r.more, r.top = rogueDUID(), true, nil, status(iana.StatusSuccess) })})
	if c.s.State() != bound || out.Bound != nil || out.Lost != nil || !out.Listen.IsZero() || !c.s.Wake().Equal(c.s.Lease().Renew) {
		t.Errorf("state %d, %+v", c.s.State(), out)
	}
	out = c.wakes()
	expect.That(t, out.Send != nil && c.sent[1].MessageType == dhcpv6.MessageTypeRenew, "at T1: %+v", c.sent)
}

func TestAnAddressThatDoesNotFitTheLinkIsLost(t *testing.T) {
	c := newConfirming(t, forEver)
	c.wakes()
	out := c.step(Event{Message: answerTo(c.sent[0], dhcpv6.MessageTypeReply, func(r *reply) { r.noIA, r.top = true, status(iana.StatusNotOnLink) })})
	if out.Lost == nil || !errors.Is(out.Err, dhcpc.ErrNAK) || c.s.Lease() != nil {
		t.Fatalf("state %d, %+v", c.s.State(), out)
	}
	if c.wakes(); c.sent[1].MessageType != dhcpv6.MessageTypeSolicit {
		t.Errorf("sent %s", c.sent[1].Summary())
	}
}

func TestALeaseThatNobodyConfirmsGoesOn(t *testing.T) {
	for name, change := range map[string]func(*Lease6){
		"with an end": func(*Lease6) {},
		"for ever":    forEver,
	} {
		c := newConfirming(t, change)
		for c.s.State() == Confirming {
			out := c.wakes()
			must.That(t, out.Lost == nil && out.Err == nil, "%s: %+v", name, out)
		}
		last := c.at[len(c.at)-1] - c.at[0]
		if len(c.sent) < 3 || last > 10*time.Second || c.now.Sub(epoch())-c.at[0] != 10*time.Second || c.s.State() != bound || !c.s.Wake().Equal(c.s.Lease().Renew) {
			t.Errorf("%s: sent at %v, state %d at %s", name, c.at, c.s.State(), c.now.Sub(epoch()))
		}
	}
}

// What is due, has ended or is of the future is renewed, or asked for.
func TestALeaseThatIsDueIsRenewedAndNotConfirmed(t *testing.T) {
	for want, change := range map[string]func(*Lease6){
		"RENEW":   func(l *Lease6) { l.Renew = epoch() },
		"REBIND":  func(l *Lease6) { l.Renew, l.Rebind = epoch(), epoch() },
		"SOLICIT": func(l *Lease6) { l.Renew, l.Rebind, l.Expire = epoch(), epoch(), epoch() },
	} {
		c := newConfirming(t, change)
		c.wakes()
		if len(c.sent) == 0 {
			c.wakes()
		}
		expect.Equal(t, c.sent[0].MessageType.String(), want, "sent")
	}
	// One that becomes due meanwhile.
	c := newConfirming(t, func(l *Lease6) { l.Renew = epoch().Add(3 * time.Second) })
	var kinds []string
	for len(kinds) == 0 || kinds[len(kinds)-1] == "CONFIRM" {
		c.wakes()
		kinds = kinds[:0]
		for _, m := range c.sent {
			kinds = append(kinds, m.MessageType.String())
		}
	}
	if !slices.Equal(slices.Compact(kinds), []string{"CONFIRM", "RENEW"}) || c.at[len(c.at)-1] != 3*time.Second {
		t.Errorf("sent %s at %v", strings.Join(kinds, " "), c.at)
	}
	expect.Is(t, expect.Err(c.m.Confirm(c.now, 1, nil)), tombolo.ErrInvalid)
}

// forEver makes a lease one without an end.
func forEver(l *Lease6) { l.Renew, l.Rebind, l.Expire = time.Time{}, time.Time{}, time.Time{} }
