package dhcp6

import (
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"reflect"
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

func TestALeaseTakesFourMessages(t *testing.T) {
	w := newWorld(t, honest())
	l := w.acquire()
	expect.Equal(t, strings.Join(w.log, " "), "SOLICIT REQUEST", "sent")
	expect.That(t, l.Address == clientIP() && l.Renew.Sub(l.Obtained) == 1000*time.Second &&
		l.Rebind.Sub(l.Obtained) == 1600*time.Second && l.Preferred.Sub(l.Obtained) == 2000*time.Second && l.Expire.Sub(l.Obtained) == 3000*time.Second,
		"lease %+v", l)
	expect.That(t, fmt.Sprint(l.DNS, l.Search) == "[2001:db8::53 fe80::53] [example.org]" &&
		strings.Contains(fmt.Sprint(l.Ignored), `bad\nname`),
		"DNS %v, search %q, ignored %q", l.DNS, l.Search, l.Ignored)
	r := w.sent[1]
	got := r.Options.GetOne(dhcpv6.OptionServerID).ToBytes()
	expect.That(t, string(got) == string(serverDUID()), "REQUEST to %x", got)
	if ia := r.Options.OneIANA(); ia == nil || ia.IaId != [4]byte{1, 2, 3, 4} || !ia.Options.OneAddress().IPv6Addr.Equal(net.IP(clientIP().AsSlice())) {
		t.Errorf("REQUEST for %v", ia)
	}
	name := r.Options.FQDN()
	expect.That(t, name != nil && name.DomainName.Labels[0] == "pod-7", "REQUEST by the name %v", name)
}

func TestRapidCommitTakesTwoMessagesAndNoWait(t *testing.T) {
	w := newWorld(t, func(m *dhcpv6.Message) [][]byte {
		expect.That(t, m.GetOneOption(dhcpv6.OptionRapidCommit) != nil, "not asked for")
		return [][]byte{answerTo(m, dhcpv6.MessageTypeReply, func(r *reply) { r.rapid = true })}
	}, func(cfg *Config) { cfg.RapidCommit = true })
	if w.acquire(); strings.Join(w.log, " ") != "SOLICIT" || w.now != epoch() {
		t.Errorf("sent %v, waited %s", w.log, w.now.Sub(epoch()))
	}
	// A REPLY without that option is not what was asked for.
	w = newWorld(t, func(m *dhcpv6.Message) [][]byte { return [][]byte{answerTo(m, dhcpv6.MessageTypeReply)} })
	l, err := w.tryAcquire()
	expect.That(t, errors.Is(err, dhcpc.ErrTimeout) && !slices.Contains(w.log, "REQUEST"), "%v, %v", l, err)
}

func TestTheServerOfTheHighestPreferenceIsTakenAndThatOf255AtOnce(t *testing.T) {
	prefer := func(duid dhcpc.Hex, n int) func(*reply) {
		return func(r *reply) { r.server, r.preference, r.preferenceIsToldOf = duid, n, true }
	}
	for _, n := range []int{10, 255} {
		w := newWorld(t, func(m *dhcpv6.Message) [][]byte {
			if m.MessageType != dhcpv6.MessageTypeSolicit {
				return [][]byte{answerTo(m, dhcpv6.MessageTypeReply, prefer(rogueDUID(), n))}
			}
			return [][]byte{answerTo(m, dhcpv6.MessageTypeAdvertise), answerTo(m, dhcpv6.MessageTypeAdvertise, prefer(rogueDUID(), n)),
				answerTo(m, dhcpv6.MessageTypeAdvertise, prefer(serverDUID(), 9))}
		})
		l := w.acquire()
		if waited := w.now.Sub(epoch()); l.Server.String() != rogueDUID().String() || (waited == 0) != (n == 255) {
			t.Errorf("preference %d: took %s after %s", n, l.Server, waited)
		}
	}
}

// RFC 8415, section 15: a second, doubled, a tenth more or less; at most SOL_MAX_RT.
func TestSolicitsAreRepeatedLessAndLessOften(t *testing.T) {
	w := newWorld(t, nil)
	w.timeout = 24 * time.Hour
	_, err := w.tryAcquire()
	must.That(t, errors.Is(err, dhcpc.ErrTimeout) && strings.Contains(err.Error(), "ports 546 and 547"), "%v", err)
	want := time.Second
	for i := 1; i < len(w.at); i++ {
		pause := w.at[i] - w.at[i-1]
		expect.That(t, (i != 1 || pause >= want) && pause >= want*7/10 && pause <= want*14/10,
			"pause %d: %s, want some %s", i, pause, want)
		want = min(2*pause, time.Hour)
	}
	elapsed := w.sent[2].Options.ElapsedTime()
	if off := (elapsed - w.at[2]).Abs(); off > 10*time.Millisecond { // the unit of the option
		t.Errorf("elapsed %s, want %s", elapsed, w.at[2])
	}
	w = newWorld(t, honest(func(r *reply) { r.top, r.noIA, r.more = status(iana.StatusNoAddrsAvail), true, nil }))
	w.timeout = time.Hour
	_, err = w.tryAcquire()
	must.That(t, err != nil && strings.Contains(err.Error(), "so it is"), "%v", err)
}

func TestALeaseIsRenewedAtT1AndRebindsAtT2(t *testing.T) {
	w := newWorld(t, honest())
	l := w.acquire()
	w.log, w.sent, w.at = nil, nil, nil
	got := w.keep(l, w.hasSent(3))
	expect.That(t, len(got) == 3 && got[0] == "2001:db8::7 > 2001:db8::7", "applied %q", got)
	if got := strings.Join(w.log, " "); got != "RENEW RENEW RENEW" || w.at[1]-w.at[0] != 1000*time.Second {
		t.Errorf("sent %s at %s", got, w.at)
	}
	// The server goes away.
	l = w.acquire()
	w.serve, w.log, w.at, w.sent = nil, nil, nil, nil
	start := w.now
	applied := w.keep(l, w.asks("SOLICIT"))
	expect.Equal(t, strings.Join(applied, " "), "2001:db8::7 > -", "applied")
	for i, m := range w.sent {
		at := w.at[i] - start.Sub(epoch())
		toServer := m.GetOneOption(dhcpv6.OptionServerID) != nil
		switch m.MessageType {
		case dhcpv6.MessageTypeRenew:
			expect.That(t, toServer && at >= 1000*time.Second && at < 1600*time.Second,
				"RENEW at %s, to a server: %v", at, toServer)
		case dhcpv6.MessageTypeRebind:
			expect.That(t, !toServer && at >= 1600*time.Second && at < 3000*time.Second,
				"REBIND at %s, to a server: %v", at, toServer)
		case dhcpv6.MessageTypeSolicit:
			expect.That(t, at >= 3000*time.Second && m.Options.OneIANA().Options.OneAddress().IPv6Addr.Equal(net.IP(clientIP().AsSlice())),
				"SOLICIT at %s", at)
		default:
			t.Errorf("sent %s", m.MessageType)
		}
	}
	expect.That(t, slices.Contains(w.log, "REBIND"), "sent %v", w.log)
}

func TestAnotherServerMayRebind(t *testing.T) {
	w := newWorld(t, honest())
	l := w.acquire()
	w.serve = func(m *dhcpv6.Message) [][]byte {
		if m.MessageType != dhcpv6.MessageTypeRebind {
			// To a RENEW only the server that was asked may answer.
			return [][]byte{answerTo(m, dhcpv6.MessageTypeReply, func(r *reply) { r.server, r.t1 = rogueDUID(), 77*time.Second })}
		}
		return [][]byte{answerTo(m, dhcpv6.MessageTypeReply, func(r *reply) { r.server = rogueDUID() })}
	}
	got := w.keep(l, func() bool { return slices.Contains(w.log, "REBIND") && len(w.queue) == 0 })
	expect.That(t, strings.Join(got, " ") == "2001:db8::7 > 2001:db8::7" && w.log[len(w.log)-1] == "REBIND",
		"applied %q, sent %v", got, w.log)
}

// RFC 8415, section 18.2.10.1.
func TestAServerThatHasForgottenIsAskedAnew(t *testing.T) {
	w := newWorld(t, honest())
	l := w.acquire()
	w.log = nil
	w.serve = func(m *dhcpv6.Message) [][]byte {
		if m.MessageType == dhcpv6.MessageTypeRenew {
			return [][]byte{answerTo(m, dhcpv6.MessageTypeReply, func(r *reply) { r.addrs, r.inIA = nil, status(iana.StatusNoBinding) })}
		}
		return honest()(m)
	}
	got := w.keep(l, w.hasSent(2))
	expect.That(t, strings.Join(got, " ") == "2001:db8::7 > 2001:db8::7", "applied %q", got)
	expect.Equal(t, strings.Join(w.log, " "), "RENEW REQUEST", "sent")
}

func TestAServerMayMoveALease(t *testing.T) {
	w := newWorld(t, honest())
	l := w.acquire()
	w.serve = honest(func(r *reply) {
		r.addrs = []grant{{clientIP(), 0, 0}, {otherIP(), 2000 * time.Second, 3000 * time.Second}}
	})
	w.log = nil
	got := w.keep(l, w.hasSent(2))
	expect.That(t, len(got) >= 2 && got[0] == "2001:db8::7 > -" && got[1] == "- > 2001:db8::8", "applied %q", got)
}

func TestAnAddressInUseIsDeclined(t *testing.T) {
	w := newWorld(t, nil)
	w.inUse[clientIP()] = true
	w.serve = func(m *dhcpv6.Message) [][]byte {
		w.inUse[clientIP()] = m.MessageType != dhcpv6.MessageTypeDecline && w.inUse[clientIP()]
		return honest()(m)
	}
	l := w.acquire()
	if got := strings.Join(w.log, " "); got != "SOLICIT REQUEST DECLINE SOLICIT REQUEST" || l.Address != clientIP() {
		t.Errorf("sent %s, lease of %s", got, l.Address)
	}
	a := w.sent[2].Options.OneIANA().Options.OneAddress()
	expect.That(t, a.IPv6Addr.Equal(net.IP(clientIP().AsSlice())), "declined %s", a.IPv6Addr)
	expect.That(t, w.sent[3].Options.OneIANA().Options.OneAddress() == nil, "asked for the same address again")
	// An address that is always in use.
	w = newWorld(t, honest())
	w.inUse[clientIP()] = true
	_, err := w.tryAcquire()
	expect.That(t, errors.Is(err, dhcpc.ErrDeclined) && errors.Is(err, dhcpc.ErrTimeout), "%v", err)
}

func TestARefusedAddressIsPassedOverAndDeclined(t *testing.T) {
	refuse := func(cfg *Config) { cfg.Refuse = func(*Lease6, *Lease6) error { return errors.New("the host has it") } }
	w := newWorld(t, honest(), refuse)
	if _, err := w.tryAcquire(); err == nil || !strings.Contains(err.Error(), "the host has it") || slices.Contains(w.log, "REQUEST") {
		t.Errorf("%v; sent %v", err, w.log)
	}
	w = newWorld(t, func(m *dhcpv6.Message) [][]byte {
		return [][]byte{answerTo(m, dhcpv6.MessageTypeReply, func(r *reply) { r.rapid = true })}
	}, refuse, func(cfg *Config) { cfg.RapidCommit = true })
	_, err := w.tryAcquire()
	expect.That(t, errors.Is(err, dhcpc.ErrRefused) && w.log[1] == "DECLINE", "%v; sent %v", err, w.log)
}

func TestInformBringsDNSAndNoLease(t *testing.T) {
	w := newWorld(t, honest(func(r *reply) {
		r.noIA = true
		r.more = append(r.more, dhcpv6.OptInformationRefreshTime(time.Second))
	}))
	var info *Information
	inform := func() error {
		return w.run(w.m.Inform(w.now, 1), w.timeout, func(o Output) bool { info = o.Information; return info != nil })
	}
	must.Succeed(t, inform())
	expect.Equal(t, fmt.Sprint(info.DNS, info.Search, info.Refresh), "[2001:db8::53 fe80::53] [example.org] 10m0s", "%+v", info)
	expect.That(t, len(w.log) == 1 && w.sent[0].Options.OneIANA() == nil, "sent %v", w.sent)
	w.serve = nil
	expect.Is(t, inform(), dhcpc.ErrTimeout)
}

func TestAReleaseNamesServerAndAddress(t *testing.T) {
	data := must.Of(Release(newWorld(t, honest()).acquire(), 7)).Get(t)
	m := must.Of(dhcpv6.MessageFromBytes(data)).Get(t)
	expect.That(t, m.MessageType == dhcpv6.MessageTypeRelease &&
		string(m.GetOneOption(dhcpv6.OptionServerID).ToBytes()) == string(serverDUID()) && m.Options.OneIANA().Options.OneAddress().IPv6Addr.Equal(net.IP(clientIP().AsSlice())),
		"sent %s", m)
}

func TestALeaseSurvivesItsRecord(t *testing.T) {
	w := newWorld(t, honest())
	l := w.acquire()
	data := must.Of(json.Marshal(l)).Get(t)
	var read Lease6
	if err := json.Unmarshal(data, &read); err != nil || !reflect.DeepEqual(&read, l) {
		t.Errorf("%v\n%+v\n%+v", err, read, *l)
	}
}

func TestAClockThatWasSetBackHasTheServersAsked(t *testing.T) {
	w := newWorld(t, honest())
	l := w.acquire()
	w.log, w.now = nil, epoch().Add(-24*time.Hour)
	w.keep(l, w.hasSent(1))
	expect.That(t, w.log[0] == "REBIND" && !w.now.After(epoch().Add(-23*time.Hour)), "sent %v at %s", w.log, w.now)
}

func TestWhatCannotBeMeantIsAnError(t *testing.T) {
	for name, cfg := range map[string]*Config{
		"no configuration":     nil,
		"no DUID":              {},
		"a long DUID":          {DUID: make(dhcpc.Hex, 131)},
		"an IPv4 address":      {DUID: ownDUID(), Address: netip.MustParseAddr("192.0.2.1")},
		"a link-local address": {DUID: ownDUID(), Address: netip.MustParseAddr("fe80::1")},
		"a long host name":     {DUID: ownDUID(), HostName: strings.Repeat("a", 254)},
	} {
		_, err := NewMachine(cfg)
		expect.That(t, errors.Is(err, tombolo.ErrInvalid), "%s: %v", name, err)
	}
	expect.Is(t, expect.Err(Release(nil, 0)), tombolo.ErrInvalid)
	err := new(Lease6).Validate()
	expect.That(t, errors.Is(err, tombolo.ErrInvalid) && err.Error() == "invalid lease: it has no address", "%v", err)
}
