package nft

import (
	"context"
	"net/netip"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/nstest"
	"github.com/tombolo-cni/tombolo/netns"
)

// reaches says whether a ping is answered; where none should be, it does not wait
// long.
func reaches(tb testing.TB, from *netns.NS, to string, want bool) {
	tb.Helper()
	opt := nstest.Echo{}
	if !want {
		opt.Wait = 100 * time.Millisecond
	}
	// What is rejected is refused, in one way or another.
	if err := nstest.PingWith(tb, from, nstest.Addr(to), opt); (err == nil) != want {
		tb.Errorf("%s is reached: %v", to, err)
	}
}

// podsReach says whether the pod reaches elsewhere. Nobody reaches the pod unasked.
func (s *site) podsReach(tb testing.TB, want bool) {
	tb.Helper()
	var all sync.WaitGroup
	for _, to := range []string{far4, far6} {
		all.Go(func() { reaches(tb, s.pod, to, want) })
	}
	for _, to := range []string{pod4, pod6} {
		all.Go(func() { reaches(tb, s.outside, to, false) })
	}
	all.Wait()
}

func TestForwardPolicyOfDropDoesNotStopPods(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		name  string
		lines []string
	}{
		{"a policy", []string{"iptables -P FORWARD DROP"}},
		{"a rule", []string{"iptables -A FORWARD -j REJECT"}},
		{"Docker", docker()},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			s := newSite(t)
			mustEnsure(t, s.c, podnet())
			ep := pod("0123456789a", pod4, pod6)
			ep.Masquerade = false // so that outside knows whom to answer, and whom to call
			mustAdd(t, s.c, ep)
			s.podsReachBefore(t)
			script(t, s.host, tc.lines...)
			s.podsReach(t, false)
			mustAdmit(t, s.c, true)
			s.podsReach(t, true)
			script(t, s.host, saveRestore)
			s.podsReach(t, true)
			wantObstacles(t, s.host, Path{})

			script(t, s.host, "iptables -F", "iptables -P FORWARD DROP")
			s.podsReach(t, false)
			wantAdmitted(t, s.c, false)
			mustAdmit(t, s.c, true)
			s.podsReach(t, true)
			if err := s.c.Withdraw(context.Background()); err != nil {
				t.Fatal(err)
			}
			s.podsReach(t, false)
		})
	}
}

// podsReachBefore shows that without a firewall in the way everybody reaches
// everybody, so that what does not later on is the firewall's doing.
func (s *site) podsReachBefore(tb testing.TB) {
	tb.Helper()
	for _, to := range []string{pod4, pod6} {
		reaches(tb, s.outside, to, true)
	}
}

func TestRemedyForLegacyIPTablesHelpsPods(t *testing.T) {
	t.Parallel()
	s := newSite(t)
	mustEnsure(t, s.c, podnet())
	ep := pod("0123456789a", pod4, pod6)
	ep.Masquerade = false
	mustAdd(t, s.c, ep)
	legacy(t, s.host, "iptables -P FORWARD DROP")
	s.podsReach(t, false)
	mustAdmit(t, s.c, false)
	s.podsReach(t, false)
	for _, o := range wantObstacles(t, s.host, Path{}, policyLegacy, strings.Replace(policyLegacy, "iptables", "ip6tables", 1)) {
		nstest.Run(t, s.host, "sh", "-ec", o.Remedy)
	}
	s.podsReach(t, true)
}

func TestRemediesForOtherChainsHelpPods(t *testing.T) {
	t.Parallel()
	for name, ruleset := range map[string]string{
		"behind ours":        "table inet x { chain f { type filter hook forward priority filter; policy drop; }; }",
		"before ours":        "table inet x { chain f { type filter hook forward priority -200; policy drop; }; }",
		"iptables' own":      "table ip mangle { chain FORWARD { type filter hook forward priority mangle; policy drop; }; }; table ip6 mangle { chain FORWARD { type filter hook forward priority mangle; policy drop; }; }",
		"of ip, before ours": "table ip x { chain f { type filter hook forward priority raw; reject; }; }; table ip6 x { chain f { type filter hook forward priority raw; reject; }; }",
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := newSite(t)
			mustEnsure(t, s.c, podnet())
			ep := pod("0123456789a", pod4, pod6)
			ep.Masquerade = false
			mustAdd(t, s.c, ep)
			nft(t, s.host, ruleset)
			s.podsReach(t, false)
			list, err := Obstacles(context.Background(), &Config{NetNS: s.host}, Path{Bridge: "cbr0"})
			if err != nil || len(list) == 0 {
				t.Fatalf("%v, %v", list, err)
			}
			for _, o := range list {
				nstest.Run(t, s.host, "sh", "-ec", strings.ReplaceAll(o.Remedy, "tables -t", "tables-nft -t"))
			}
			wantObstacles(t, s.host, Path{})
			s.podsReach(t, true)
		})
	}
}

// gate counts the datagrams of the test that come, and those that leave.
const gate = `table inet gate {
	counter came { }
	counter left { }
	chain came { type filter hook prerouting priority -400; udp dport 9999 counter name came; }
	chain left { type filter hook postrouting priority 400; udp dport 9999 counter name left; }
}`

// sendMarked sends a datagram whose socket has a mark, and waits for it to have
// passed: an echo that passes behind it comes back.
func sendMarked(tb testing.TB, from *netns.NS, to, echo string, mark int) {
	tb.Helper()
	send := func() error {
		domain, dst := unix.AF_INET6, unix.Sockaddr(&unix.SockaddrInet6{Port: 9999, Addr: nstest.Addr(to).As16()})
		if addr := nstest.Addr(to); addr.Is4() {
			domain, dst = unix.AF_INET, &unix.SockaddrInet4{Port: 9999, Addr: addr.As4()}
		}
		fd, err := unix.Socket(domain, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			return err
		}
		defer unix.Close(fd)
		if err := unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_MARK, mark); err != nil {
			return err
		}
		return unix.Sendto(fd, []byte("?"), 0, dst)
	}
	err := onOneCPU(func() error {
		if err := from.Do(send); err != nil {
			return err
		}
		return nstest.Ping(tb, from, nstest.Addr(echo))
	})
	if err != nil {
		tb.Fatal(err)
	}
}

func TestMarkOfAnotherAgentAdmitsNothing(t *testing.T) {
	t.Parallel()
	s := newSite(t)
	script(t, s.host, "iptables -P FORWARD DROP", "iptables -t mangle -A PREROUTING -j MARK --set-xmark 0x1000/0x1000")
	nft(t, s.host, gate)
	mustAdmit(t, s.c, true)
	passes := func(from *netns.NS, to, echo string, mark, want int) {
		t.Helper()
		counts(t, s.host)
		sendMarked(t, from, to, echo, mark)
		wanted := map[string]int{"came": 1}
		if want > 0 {
			wanted["left"] = want
		}
		if diff := cmp.Diff(wanted, counts(t, s.host)); diff != "" {
			t.Errorf("a datagram to %s (-want +got):\n%s", to, diff)
		}
	}
	all := func(stranger, pods int) {
		t.Helper()
		passes(s.other, far4, bridge4, 0, stranger)
		passes(s.outside, pod4, host4, 0, stranger)
		passes(s.outside, pod6, host6, 0, stranger)
		passes(s.pod, far4, bridge4, 0, pods)
		passes(s.pod, far6, "fd00:22::1", 0, pods)
	}
	// Without our forward chain, the agent's mark opens everything to everybody.
	all(1, 1)
	mustEnsure(t, s.c, podnet())
	mustAdd(t, s.c, pod("0123456789a", pod4, pod6))
	all(0, 1)
	// Nor does one that a pod sets.
	script(t, s.host, "iptables -t mangle -F")
	passes(s.other, far4, bridge4, 0x1000, 0)
	passes(s.pod, far4, bridge4, 0x1000, 1)
	if err := s.c.Remove(context.Background(), pod("0123456789a", pod4, pod6)); err != nil {
		t.Fatal(err)
	}
	passes(s.pod, far4, bridge4, 0x1000, 0)
}

// What firewalld makes does to packets what Obstacles says.
func TestFirewalldStopsPods(t *testing.T) {
	t.Parallel()
	s := newSite(t)
	mustEnsure(t, s.c, podnet())
	ep := pod("0123456789a", pod4, pod6)
	ep.Masquerade = false
	mustAdd(t, s.c, ep)
	nft(t, s.host, firewalldFixture(t))
	s.podsReach(t, false)
	// The remedy, as firewalld carries it out.
	nft(t, s.host, "add chain inet firewalld filter_FWD_trusted { accept; }\n"+
		`insert rule inet firewalld filter_FORWARD_ZONES iifname "cbr0" goto filter_FWD_trusted`)
	s.podsReach(t, true)
	wantObstacles(t, s.host, Path{Prefixes: []netip.Prefix{nstest.Prefix("10.22.0.0/16")}})
}
