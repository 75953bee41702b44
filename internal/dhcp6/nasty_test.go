package dhcp6

import (
	"errors"
	"math"
	"net"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/insomniacslk/dhcp/dhcpv6"
	"github.com/insomniacslk/dhcp/iana"

	"github.com/tombolo-cni/tombolo/dhcpc"
	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
)

// What a server may get wrong, and nothing comes of it; and the honest server beside it is taken.
func nasty() map[string]func(*reply) {
	only := func(a string, preferred, valid time.Duration) func(*reply) {
		return func(r *reply) { r.addrs = []grant{{netip.MustParseAddr(a), preferred, valid}} }
	}
	return map[string]func(*reply){
		"another transaction":             func(r *reply) { r.xid[1] ^= 1 },
		"another client":                  func(r *reply) { r.client = rogueDUID() },
		"no client":                       func(r *reply) { r.client = nil },
		"no server":                       func(r *reply) { r.server = nil },
		"a server of two bytes":           func(r *reply) { r.server = dhcpc.Hex{0, 4} },
		"a huge server":                   func(r *reply) { r.server = make(dhcpc.Hex, 131) },
		"another IAID":                    func(r *reply) { r.iaid[3]++ },
		"no IA_NA":                        func(r *reply) { r.noIA = true },
		"no address":                      func(r *reply) { r.addrs = nil },
		"T1 after T2":                     func(r *reply) { r.t1, r.t2 = 2*time.Hour, time.Hour },
		"NoAddrsAvail":                    func(r *reply) { r.top = status(iana.StatusNoAddrsAvail) },
		"NoAddrsAvail in the IA_NA":       func(r *reply) { r.addrs, r.inIA = nil, status(iana.StatusNoAddrsAvail) },
		"NoAddrsAvail and an address":     func(r *reply) { r.inIA = status(iana.StatusNoAddrsAvail) },
		"NotOnLink":                       func(r *reply) { r.inIA = status(iana.StatusNotOnLink) },
		"NotOnLink of the address":        func(r *reply) { r.inAddr = status(iana.StatusNotOnLink) },
		"UseMulticast":                    func(r *reply) { r.top = status(iana.StatusUseMulticast) },
		"a status nobody knows":           func(r *reply) { r.top = status(4711) },
		"no time":                         only("2001:db8::7", 0, 0),
		"preferred for longer than valid": only("2001:db8::7", 2*time.Second, time.Second),
		"a multicast address":             only("ff02::1", time.Hour, time.Hour),
		"a link-local address":            only("fe80::1", time.Hour, time.Hour),
		"the loopback address":            only("::1", time.Hour, time.Hour),
		"an IPv4 address":                 only("::ffff:192.0.2.1", time.Hour, time.Hour),
		"a RECONFIGURE":                   func(r *reply) { r.kind = dhcpv6.MessageTypeReconfigure },
		"a relay's":                       func(r *reply) { r.kind = dhcpv6.MessageTypeRelayReply },
	}
}

func TestNothingComesOfWhatAServerGetsWrong(t *testing.T) {
	for name, wrong := range nasty() {
		for _, rapid := range []bool{false, true} {
			t.Run(name, func(t *testing.T) {
				both := []func(*reply){func(r *reply) { r.rapid, r.server = rapid, rogueDUID() }, wrong}
				w := newWorld(t, func(m *dhcpv6.Message) [][]byte {
					if rapid {
						return [][]byte{answerTo(m, dhcpv6.MessageTypeReply, both...)}
					}
					return honest(both...)(m)
				}, func(cfg *Config) { cfg.RapidCommit = rapid })
				l, err := w.tryAcquire()
				must.That(t, errors.Is(err, dhcpc.ErrTimeout), "lease %+v, %v", l, err)
				expect.That(t, !slices.Contains(w.log, "REQUEST"), "sent %v", w.log)
				// Another server is there too, and is heard second.
				w = newWorld(t, func(m *dhcpv6.Message) [][]byte {
					if rapid {
						return [][]byte{answerTo(m, dhcpv6.MessageTypeReply, both...), answerTo(m, dhcpv6.MessageTypeReply, func(r *reply) { r.rapid = true })}
					}
					return append(honest(both...)(m), honest()(m)...)
				}, func(cfg *Config) { cfg.RapidCommit = rapid })
				l = w.acquire()
				expect.That(t, l.Address == clientIP(), "lease of %s; sent %v", l.Address, w.log)
			})
		}
	}
}

// In a REPLY to a REQUEST: the server is passed over for another.
func TestAServerThatRefusesWhatItAdvertisedIsPassedOver(t *testing.T) {
	for _, c := range []iana.StatusCode{iana.StatusNoAddrsAvail, iana.StatusNotOnLink, 4711} {
		w := newWorld(t, func(m *dhcpv6.Message) [][]byte {
			rogue := func(r *reply) { r.server, r.preference, r.preferenceIsToldOf = rogueDUID(), 255, true }
			switch {
			case m.MessageType == dhcpv6.MessageTypeSolicit:
				return [][]byte{answerTo(m, dhcpv6.MessageTypeAdvertise, rogue), answerTo(m, dhcpv6.MessageTypeAdvertise)}
			case string(m.GetOneOption(dhcpv6.OptionServerID).ToBytes()) == string(rogueDUID()):
				return [][]byte{answerTo(m, dhcpv6.MessageTypeReply), answerTo(m, dhcpv6.MessageTypeReply, rogue, func(r *reply) { r.addrs, r.inIA = nil, status(c) })}
			}
			return honest()(m)
		})
		l := w.acquire()
		expect.That(t, l.Server.String() == serverDUID().String(), "%s: lease of %s", c, l.Server)
		expect.Equal(t, strings.Join(w.log, " "), "SOLICIT REQUEST SOLICIT REQUEST", "%s: sent", c)
	}
}

// A renewal that a nasty server answers leaves the lease as it was, to its end.
func TestANastyServerEndsNoLeaseThatItDoesNotRenew(t *testing.T) {
	for name, wrong := range nasty() {
		if name == "no time" || name == "a status nobody knows" {
			continue
		}
		t.Run(name, func(t *testing.T) {
			w := newWorld(t, honest())
			l := w.acquire()
			w.serve, w.log, w.at = honest(wrong), nil, nil
			start := w.now
			got := w.keep(l, w.asks("SOLICIT"))
			if strings.Join(got, " ") != "2001:db8::7 > -" || w.now.Sub(start) < 3000*time.Second-time.Second {
				t.Errorf("applied %q after %s", got, w.now.Sub(start))
			}
		})
	}
}

func TestAServerMayEndALease(t *testing.T) {
	w := newWorld(t, honest())
	l := w.acquire()
	w.serve = honest(func(r *reply) { r.addrs[0].preferred, r.addrs[0].valid = 0, 0 })
	w.log = nil
	got := w.keep(l, w.asks("SOLICIT"))
	expect.That(t, got[0] == "2001:db8::7 > -" && w.log[0] == "RENEW", "applied %q, sent %v", got, w.log)
}

func TestTimesOfALease(t *testing.T) {
	const s = time.Second
	for name, c := range map[string]struct {
		t1, t2, preferred, valid time.Duration
		want                     [4]time.Duration // T1, T2, preferred, valid; -1 is never
	}{
		"as told":               {100 * s, 200 * s, 300 * s, 400 * s, [4]time.Duration{100 * s, 200 * s, 300 * s, 400 * s}},
		"left to the client":    {0, 0, 300 * s, 400 * s, [4]time.Duration{150 * s, 240 * s, 300 * s, 400 * s}},
		"T2 left to the client": {100 * s, 0, 300 * s, 400 * s, [4]time.Duration{100 * s, 240 * s, 300 * s, 400 * s}},
		"T1 left to the client": {0, 100 * s, 300 * s, 400 * s, [4]time.Duration{100 * s, 100 * s, 300 * s, 400 * s}},
		"never preferred":       {0, 0, 0, 400 * s, [4]time.Duration{200 * s, 320 * s, 0, 400 * s}},
		"after the end":         {500 * s, 600 * s, 300 * s, 400 * s, [4]time.Duration{150 * s, 240 * s, 300 * s, 400 * s}},
		"T1 and T2 infinite":    {forever, forever, 300 * s, 400 * s, [4]time.Duration{150 * s, 240 * s, 300 * s, 400 * s}},
		"a second":              {0, 0, s, s, [4]time.Duration{s, s, s, s}},
		"too often":             {s, s, 300 * s, 400 * s, [4]time.Duration{2 * s, 2 * s, 300 * s, 400 * s}},
		"for ever":              {100 * s, 200 * s, forever, forever, [4]time.Duration{-1, -1, -1, -1}},
		"valid for ever":        {100 * s, 200 * s, 300 * s, forever, [4]time.Duration{-1, -1, 300 * s, -1}},
		"almost for ever":       {0, 0, (math.MaxUint32 - 1) * s, (math.MaxUint32 - 1) * s, [4]time.Duration{(math.MaxUint32 - 1) * s / 2, (math.MaxUint32 - 1) * s / 5 * 4, (math.MaxUint32 - 1) * s, (math.MaxUint32 - 1) * s}},
	} {
		w := newWorld(t, honest(func(r *reply) {
			r.t1, r.t2, r.addrs[0].preferred, r.addrs[0].valid = c.t1, c.t2, c.preferred, c.valid
		}))
		l := w.acquire()
		for i, at := range []time.Time{l.Renew, l.Rebind, l.Preferred, l.Expire} {
			got := time.Duration(-1)
			if !at.IsZero() {
				got = at.Sub(l.Obtained)
			}
			expect.Equal(t, got, c.want[i], "%s: time %d is", name, i)
		}
		expect.Success(t, l.Validate(), "%s", name)
	}
}

func TestHugeOptionsAreCut(t *testing.T) {
	var servers []net.IP
	for i := range 1000 {
		servers = append(servers, net.ParseIP("2001:db8::53").To16()[:15:15])
		servers[i] = append(servers[i], byte(i))
	}
	w := newWorld(t, honest(func(r *reply) {
		r.more = []dhcpv6.Option{
			dhcpv6.OptDNS(servers...), &dhcpv6.OptionGeneric{OptionCode: 56, OptionData: make([]byte, 5000)},
			&dhcpv6.OptionGeneric{OptionCode: dhcpv6.OptionFQDN, OptionData: []byte{0, 77, 1}}, // another option is cut short
		}
		for i := range 200 {
			r.addrs = append(r.addrs, grant{netip.AddrFrom16([16]byte{0xff, byte(i)}), time.Hour, time.Hour})
		}
	}))
	l := w.acquire()
	expect.That(t, len(l.DNS) == maxServers && len(l.Ignored) <= maxIgnored,
		"%d servers, ignored %q", len(l.DNS), l.Ignored)
}

func TestBytesThatAreNoMessage(t *testing.T) {
	for _, data := range [][]byte{{}, {7}, {7, 0, 0}, {7, 0, 0, 0, 0, 3}, {7, 0, 0, 0, 0, 3, 0, 9, 1}, make([]byte, 65536)} {
		w := newWorld(t, func(m *dhcpv6.Message) [][]byte {
			if len(data) >= 4 {
				copy(data[1:], m.TransactionID[:])
			}
			return append([][]byte{data}, honest()(m)...)
		})
		w.acquire()
	}
}
