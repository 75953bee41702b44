package dhcpc

import (
	"errors"
	"net/netip"
	"testing"
	"time"

	"github.com/insomniacslk/dhcp/dhcpv4"

	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
)

func detect(c *Config) { c.DetectConflicts = true }

func startsProbing(t *testing.T) *bench {
	t.Helper()
	b := newBench(t, detect)
	b.requesting()
	b.hear(ack)
	b.want(probing)
	must.That(t, b.out.Bound == nil, "took the address before it asked")
	return b
}

func TestRequestingToProbing(t *testing.T) {
	t.Parallel()
	b := startsProbing(t)
	got := b.s.wake.Sub(b.now)
	expect.That(t, got >= 0 && got <= time.Second, "first probe after %s, want at most 1 s", got)
}

func TestProbingToBound(t *testing.T) {
	t.Parallel()
	b := startsProbing(t)
	for i := range 3 {
		b.tick()
		b.want(probing)
		p := b.out.Send
		must.That(t, p != nil && p.ARP != nil, "sent %v, want a probe", p)
		a := p.ARP
		if a.Reply || a.SenderIP != netip.IPv4Unspecified() || a.TargetIP != addr(clientIP) || a.SenderMAC.String() != ownMAC().String() || len(a.TargetMAC) != 0 {
			t.Errorf("probe %+v", a)
		}
		if pause := b.s.wake.Sub(b.now); i < 2 && (pause < time.Second || pause > 2*time.Second) || i == 2 && pause != 2*time.Second {
			t.Errorf("pause %s after probe %d", pause, i+1)
		}
	}
	b.tick()
	b.want(bound)
	l := b.out.Bound
	expect.That(t, l != nil && l.Obtained.Equal(epoch()), "bound to %+v, want a lease from its REQUEST on", l)
}

func TestProbingToInit(t *testing.T) {
	t.Parallel()
	for name, a := range map[string]ARP{
		"it is answered":         {Reply: true, SenderMAC: otherMAC(), SenderIP: addr(clientIP), TargetMAC: Hex(ownMAC()), TargetIP: netip.IPv4Unspecified()},
		"another asks from it":   {SenderMAC: otherMAC(), SenderIP: addr(clientIP), TargetIP: addr(serverIP)},
		"another probes as well": {SenderMAC: otherMAC(), SenderIP: netip.IPv4Unspecified(), TargetIP: addr(clientIP)},
	} {
		b := startsProbing(t)
		b.tick()
		b.step(&Packet{ARP: &a})
		b.want(initial)
		b.wantSent(dhcpv4.MessageTypeDecline)
		broadcasts(t, b)
		b.option(50, raw4(clientIP))
		b.option(54, raw4(serverIP))
		b.option(61, ownID())
		for _, absent := range []uint8{12, 51, 55, 57} {
			b.option(absent, nil)
		}
		if !errors.Is(b.out.Err, ErrDeclined) || b.s.wake.Sub(b.now) < 10*time.Second {
			t.Errorf("%s: error %v, waits %s, want 10 s at least", name, b.out.Err, b.s.wake.Sub(b.now))
		}
	}
}

func TestProbingGoesOn(t *testing.T) {
	t.Parallel()
	for name, a := range map[string]ARP{
		"by its own probe":         {SenderMAC: Hex(ownMAC()), SenderIP: netip.IPv4Unspecified(), TargetIP: addr(clientIP)},
		"another asks for it":      {SenderMAC: otherMAC(), SenderIP: addr(otherIP), TargetIP: addr(clientIP)},
		"another announces itself": {SenderMAC: otherMAC(), SenderIP: addr(otherIP), TargetIP: addr(otherIP)},
		"another probes its own":   {SenderMAC: otherMAC(), SenderIP: netip.IPv4Unspecified(), TargetIP: addr(otherIP)},
	} {
		b := startsProbing(t)
		b.tick()
		b.step(&Packet{ARP: &a})
		if b.s.state != probing || b.out.Send != nil {
			t.Errorf("%s: %s, sent %v", name, b.s.state, b.out.Send)
		}
	}
}

func TestProbingOfALeaseThatEndsMeanwhile(t *testing.T) {
	t.Parallel()
	b := newBench(t, detect)
	b.requesting()
	b.hear(ack, set(51, seconds(10)))
	b.want(probing)
	b.at(b.s.offer.Expire)
	b.want(selecting)
}

func TestARPIsNoBusinessOfOtherStates(t *testing.T) {
	t.Parallel()
	b := newBench(t).bound()
	b.step(&Packet{ARP: &ARP{SenderMAC: otherMAC(), SenderIP: addr(clientIP), TargetIP: addr(clientIP)}})
	b.want(bound)
	b.wantNothingSent()
}
