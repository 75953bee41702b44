package dhcpc

import (
	"bytes"
	"encoding/json"
	"errors"
	"testing"
	"time"

	"github.com/insomniacslk/dhcp/dhcpv4"

	"github.com/tombolo-cni/tombolo"
	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
)

// FuzzAnswer feeds a message to a session in each state that listens. If a lease comes
// of it, it is ours, and can be written, read, resumed and released.
func FuzzAnswer(f *testing.F) {
	f.Fuzz(func(t *testing.T, payload []byte) {
		for _, prepare := range []func() *bench{
			func() *bench { b := newBench(t, func(c *Config) { c.RapidCommit = true }); b.tick(); return b },
			func() *bench { return newBench(t).requesting() },
			func() *bench { b := newBench(t).bound(); b.tick(); return b },
			func() *bench { b := newBench(t).bound(); b.at(b.s.Lease().Rebind); return b },
			func() *bench { return newBench(t).bound() },
		} {
			b := prepare()
			state := b.s.state
			p := &Packet{Payload: ours(payload, b.sent), SrcMAC: serverMAC()}
			for _, c := range [][]byte{payload, p.Payload} {
				p.Payload = bytes.Clone(c)
				b.step(p)
				must.That(t, bytes.Equal(p.Payload, c), "changed what it was given")
			}
			l := b.out.Bound
			if l == nil {
				continue
			}
			must.That(t, state != bound, "took a lease that it had not asked for")
			checkUse(t, l)
		}
	})
}

// ours gives a message the transaction and the MAC of a request, since no fuzzer
// would ever guess them.
func ours(payload []byte, to *dhcpv4.DHCPv4) []byte {
	payload = bytes.Clone(payload)
	if len(payload) > 34 {
		copy(payload[4:], to.TransactionID[:])
		copy(payload[28:], to.ClientHWAddr)
	}
	return payload
}

func checkUse(t *testing.T, l *Lease) {
	t.Helper()
	text := must.Of(json.Marshal(l)).Get(t)
	var again Lease
	err := json.Unmarshal(text, &again)
	must.That(t, err == nil, "%v: %s", err, text)
	text2, err := json.Marshal(&again)
	must.That(t, err == nil && bytes.Equal(text, text2), "%s read and written: %s, %v", text, text2, err)
	must.Succeed(t, again.Validate())
	must.Succeed(t, expect.Err(Release(&again, 1)))
	for _, r := range l.Routes {
		expect.That(t, r.Dst.IsValid() && r.Dst == r.Dst.Masked() && (!r.Gateway.IsValid() || usable(r.Gateway)), "route %s", r)
	}
	for _, name := range append(l.Search, l.Domain) {
		expect.That(t, !bytes.ContainsAny([]byte(name), " \t\r\n\x00#;"), "name %q", name)
	}
}

// FuzzSession walks: see walk.
func FuzzSession(f *testing.F) {
	f.Fuzz(func(t *testing.T, in []byte) { walk(t, in[:min(len(in), 500)]) })
}

// FuzzLease reads what may have been a lease on a disk.
func FuzzLease(f *testing.F) {
	f.Fuzz(func(t *testing.T, text []byte) {
		var l Lease
		if json.Unmarshal(text, &l) != nil {
			return
		}
		b := newBench(t)
		for _, now := range []time.Time{epoch(), l.Obtained, l.Renew, l.Rebind, l.Expire} {
			s, err := b.m.Restore(now, 1, &l)
			if err != nil {
				must.That(t, errors.Is(err, tombolo.ErrInvalid), "%v", err)
				return
			}
			b.s, b.now = s, now
			for range 5 {
				if b.s.Wake().IsZero() {
					break
				}
				b.tick()
			}
		}
		again, err := json.Marshal(&l)
		if err != nil {
			return // a year over 9999, say: it was never written
		}
		var l2 Lease
		must.Succeed(t, json.Unmarshal(again, &l2))
		again2, err := json.Marshal(&l2)
		expect.That(t, err == nil && bytes.Equal(again, again2), "%s then %s: %v", again, again2, err)
	})
}
