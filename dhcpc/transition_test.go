package dhcpc

import (
	"errors"
	"testing"
	"time"

	"github.com/insomniacslk/dhcp/dhcpv4"

	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
)

const (
	discover = dhcpv4.MessageTypeDiscover
	offer    = dhcpv4.MessageTypeOffer
	request  = dhcpv4.MessageTypeRequest
	ack      = dhcpv4.MessageTypeAck
	nak      = dhcpv4.MessageTypeNak
)

func broadcasts(t *testing.T, b *bench) {
	t.Helper()
	got := b.to.Src.String() + " " + b.to.Dst.String()
	expect.That(t, got == "0.0.0.0:68 255.255.255.255:67", "sent from and to %s, want a broadcast", got)
	expect.That(t, b.sent.ClientIPAddr.IsUnspecified(), "ciaddr %s, want none", b.sent.ClientIPAddr)
}

func TestInitToSelecting(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	b.want(initial)
	b.tick()
	b.want(selecting)
	b.wantSent(discover)
	broadcasts(t, b)
	b.option(61, ownID())
	b.option(12, []byte("pod-7"))
	b.option(55, defaultOptions())
	b.option(57, []byte{1500 >> 8, 1500 & 0xff})
	for _, absent := range []uint8{50, 54, 80} {
		b.option(absent, nil)
	}
	expect.That(t, b.out.Listen.Equal(b.s.wake),
		"listens until %s, want until it wakes at %s", b.out.Listen, b.s.wake)
}

func TestSelectingToSelecting(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	b.tick()
	xid, last := b.sent.TransactionID, b.now
	for i, base := range []time.Duration{4, 8, 16, 32, 64, 64} {
		b.tick()
		b.want(selecting)
		b.wantSent(discover)
		expect.Equal(t, b.sent.IsBroadcast(), i+2 >= 3, "DISCOVER %d asks for a broadcast", i+2)
		expect.Equal(t, b.sent.TransactionID, xid, "another transaction: an OFFER that comes late would be lost")
		if got := b.now.Sub(last); got < (base-1)*time.Second || got > (base+1)*time.Second {
			t.Errorf("sent again after %s, want %d s ± 1 s", got, base)
		}
		last = b.now
	}
	want := uint16(b.now.Sub(epoch()) / time.Second)
	expect.That(t, b.sent.NumSeconds == want, "secs %d, want %d", b.sent.NumSeconds, want)
	b.hear(offer)
	b.wantSent(request)
	expect.That(t, b.sent.IsBroadcast(), "the REQUEST that follows does not ask for a broadcast")
}

func TestSelectingToRequesting(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	b.tick()
	xid := b.sent.TransactionID
	b.hear(offer)
	b.want(requesting)
	b.wantSent(request)
	broadcasts(t, b)
	b.option(50, raw4(clientIP))
	b.option(54, raw4(serverIP))
	b.option(61, ownID())
	b.option(55, defaultOptions())
	expect.Equal(t, b.sent.TransactionID, xid, "the REQUEST is not of the OFFER's transaction")
}

func TestSelectingToBound(t *testing.T) {
	t.Parallel()
	b := newBench(t, func(c *Config) { c.RapidCommit = true })
	b.tick()
	b.option(80, []byte{})
	b.hear(ack, set(80, []byte{}))
	b.want(bound)
	expect.That(t, b.out.Bound != nil && b.out.Bound.Obtained.Equal(epoch()),
		"bound to %+v, want a lease from when the DISCOVER was sent", b.out.Bound)
}

func TestRapidCommitTakesAnOffer(t *testing.T) {
	t.Parallel()
	b := newBench(t, func(c *Config) { c.RapidCommit = true })
	b.bound()
}

func TestSelectingIgnoresAnAckThatCommitsNothing(t *testing.T) {
	t.Parallel()
	for name, tt := range map[string]struct {
		rapid bool
		add   change
	}{
		"not asked for":  {false, set(80, []byte{})},
		"without the 80": {true, without(80)},
	} {
		b := newBench(t, func(c *Config) { c.RapidCommit = tt.rapid })
		b.tick()
		b.hear(ack, tt.add)
		expect.Equal(t, b.s.state, selecting, "%s: state", name)
	}
}

func TestRequestingToBound(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	b.requesting()
	b.now = b.now.Add(2 * time.Second) // the answer takes its time
	b.hear(ack)
	b.want(bound)
	b.wantNothingSent()
	l := b.out.Bound
	if l == nil || l != b.s.Lease() {
		t.Fatalf("bound to %v, holds %v", l, b.s.Lease())
	}
	if !l.Obtained.Equal(epoch()) || l.Renew.Sub(epoch()) != 30*time.Minute || l.Rebind.Sub(epoch()) != 3150*time.Second || l.Expire.Sub(epoch()) != time.Hour {
		t.Errorf("times %s %s %s %s: want those of an hour from the REQUEST", l.Obtained, l.Renew, l.Rebind, l.Expire)
	}
	expect.That(t, !b.s.wake.Before(l.Renew) && b.s.wake.Before(l.Rebind) && b.out.Listen.IsZero(),
		"wakes at %s, listens until %s: want T1 or a little later, and no socket till then", b.s.wake, b.out.Listen)
	expect.Success(t, l.Validate())
}

func TestRequestingToRequesting(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	b.tick()
	b.tick() // after some seconds
	b.hear(offer)
	b.want(requesting)
	first := b.sent.ToBytes()
	expect.That(t, b.sent.NumSeconds != 0 && b.sent.NumSeconds == uint16(b.now.Sub(epoch())/time.Second),
		"secs %d, want that of the DISCOVER", b.sent.NumSeconds)
	b.tick()
	b.want(requesting)
	b.wantSent(request)
	expect.Equal(t, string(b.sent.ToBytes()), string(first), "it is not the same REQUEST again")
}

func TestRequestingToSelecting(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	b.requesting()
	request := b.sent
	b.tick()
	b.tick()
	b.want(selecting)
	b.wantSent(discover)
	b.step(answer(request, ack, yiaddr(otherIP)))
	b.want(selecting)
	b.step(answer(request, ack)) // of a server that takes a quarter of a minute
	b.want(bound)
}

func TestRequestingToInit(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	b.requesting()
	b.hear(nak, set(56, []byte("no\nway")))
	b.want(initial)
	b.wantNothingSent()
	if !errors.Is(b.out.Err, ErrNAK) || b.out.Err.Error() != `server refused the address 10.9.0.7: NAK from 10.9.0.1: "noway"` {
		t.Errorf("error %v", b.out.Err)
	}
	expect.That(t, b.out.Lost == nil, "lost a lease that it never had")
}

func TestNAKsBackOffFromOneSecondToHalfAnHour(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	for _, want := range []time.Duration{1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 1800, 1800} {
		b.tick()
		b.hear(offer)
		if b.s.state == selecting { // it is held back, in the hope of a better one
			b.tick()
		}
		b.want(requesting)
		b.hear(nak)
		b.want(initial)
		got := b.s.wake.Sub(b.now)
		expect.That(t, got == want*time.Second, "waits %s, want %d s", got, want)
	}
	for b.s.state != requesting {
		b.tick()
		b.hear(offer)
	}
	b.hear(ack)
	b.want(bound)
	b.at(b.s.Lease().Renew.Add(time.Minute))
	b.hear(nak)
	got := b.s.wake.Sub(b.now)
	expect.That(t, got == time.Second, "waits %s after a lease, want it to begin with 1 s again", got)
}

func TestBoundToRenewing(t *testing.T) {
	t.Parallel()
	b := newBench(t, func(c *Config) { c.Broadcast = true }).bound()
	xid := b.sent.TransactionID
	b.tick()
	b.want(renewing)
	b.wantSent(request)
	got := b.to.Src.String() + " " + b.to.Dst.String()
	expect.That(t, got == "10.9.0.7:68 10.9.0.1:67", "sent from and to %s, want unicast to the server", got)
	if b.to.DstMAC.String() != serverMAC().String() {
		t.Errorf("sent to the MAC %s, want %s, by which the ACK came: a packet socket asks nobody", b.to.DstMAC, serverMAC())
	}
	if !b.sent.ClientIPAddr.Equal(addr(clientIP).AsSlice()) || b.sent.IsBroadcast() {
		t.Errorf("ciaddr %s, broadcast %v", b.sent.ClientIPAddr, b.sent.IsBroadcast())
	}
	b.option(50, nil)
	b.option(54, nil)
	b.option(61, ownID())
	expect.That(t, b.sent.TransactionID != xid, "the transaction is the old one")
	expect.Equal(t, b.out.Listen.Sub(b.now), secondRenewal, "listens for")
}

func TestRenewingToBound(t *testing.T) {
	t.Parallel()
	b := newBench(t).bound()
	old := b.s.Lease()
	b.tick()
	at := b.now
	b.hear(ack, set(51, seconds(7200)))
	b.want(bound)
	if l := b.out.Bound; l == nil || l == old || l.Expire.Sub(at) != 2*time.Hour || b.out.Lost != nil {
		t.Errorf("bound to %+v, lost %v", l, b.out.Lost)
	}
}

func TestRenewingToRenewing(t *testing.T) {
	t.Parallel()
	b := newBench(t).bound()
	l := b.s.Lease()
	b.tick()
	xid := b.sent.TransactionID
	soon := 10 * time.Second
	for b.s.state == renewing {
		want := min(soon, max(l.Rebind.Sub(b.now)/2, time.Minute), l.Rebind.Sub(b.now))
		if got := b.s.wake.Sub(b.now); got != want {
			t.Fatalf("waits %s, %s before T2: want %s", got, l.Rebind.Sub(b.now), want)
		}
		soon *= 2
		b.tick()
		b.wantSent(request)
		must.That(t, b.sent.TransactionID != xid, "an ACK would not say which REQUEST it extends from")
		xid = b.sent.TransactionID
		if b.s.state == renewing {
			expect.Equal(t, b.to.Dst.String(), "255.255.255.255:67", "sent again to")
			expect.Equal(t, b.sent.IsBroadcast(), b.sent.ClientIPAddr.IsUnspecified(), "asks for a broadcast without an address of its own")
		}
	}
	expect.That(t, b.now.Equal(l.Rebind), "left RENEWING at %s, want T2, %s", b.now, l.Rebind)
}

func TestRenewingToRebinding(t *testing.T) {
	t.Parallel()
	b := newBench(t).bound()
	b.at(b.s.Lease().Rebind)
	b.want(rebinding)
	b.wantSent(request)
	expect.Equal(t, b.to.Src.String()+" "+b.to.Dst.String(), "10.9.0.7:68 255.255.255.255:67", "sent from and to")
	expect.That(t, b.sent.ClientIPAddr.Equal(addr(clientIP).AsSlice()), "ciaddr %s", b.sent.ClientIPAddr)
	b.option(50, nil)
	b.option(54, nil)
}

func TestRenewingToInit(t *testing.T) {
	t.Parallel()
	b := newBench(t).bound()
	l := b.s.Lease()
	b.tick()
	b.hear(nak)
	b.want(initial)
	if b.out.Lost != l || !errors.Is(b.out.Err, ErrNAK) || b.s.Lease() != nil {
		t.Errorf("lost %v by %v, still holds %v", b.out.Lost, b.out.Err, b.s.Lease())
	}
}

func TestRebindingToBound(t *testing.T) {
	t.Parallel()
	b := newBench(t).bound()
	b.at(b.s.Lease().Rebind)
	b.hear(ack, from(rogueIP)) // the server was replaced
	b.want(bound)
	got := b.out.Bound.Server
	expect.That(t, got == addr(rogueIP), "the lease is of %s, want the server that answered", got)
	b.tick()
	expect.Equal(t, b.to.Dst.Addr(), addr(rogueIP), "the next renewal is to %s", b.to.Dst)
}

func TestRebindingToInit(t *testing.T) {
	t.Parallel()
	b := newBench(t).bound()
	b.at(b.s.Lease().Rebind)
	b.hear(nak, from(rogueIP))
	b.want(initial)
	expect.That(t, b.out.Lost != nil && errors.Is(b.out.Err, ErrNAK), "lost %v by %v", b.out.Lost, b.out.Err)
}

func TestRebindingToSelecting(t *testing.T) {
	t.Parallel()
	b := newBench(t).bound()
	l := b.s.Lease()
	for b.s.state != selecting {
		b.tick()
	}
	expect.That(t, b.now.Equal(l.Expire) && b.out.Lost == l && errors.Is(b.out.Err, ErrExpired),
		"lost %v by %v at %s, want it at %s", b.out.Lost, b.out.Err, b.now, l.Expire)
	b.wantSent(discover)
	b.option(50, raw4(clientIP))
}

func TestBoundToSelecting(t *testing.T) {
	t.Parallel()
	b := newBench(t).bound()
	l := b.s.Lease()
	b.at(l.Expire.Add(time.Hour)) // the machine was asleep
	b.want(selecting)
	expect.That(t, b.out.Lost == l && errors.Is(b.out.Err, ErrExpired), "lost %v by %v", b.out.Lost, b.out.Err)
}

func TestBoundForEver(t *testing.T) {
	t.Parallel()
	b := newBench(t).bound(set(51, []byte{255, 255, 255, 255}))
	expect.That(t, b.s.wake.IsZero() && b.out.Bound.Infinite() && b.out.Bound.Left(b.now) == -1,
		"wakes at %s, lease %+v", b.s.wake, b.out.Bound)
	b.at(epoch().AddDate(100, 0, 0))
	b.want(bound)
}

// TestRebooting begins with a lease of before, half an hour after it was granted.
func TestRebooting(t *testing.T) {
	t.Parallel()
	reboot := func(change func(*Config)) *bench {
		b := newBench(t, func(c *Config) {
			if c.Last = testLease(); change != nil {
				change(c)
			}
		})
		b.now = epoch().Add(30 * time.Minute)
		b.s = b.m.Start(b.now, 1)
		b.tick()
		return b
	}
	silent := func(b *bench) *Lease {
		began := epoch().Add(30 * time.Minute)
		for b.s.Lease() == nil && b.now.Sub(began) < time.Minute {
			b.tick()
		}
		expect.That(t, b.s.Lease() == nil || b.now.Sub(began) == silence, "bound after %s", b.now.Sub(began))
		return b.s.Lease()
	}

	b := reboot(nil)
	b.want(rebooting)
	b.wantSent(request)
	broadcasts(t, b)
	b.option(50, raw4(clientIP))
	b.option(54, nil)
	b.hear(ack)
	b.want(bound)
	expect.That(t, b.out.Bound.Expire.Equal(b.now.Add(time.Hour)), "it lasts until %s, want the server's hour", b.out.Bound.Expire)

	b = reboot(nil)
	b.tick()
	b.wantSent(discover)
	b.option(50, raw4(clientIP))
	l := silent(b)
	expect.That(t, l != nil && l.Renew.Equal(b.now) && l.Rebind.Equal(b.now) && l.Expire.Equal(epoch().Add(time.Hour)), "%+v after silence", l)
	expect.Success(t, l.Validate())
	b.tick()
	b.want(rebinding)
	b.wantSent(request)

	b = reboot(nil)
	b.hear(nak)
	b.want(initial)
	b.tick()
	b.wantSent(discover)
	b.option(50, nil)
	expect.That(t, silent(b) == nil, "a lease that was refused is taken up")

	b = reboot(nil)
	b.tick()
	b.hear(offer)
	expect.That(t, silent(b) == nil, "a lease is taken up, although a server has answered")

	ended := func(c *Config) { c.Last.Renew, c.Last.Rebind, c.Last.Expire = epoch(), epoch(), epoch() }
	b = reboot(ended)
	b.want(selecting)
	expect.That(t, silent(b) == nil, "a lease that has ended is taken up")

	b = reboot(func(c *Config) { c.Refuse = func(_, _ *Lease) error { return errors.New("another has it") } })
	expect.That(t, silent(b) == nil, "a lease is taken up that the caller refuses")

	b = reboot(func(c *Config) { c.Last.Renew, c.Last.Rebind, c.Last.Expire = time.Time{}, time.Time{}, time.Time{} })
	expect.That(t, silent(b).Infinite(), "a lease for ever ends")

	b = reboot(func(c *Config) { // as on a machine without a clock of its own
		l, day := c.Last, 24*time.Hour
		l.Obtained, l.Renew, l.Rebind, l.Expire = l.Obtained.Add(day), l.Renew.Add(day), l.Rebind.Add(day), l.Expire.Add(day)
	})
	l = silent(b)
	expect.Equal(t, l.Expire.Sub(b.now), time.Hour, "time left of a lease of the future")

	b = reboot(func(c *Config) { c.DetectConflicts = true })
	for b.s.state != probing {
		b.tick()
	}
	b.step(&Packet{ARP: &ARP{Reply: true, SenderMAC: otherMAC(), SenderIP: addr(clientIP), TargetIP: addr(clientIP)}})
	b.want(initial)
	expect.That(t, errors.Is(b.out.Err, ErrDeclined), "%v", b.out.Err)
}

func TestRestoreGoesByTheClock(t *testing.T) {
	t.Parallel()
	l := testLease()
	for _, tt := range []struct {
		name   string
		now    time.Time
		first  state
		sends  bool
		second state // after a step at that time
	}{
		{"before T1", l.Renew.Add(-time.Second), bound, false, bound},
		{"past T1", l.Renew, bound, true, renewing},
		{"past T2", l.Rebind, bound, true, rebinding},
		{"past its end", l.Expire, bound, true, selecting},
		{"before it was granted", l.Obtained.Add(-time.Hour), bound, true, rebinding},
	} {
		t.Run(tt.name, func(t *testing.T) {
			b := newBench(t)
			s := must.Of(b.m.Restore(tt.now, 1, l)).Get(t)
			b.s = s
			b.want(tt.first)
			b.at(tt.now)
			b.want(tt.second)
			expect.Equal(t, b.out.Send != nil, tt.sends, "sent %v", b.out.Send)
			if held := b.s.Lease(); held != nil && held.Left(tt.now) > time.Hour {
				t.Errorf("it lasts %s more, and was granted for an hour", held.Left(tt.now))
			}
		})
	}
}
