package uplink_test

import (
	"testing"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/nstest"
)

// flood sends datagrams to the host as fast as one processor can, some microseconds
// apart, while something is done, and gives how many were sent and lost.
func (l *lan) flood(tb testing.TB, do func()) (sent, lost int) {
	tb.Helper()
	host := unix.SockaddrInet4{Addr: nstest.Addr("10.0.0.5").As4()}
	var in, out int
	within(tb, l.host, func() error {
		var err error
		if in, err = unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0); err != nil {
			return err
		}
		if err = unix.Bind(in, &host); err != nil {
			return err
		}
		bound, err := unix.Getsockname(in)
		host = *bound.(*unix.SockaddrInet4)
		return err
	})
	defer unix.Close(in)
	within(tb, l.router, func() error {
		var err error
		if out, err = unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0); err != nil {
			return err
		}
		return unix.Connect(out, &host)
	})
	defer unix.Close(out)
	return nstest.Flood(tb, out, in, do, l.host, l.router)
}

func TestNoDatagramOfAFloodIsLost(t *testing.T) {
	l := newLAN(t)
	if err := nstest.Ping(t, l.router, nstest.Addr("10.0.0.5")); err != nil {
		t.Fatal(err)
	}
	var sent, lost int
	for range 3 {
		n, gone := l.flood(t, func() {
			rec, j := take(t, l, toBridge())
			if len(rec.Notes) > 0 {
				t.Errorf("notes: %q", rec.Notes)
			}
			if err := l.conn.Restore(t.Context(), rec, j); err != nil {
				t.Fatal(err)
			}
		})
		sent, lost = sent+n, lost+gone
	}
	if lost > 0 {
		t.Errorf("%d of %d datagrams to the host were lost", lost, sent)
	}
}

// TestAPortLosesDatagramsWithoutADetour shows what the detour is there for.
func TestAPortLosesDatagramsWithoutADetour(t *testing.T) {
	l := newLAN(t)
	run(t, l.host, "link add br0 type bridge", "link set br0 addrgenmode none address "+hostMAC, "link set br0 up",
		"addr add 10.0.0.5/24 dev br0 noprefixroute", "link add port0 type veth peer name port1", "link set port1 up", "link set port0 master br0 up")
	if err := nstest.Ping(t, l.router, nstest.Addr("10.0.0.5")); err != nil {
		t.Fatal(err)
	}
	for range 10 {
		sent, lost := l.flood(t, func() {
			for range 20 {
				run(t, l.host, "link set eth0 master br0", "link set eth0 nomaster")
			}
		})
		t.Logf("%d of %d lost", lost, sent)
		if lost > 0 {
			return
		}
	}
	t.Log("none was lost: on this machine it cannot be seen what the detour is for")
}
