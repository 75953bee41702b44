package cni

import (
	"net"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
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
	must.Succeed(t, err)
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
		must.Succeed(t, in.SetReadDeadline(time.Now().Add(time.Second)))
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

func TestAGuardedPodSendsFromItsDHCPv6AddressAlone(t *testing.T) {
	t.Parallel()
	l := newLAN6(t)
	server := l.newKea6(t)
	l.startKea6(t, server, conf{})
	l.keep(t)
	w := l.leasing(conf{})
	free := w.with(conf{"lanGuard": false})
	free.name = "free"
	a, b, unguarded := l.pod("a"), l.pod("b"), l.pod("u")
	own := map[*pod]netip.Addr{a: six(t, w.add(a)), b: six(t, w.add(b)), unguarded: six(t, free.add(unguarded))}
	for p := range own {
		nstest.Run(t, p.NS, "ip", "route", "add", "fd00:50::/64", "dev", "eth0") // no router advertises it here
	}
	tried := []netip.Addr{own[b], nstest.Addr("fd00:50::77"), nstest.Addr("2001:db8::7")}
	got := l.heardFrom(t, unguarded, own[unguarded], tried...)
	must.That(t, slices.Equal(got, tried), "of an unguarded pod's %v there came %v: this tests nothing", tried, got)
	got = l.heardFrom(t, a, own[a], tried...)
	expect.That(t, len(got) == 0, "a guarded pod sent from %v", got)
}
