package keeper

import (
	"context"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/dhcpc"
	"github.com/tombolo-cni/tombolo/dhcpc/transport"
	"github.com/tombolo-cni/tombolo/internal/lease"
	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
)

// trusting is a node whose keeper believes what it hears in a pod.
type trusting struct{ kernel }

func (n trusting) enter(r *lease.Record) (pod, error) {
	p, err := n.kernel.enter(r)
	if err != nil {
		return nil, err
	}
	return trustingPod{p.(*podInterface)}, nil
}

type trustingPod struct{ *podInterface }

func (p trustingPod) dial(ctx context.Context, local netip.Addr) (dhcpc.Transport[*dhcpc.Packet], error) {
	return transport.Dialer(&transport.Config{NetNS: p.ns, Link: p.Index, MAC: []byte(p.r.Client.MAC)})(ctx, local)
}

// Somebody has all rights in a pod's namespace, and has a server of the pod's own refuse
// its lease and then give it another's address: the guard would let the pod send from
// there, and its published port lead there.
func TestAPodThatAnswersItsRenewalsKeepsWhatTheLANGaveIt(t *testing.T) {
	t.Parallel()
	const stolen = "10.9.7.7"
	for _, way := range nstest.Diversions() {
		for _, heard := range []string{"in the pod", "outside of it"} {
			t.Run(way+", answers heard "+heard, func(t *testing.T) {
				t.Parallel()
				m, _ := newMovable(t, time.Hour)
				p := m.pod
				rogue := nstest.Divert(t, p.ns, "eth0", way)
				nstest.Run(t, rogue, "ip", "link", "set", "eth0", "address", nstest.MAC(t, m.remote, "eth0"))
				nstest.Run(t, rogue, "ip", "address", "add", "10.9.0.1/16", "dev", "eth0")
				s := m.serveIn(rogue, time.Hour)
				s.set(func(s *server) { s.refuse, s.base = true, netip.MustParseAddr(stolen).Prev() })
				due(p.record)
				m.write(p.record)
				if heard == "in the pod" {
					m.lan.node = trusting{m.kernel()}
				}
				m.keeper()
				if way == "renamed" { // the keeper finds the interface whatever its name, and asks the LAN
					until(t, "the lease is renewed", func() bool { return m.load(p).Lease.Renew.After(time.Now()) })
					expect.Equal(t, s.count("REQUEST"), 0, "requests to the pod's server")
					return
				}
				if heard == "in the pod" {
					m.settled(stolen)
					if got := nstest.Run(t, m.host, "nft", "list", "ruleset"); !strings.Contains(got, stolen+" ") {
						t.Fatalf("the attack does not work, so that the test shows nothing:\n%s", got)
					}
					return
				}
				// After the refusal the keeper asks again, as it does where nobody answers.
				until(t, "the pod's server refuses", func() bool { return s.count("sent NAK") == 1 })
				until(t, "it is asked again", func() bool { return s.count("REQUEST") >= 2 })
				if s.count("DISCOVER") != 0 {
					t.Error("the keeper believes the pod's server, and looks for another lease")
				}
				if r := m.load(p); r.State != lease.Bound || r.Lease.Address != p.record.Lease.Address {
					t.Errorf("the lease is %s, of %s", r.State, r.Lease.Address)
				}
				if got := nstest.Run(t, m.host, "nft", "list", "ruleset"); strings.Contains(got, stolen) || !strings.Contains(got, firstAddress+" ") {
					t.Errorf("the firewall has not %s alone:\n%s", firstAddress, got)
				}
			})
		}
	}
}

// A pod works with a machine elsewhere, which knows what the pod sees and answers it by way of the
// LAN's router.
func TestAnAnswerFromElsewhereIsNotBelieved(t *testing.T) {
	t.Parallel()
	l := newLAN(t)
	s := l.serve(time.Hour)
	p := l.add(1)
	// The server's own answers come from elsewhere now.
	s.set(func(s *server) { s.from = netip.MustParseAddrPort("198.51.100.1:67") })
	due(p.record)
	l.write(p.record)
	requests := s.count("REQUEST")
	stop := l.keeper()
	until(t, "it is asked at once by a broadcast, and again after a second", func() bool { return s.count("REQUEST") >= requests+3 })
	stop()
	// Two clocks are read one after the other.
	const read = time.Second
	if got := l.load(p); got.Lease.Expire.Sub(p.record.Lease.Expire).Abs() > read {
		t.Errorf("the lease runs until %s, want %s: who is elsewhere does not renew it", got.Lease.Expire, p.record.Lease.Expire)
	}
	s.set(func(s *server) { s.from = netip.AddrPort{} })
	l.keeper()
	until(t, "the server itself renews it", func() bool { return l.load(p).Lease.Expire.Sub(p.record.Lease.Expire) > read })
}

// A port that is not the pod's, by whatever name, is not listened at.
func TestNothingIsHeardAtAnothersPort(t *testing.T) {
	t.Parallel()
	l := newLAN(t)
	p := l.connect(1)
	pod := l.enter(p)
	defer pod.close()
	for _, alias := range []string{"", "tombolo:1:0123456789a:lan:", "tombolo:1:" + p.record.Hash()} {
		nstest.Run(t, l.host, "ip", "link", "set", p.record.HostIf, "alias", alias)
		if conn, err := pod.dial(t.Context(), netip.Addr{}); err == nil || !strings.Contains(err.Error(), "is another's") {
			conn.Close()
			t.Errorf("with alias %q: %v", alias, err)
		}
	}
	nstest.Run(t, l.host, "ip", "link", "del", p.record.HostIf)
	if _, err := pod.dial(t.Context(), netip.Addr{}); err == nil {
		t.Error("no error without a port")
	}
}

// By a lease that has ended nothing of the host's goes, wherever the pod has hidden its
// interface.
func TestAnEndedLeaseIsWithdrawnFromTheHostWhateverIsInThePod(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		name string
		hide func(m *movable)
	}{
		{"its interface has another name", func(m *movable) {
			nstest.Run(m, m.pod.ns, "sh", "-ec", "ip link set eth0 down; ip link set eth0 name hidden0; ip link set hidden0 up")
		}},
		{"its interface is in another namespace", func(m *movable) {
			nstest.Run(m, m.pod.ns, "ip", "link", "set", "eth0", "netns", nstest.Path(m, nstest.New(m)))
		}},
		{"another interface has the name", func(m *movable) { nstest.Divert(m, m.pod.ns, "eth0", "renamed") }},
		{"its namespace is out of reach", func(m *movable) {
			must.Succeed(m, unix.Unmount(m.pod.record.NetNS, unix.MNT_DETACH))
		}},
		{"its namespace's path leads nowhere", func(m *movable) {
			path := m.pod.record.NetNS
			err := unix.Unmount(path, unix.MNT_DETACH)
			if err == nil {
				err = os.Rename(path, filepath.Join(m.TempDir(), "elsewhere"))
			}
			must.Succeed(m, err)
		}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			m, s := newMovable(t, time.Hour)
			r := m.pod.record
			s.set(func(s *server) { s.silence = true })
			// An hour later, but for some seconds.
			ago := r.Lease.Left(time.Now()) - 3*time.Second
			for _, at := range []*time.Time{&r.Lease.Obtained, &r.Lease.Renew, &r.Lease.Rebind, &r.Lease.Expire} {
				*at = at.Add(-ago)
			}
			tt.hide(m)
			m.write(r)
			m.settled(firstAddress)
			m.keeper()
			m.settled("")
			if got := m.load(m.pod); got == nil || got.State != lease.Expired || got.Error == "" {
				t.Errorf("on record is %+v", got)
			}
			if got := nstest.Run(t, m.host, "nft", "list", "ruleset"); strings.Contains(got, firstAddress) {
				t.Errorf("the firewall has the address still:\n%s", got)
			}
		})
	}
}
