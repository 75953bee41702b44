package dhcpc

import (
	"bytes"
	"fmt"
	"net/netip"
	"time"
)

// The numbers of RFC 5227, section 1.1.
const (
	probeCount   = 3
	probeWait    = time.Second // before the first, at most
	probeMin     = time.Second // between two
	probeMax     = 2 * time.Second
	announceWait = 2 * time.Second // after the last, for answers
)

// startProbing looks for others that have the address, before it is taken.
func (t *step) startProbing(l *Lease) {
	t.s.offer, t.s.tries = l, 0
	t.enter(probing, t.now.Add(t.s.random.Between(0, probeWait)))
}

// probe sends the next probe, or ends the wait for answers to the last.
func (t *step) probe() {
	if !t.s.offer.Infinite() && !t.now.Before(t.s.offer.Expire) {
		t.forget()
		t.discover()
		return
	}
	if t.s.tries == probeCount {
		t.bind(t.s.offer)
		return
	}
	t.s.tries++
	pause := t.s.random.Between(probeMin, probeMax)
	if t.s.tries == probeCount {
		pause = announceWait
	}
	// The sender's address is 0.0.0.0, so that nobody's neighbour entry is touched.
	t.send("probe", &Packet{
		SrcMAC: Hex(t.cfg.MAC),
		ARP:    &ARP{SenderMAC: Hex(t.cfg.MAC), SenderIP: netip.IPv4Unspecified(), TargetIP: t.s.offer.Address.Addr()},
	})
	t.enter(probing, t.now.Add(pause))
}

// hearARP declines the address if another host has it, or is about to take it: RFC 5227,
// section 2.1.1.
func (t *step) hearARP(a *ARP) {
	if t.s.state != probing || bytes.Equal(a.SenderMAC, t.cfg.MAC) {
		return
	}
	address := t.s.offer.Address.Addr()
	has := a.SenderIP == address
	wants := !a.Reply && a.SenderIP == netip.IPv4Unspecified() && a.TargetIP == address
	if !has && !wants {
		return
	}
	t.decline(t.s.offer, fmt.Errorf("%w: %s, by %s", ErrDeclined, address, a.SenderMAC))
}
