package cni

import (
	"fmt"
	"io"
	"net"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
)

// When the cable is plugged in again it may be to another network: RFC 8415, section 18.2.3.
func TestServersAreAskedAgainWhenAnUplinkHasItsCarrierAgain(t *testing.T) {
	t.Parallel()
	const cable, message = "cable0", "CONFIRM"
	l := newLAN6Of(t, homeLANBehind(t, cable))
	server := l.newKea6(t)
	// Nothing is due to be renewed in the test's time.
	in := func(network string) conf {
		return conf{"subnet": network + "/64", "pools": []conf{{"pool": network + "100 - " + network + "1ff"}},
			"valid-lifetime": 7200, "preferred-lifetime": 7200, "renew-timer": 3600, "rebind-timer": 5400}
	}
	l.startKea6(t, server, in("fd00:50::"))
	k := l.keep(t)
	w := l.leasing(conf{})
	p := l.pod("a")
	own := six(t, w.add(p))
	nstest.Run(t, p.NS, "ip", "route", "add", "fd00:50::/64", "dev", "eth0") // no router advertises it here
	// A route forgets its source where that is deleted, if only for a moment.
	const marker = "2001:db8:99::/64"
	nstest.Run(t, p.NS, "ip", "route", "add", marker, "via", "fe80::1", "dev", "eth0", "src", own.String())
	marked := func() bool {
		return strings.Contains(nstest.Run(t, p.NS, "ip", "-6", "route", "show", marker), " src "+own.String()+" ")
	}
	must.That(t, marked(), "there is no mark")
	says := l.flow6(t, p, own)
	says("before")
	n := server.heard(t, message)
	must.That(t, n == 0, "the server heard %d of %s", n, message)
	pull := func() {
		t.Helper()
		nstest.Run(t, l.router, "ip", "link", "set", cable, "down")
		// The state changes when the kernel announces the loss, up to a second after the carrier (net/core/link_watch.c).
		l.eventually(t, func() bool { return !strings.Contains(l.run("ip", "link", "show", "eth0"), " state UP ") })
	}
	plug := func() {
		t.Helper()
		heard := server.heard(t, message)
		nstest.Run(t, l.router, "ip", "link", "set", cable, "up")
		l.eventually(t, func() bool { return server.heard(t, message) > heard })
	}
	pull()
	plug()
	says("after")
	l.eventually(t, func() bool { return w.check(p) == nil })
	expect.That(t, marked(), "the pod's address has gone meanwhile")
	n = server.heard(t, "SOLICIT")
	expect.That(t, n == 1, "%d SOLICITs, want that of the ADD", n)

	// The other end of the cable is in another network now.
	pull()
	server.stop()
	l.startKea6(t, server, in("fd00:51::"))
	plug()
	l.eventually(t, func() bool {
		shown := nstest.Run(t, p.NS, "ip", "-6", "-o", "address", "show", "dev", "eth0", "scope", "global")
		return strings.Contains(shown, "fd00:51::1") && !strings.Contains(shown, own.String()+"/") && w.check(p) == nil
	})
	w.del(p)
	l.wantNoLeaseRecords()
	k.kill()
}

// flow6 opens a connection from a pod's address to the router; what it gives says something over it, and hears it again.
func (l *lan6) flow6(t *testing.T, p *pod, own netip.Addr) (says func(what string)) {
	t.Helper()
	var in net.Listener
	must.Succeed(t, l.router.Do(func() (err error) {
		in, err = net.Listen("tcp6", net.JoinHostPort(router6, "0"))
		return err
	}))
	t.Cleanup(func() { in.Close() })
	go func() {
		conn, err := in.Accept()
		if err != nil {
			return // the test's end
		}
		defer conn.Close()
		_, _ = io.Copy(conn, conn)
	}()
	var conn net.Conn
	must.Succeed(t, p.NS.Do(func() (err error) {
		from := net.Dialer{LocalAddr: net.TCPAddrFromAddrPort(netip.AddrPortFrom(own, 0))}
		conn, err = from.DialContext(t.Context(), "tcp6", in.Addr().String())
		return err
	}))
	t.Cleanup(func() { conn.Close() })
	return func(what string) {
		t.Helper()
		err := conn.SetDeadline(time.Now().Add(patience))
		if err == nil {
			_, err = fmt.Fprint(conn, what)
		}
		heard := make([]byte, len(what))
		if err == nil {
			_, err = io.ReadFull(conn, heard)
		}
		expect.That(t, err == nil && string(heard) == what, "said %q, heard %q: %v", what, heard, err)
	}
}
