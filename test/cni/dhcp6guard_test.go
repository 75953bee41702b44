package cni

import (
	"net"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/tombolo-cni/tombolo/internal/nstest"
)

// heardFrom has a pod send a datagram to the router from each of some addresses, and then from its own until that
// one arrives: they take one way, so what has not come before was dropped. It gives those that came.
func (l *lan6) heardFrom(t *testing.T, p *pod, own netip.Addr, sources ...netip.Addr) []netip.Addr {
	t.Helper()
	var in *net.UDPConn
	err := l.router.Do(func() error {
		var err error
		in, err = net.ListenUDP("udp6", net.UDPAddrFromAddrPort(netip.AddrPortFrom(nstest.Addr(router6), 0)))
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	defer in.Close()
	to := in.LocalAddr().(*net.UDPAddr)
	say := func(from netip.Addr) {
		t.Helper()
		if err := p.NS.Do(func() error {
			out, err := net.DialUDP("udp6", net.UDPAddrFromAddrPort(netip.AddrPortFrom(from, 0)), to)
			if err != nil {
				return err
			}
			defer out.Close()
			_, err = out.Write([]byte("?"))
			return err
		}); err != nil {
			t.Fatalf("from %s: %v", from, err)
		}
	}
	for _, a := range sources {
		nstest.Run(t, p.NS, "ip", "address", "replace", a.String()+"/128", "dev", "lo", "nodad")
	}
	nstest.WaitForAddresses(t, p.NS)
	wantPing(t, p.NS, router6) // so that the pod knows the router's MAC
	for _, a := range sources {
		say(a)
	}
	var heard []netip.Addr
	for end := time.Now().Add(patience); time.Now().Before(end); {
		say(own)
		if err := in.SetReadDeadline(time.Now().Add(time.Second)); err != nil {
			t.Fatal(err)
		}
		for {
			_, from, err := in.ReadFromUDPAddrPort(make([]byte, 16))
			if err != nil {
				break
			}
			if from.Addr() == own {
				return heard
			}
			heard = append(heard, from.Addr())
		}
	}
	t.Fatalf("nothing came from %s", own)
	return nil
}

// prefixOf is what is delegated to a pod.
func prefixOf(t *testing.T, p *pod) netip.Prefix {
	t.Helper()
	for line := range strings.Lines(nstest.Run(t, p.NS, "ip", "-6", "route", "show", "type", "unreachable")) {
		if found, err := netip.ParsePrefix(strings.Fields(line)[1]); err == nil && found.Bits() > 0 {
			return found
		}
	}
	return netip.Prefix{}
}

func TestAGuardedPodSendsFromItsDelegatedPrefixAndNothingWider(t *testing.T) {
	t.Parallel()
	l := newLAN6(t)
	server := l.newKea6(t)
	pools := func(prefix string) conf {
		return conf{"pd-pools": []conf{{"prefix": prefix, "prefix-len": 48, "delegated-len": 62}}}
	}
	l.startKea6(t, server, pools("fd00:60::"))
	k := l.keep(t)
	w := l.leasing(conf{"ipv6Prefix": 62})
	free := w.with(conf{"lanGuard": false})
	free.name = "free"
	a, b, unguarded := l.pod("a"), l.pod("b"), l.pod("u")
	own := map[*pod]netip.Addr{a: six(t, w.add(a)), b: six(t, w.add(b)), unguarded: six(t, free.add(unguarded))}
	for p := range own {
		nstest.Run(t, p.NS, "ip", "route", "add", "fd00:50::/64", "dev", "eth0") // no router advertises it here
	}
	last := func(p netip.Prefix) netip.Addr { return nextPrefix(p).Prev() }
	// sends has a pod try all kinds of addresses, of which some are to be heard.
	sends := func(p *pod, want ...netip.Addr) {
		t.Helper()
		mine, others := prefixOf(t, p), prefixOf(t, b)
		tried := []netip.Addr{mine.Addr().Next(), last(mine), mine.Addr().Prev(), nextPrefix(mine), others.Addr().Next(), own[b], nstest.Addr("2001:db8::7")}
		if want == nil {
			want = tried[:2]
		}
		if got := l.heardFrom(t, p, own[p], tried...); !slices.Equal(got, want) {
			t.Errorf("of %v there came %v, want %v", tried, got, want)
		}
	}
	mine, others := prefixOf(t, unguarded), prefixOf(t, b)
	sends(unguarded, mine.Addr().Next(), last(mine), mine.Addr().Prev(), nextPrefix(mine), others.Addr().Next(), own[b], nstest.Addr("2001:db8::7"))
	sends(a)
	mine = prefixOf(t, a)
	if mine.Bits() != 62 || mine == others {
		t.Fatalf("prefixes %s and %s", mine, others)
	}
	// It is reached there.
	nstest.Run(t, l.router, "ip", "route", "add", mine.String(), "via", own[a].String(), "dev", "eth0")
	wantPing(t, l.router, mine.Addr().Next().String(), last(mine).String())

	for name, lose := range map[string]func(){
		"an element": func() {
			l.nft("delete element bridge tombolo guard-prefix { " + w.port(a) + " . " + mine.String() + " }")
		},
		"the set":     func() { l.nft("flush set bridge tombolo guard-prefix") },
		"the ruleset": func() { l.nft("flush ruleset") },
	} {
		k.freeze(t)
		lose()
		if err := w.check(a); err == nil || !strings.Contains(err.Error(), "guard-prefix") && name != "the ruleset" {
			t.Errorf("without %s, CHECK says: %v", name, err)
		}
		if out := l.operate("repair", "--state", l.state, "--leases", l.state+"-leases"); out.status != 0 {
			t.Errorf("repair without %s: %+v", name, out)
		}
		k.thaw(t)
		if err := w.check(a); err != nil {
			t.Errorf("after repair without %s: %v", name, err)
		}
		sends(a)
	}
	k.kill()
	l.keep(t)
	sends(a)

	// The server moves it, to a part of what it was in among others.
	renewed := func(prefix string) {
		t.Helper()
		server.stop()
		l.startKea6(t, server, pools(prefix))
		l.eventually(t, func() bool {
			return netip.MustParsePrefix(prefix+"/48").Contains(prefixOf(t, a).Addr()) && netip.MustParsePrefix(prefix+"/48").Contains(prefixOf(t, b).Addr()) &&
				w.check(a) == nil && w.check(b) == nil
		})
	}
	renewed("fd00:61::")
	if now := prefixOf(t, a); now == mine {
		t.Fatalf("the prefix is %s still", now)
	}
	sends(a)
	if got := l.heardFrom(t, a, own[a], mine.Addr().Next()); len(got) > 0 {
		t.Errorf("the guard lets pass what was delegated before: %v", got)
	}
	w.del(a)
	w.gc()
	free.del(unguarded)
	for _, p := range []*pod{a, b} {
		if left := l.nft("list set bridge tombolo guard-prefix"); strings.Contains(left, w.port(p)) {
			t.Errorf("left behind:\n%s", left)
		}
	}
	l.wantNoLeaseRecords()
}

// nextPrefix is the first address behind a prefix.
func nextPrefix(p netip.Prefix) netip.Addr {
	a := p.Addr().As16()
	for i := p.Bits() - 1; i >= 0; i-- {
		if a[i/8] ^= 0x80 >> (i % 8); a[i/8]&(0x80>>(i%8)) != 0 {
			break
		}
	}
	return netip.AddrFrom16(a)
}
