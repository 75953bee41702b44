package conntrack

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo"
	"github.com/tombolo-cni/tombolo/internal/nl"
	"github.com/tombolo-cni/tombolo/internal/nl/nltest"
	"github.com/tombolo-cni/tombolo/internal/nstest"
	"github.com/tombolo-cni/tombolo/netns"
)

// The host's addresses in these tests are 192.0.2.1 and .2, and 2001:db8:1::1.
func isHosts(a netip.Addr) bool {
	switch a.String() {
	case "192.0.2.1", "192.0.2.2", "2001:db8:1::1", "127.0.0.1":
		return true
	}
	return false
}

func mustPort(s string) netip.AddrPort { return netip.MustParseAddrPort(s) }

// node has, by name, flows of a node on which a pod (10.22.0.6, fd00:22::6) is about
// to publish UDP port 53, or has published it.
func node() map[string]string {
	return map[string]string{
		"4 to the host itself":          plain("udp", "198.51.100.1:4000", "192.0.2.1:53"),
		"4 to the host's other address": plain("udp", "198.51.100.1:4000", "192.0.2.2:53"),
		"4 from the host to itself":     plain("udp", "127.0.0.1:4000", "127.0.0.1:53"),
		"4 to a dead pod":               flow("udp", "198.51.100.1:4001", "192.0.2.1:53", "10.22.0.5:5353", "198.51.100.1:4001"),
		"4 to the pod":                  flow("udp", "198.51.100.1:4002", "192.0.2.1:53", "10.22.0.6:5353", "198.51.100.1:4002"),
		"4 to the pod, masqueraded":     flow("udp", "10.22.0.6:4003", "192.0.2.1:53", "10.22.0.6:5353", "10.22.0.1:4003"),
		"4 to the pod's other port":     flow("udp", "198.51.100.1:4002", "192.0.2.1:54", "10.22.0.6:5354", "198.51.100.1:4002"),
		"4 to the pod directly":         plain("udp", "10.22.0.9:4000", "10.22.0.6:5353"),
		"4 forwarded":                   plain("udp", "10.22.0.9:4000", "8.8.8.8:53"),
		"4 forwarded, masqueraded":      flow("udp", "10.22.0.9:4001", "8.8.8.8:53", "8.8.8.8:53", "192.0.2.1:4001"),
		"4 from the pod, masqueraded":   flow("udp", "10.22.0.6:4001", "8.8.8.8:53", "8.8.8.8:53", "192.0.2.1:4444"),
		"4 from the host's port":        plain("udp", "192.0.2.1:53", "8.8.8.8:4000"),
		"4 by tcp":                      plain("tcp", "198.51.100.1:4000", "192.0.2.1:53"),
		"4 by tcp to the pod":           flow("tcp", "198.51.100.1:4002", "192.0.2.1:53", "10.22.0.6:5353", "198.51.100.1:4002"),
		"4 by sctp":                     plain("sctp", "198.51.100.1:4000", "192.0.2.1:53"),
		"4 by sctp, another port":       plain("sctp", "198.51.100.1:4000", "192.0.2.1:54"),
		"6 to the host itself":          plain("udp", "[2001:db8::1]:4000", "[2001:db8:1::1]:53"),
		"6 to a dead pod":               flow("udp", "[2001:db8::1]:4001", "[2001:db8:1::1]:53", "[fd00:22::5]:5353", "[2001:db8::1]:4001"),
		"6 to the pod":                  flow("udp", "[2001:db8::1]:4002", "[2001:db8:1::1]:53", "[fd00:22::6]:5353", "[2001:db8::1]:4002"),
		"6 to the pod directly":         plain("udp", "[fd00:22::9]:4000", "[fd00:22::6]:5353"),
		"6 from the pod, masqueraded":   flow("udp", "[fd00:22::6]:4000", "[2001:db8::53]:53", "[2001:db8::53]:53", "[2001:db8:1::1]:4000"),
		"6 forwarded":                   plain("udp", "[fd00:22::9]:4000", "[2001:db8::53]:53"),
		"4 ping from the pod":           "icmp src=10.22.0.6 dst=8.8.8.8 type=8 code=0 id=77 src=8.8.8.8 dst=10.22.0.6 type=0 code=0 id=77",
		"4 ping from another":           "icmp src=10.22.0.9 dst=8.8.8.8 type=8 code=0 id=77 src=8.8.8.8 dst=10.22.0.9 type=0 code=0 id=77",
	}
}

func TestFlushTakesWhatMatchesAndNothingElse(t *testing.T) {
	t.Parallel()
	pod4 := Publication{Proto: unix.IPPROTO_UDP, Host: netip.AddrPortFrom(netip.Addr{}, 53), Pod: mustPort("10.22.0.6:5353")}
	pod6 := Publication{Proto: unix.IPPROTO_UDP, Host: mustPort("[::]:53"), Pod: mustPort("[fd00:22::6]:5353")}
	on := func(p Publication, host string) Publication { p.Host = mustPort(host); return p }
	by := func(p Publication, proto uint8) Publication { p.Proto = proto; return p }
	for _, tc := range []struct {
		name    string
		filters []Filter
		gone    []string
	}{
		{"added, any address", []Filter{pod4.Stale(isHosts)},
			[]string{"4 to the host itself", "4 to the host's other address", "4 from the host to itself", "4 to a dead pod"}},
		{"added, any IPv4 address", []Filter{on(pod4, "0.0.0.0:53").Stale(isHosts)},
			[]string{"4 to the host itself", "4 to the host's other address", "4 from the host to itself", "4 to a dead pod"}},
		{"added, one address", []Filter{on(pod4, "192.0.2.1:53").Stale(nil)}, []string{"4 to the host itself", "4 to a dead pod"}},
		{"added, any address, but which are the host's is not known", []Filter{pod4.Stale(nil)}, nil},
		{"added, IPv6", []Filter{pod6.Stale(isHosts)}, []string{"6 to the host itself", "6 to a dead pod"}},
		{"added, one IPv6 address", []Filter{on(pod6, "[2001:db8:1::1]:53").Stale(nil)}, []string{"6 to the host itself", "6 to a dead pod"}},
		{"added, by tcp", []Filter{by(pod4, unix.IPPROTO_TCP).Stale(isHosts)}, []string{"4 by tcp"}},
		{"added, by sctp", []Filter{by(pod4, unix.IPPROTO_SCTP).Stale(isHosts)}, []string{"4 by sctp"}},
		{"deleted, both families", []Filter{pod4.Flows(), pod6.Flows()}, []string{"4 to the pod", "4 to the pod, masqueraded", "6 to the pod"}},
		{"deleted, two ports", []Filter{pod4.Flows(), {Proto: unix.IPPROTO_UDP, Orig: Match{DstPort: 54}, Reply: Match{Src: pod4.Pod.Addr()}}},
			[]string{"4 to the pod", "4 to the pod, masqueraded", "4 to the pod's other port"}},
		{"the same twice", []Filter{pod6.Flows(), pod6.Flows()}, []string{"6 to the pod"}},
		{"deleted, one address", []Filter{on(pod4, "192.0.2.2:53").Flows()}, nil},
		{"all of an address", Of(nstest.Addr("10.22.0.6")), []string{
			"4 to the pod", "4 to the pod, masqueraded", "4 to the pod's other port", "4 to the pod directly", "4 from the pod, masqueraded",
			"4 by tcp to the pod", "4 ping from the pod"}},
		{"all of an IPv6 address", Of(nstest.Addr("fd00:22::6")), []string{"6 to the pod", "6 to the pod directly", "6 from the pod, masqueraded"}},
		{"a port of both families", []Filter{{Proto: unix.IPPROTO_UDP, Orig: Match{SrcPort: 4001}}}, []string{
			"4 to a dead pod", "4 from the pod, masqueraded", "4 forwarded, masqueraded", "6 to a dead pod"}},
		{"one family, and who answers", []Filter{{Family: unix.AF_INET6, Reply: Match{Src: nstest.Addr("2001:db8::53")}}},
			[]string{"6 forwarded", "6 from the pod, masqueraded"}},
		{"to whom it is answered", []Filter{{Reply: Match{Dst: nstest.Addr("192.0.2.1")}}, {Proto: unix.IPPROTO_UDP, Reply: Match{DstPort: 4444}}},
			[]string{"4 forwarded, masqueraded", "4 from the host's port", "4 from the pod, masqueraded"}},
	} {
		for how, dial := range map[string]func(testing.TB, *netns.NS) *Conn{"together": dial, "one by one": dialCrowded} {
			t.Run(tc.name+", "+how, func(t *testing.T) {
				t.Parallel()
				ns := nstest.New(t)
				flows := node()
				all := slices.Collect(maps.Values(flows))
				insert(t, ns, all...)
				wantListed(t, ns, all...)
				c := dial(t, ns)
				mustFlush(t, c, len(tc.gone), tc.filters...)
				for _, name := range tc.gone {
					if _, ok := flows[name]; !ok {
						t.Fatalf("no flow is called %q", name)
					}
					delete(flows, name)
				}
				wantListed(t, ns, slices.Collect(maps.Values(flows))...)
				mustFlush(t, c, 0, tc.filters...)
			})
		}
	}
}

func TestFlowOfAnotherNamespaceStays(t *testing.T) {
	t.Parallel()
	here, there := nstest.New(t), nstest.New(t)
	f := plain("udp", "198.51.100.1:4000", "192.0.2.1:53")
	insert(t, here, f)
	insert(t, there, f)
	mustFlush(t, dial(t, here), 1, Filter{Proto: unix.IPPROTO_UDP, Orig: Match{DstPort: 53}})
	wantListed(t, there, f)
}

func TestFlowOfAZoneIsDeletedInItsZone(t *testing.T) {
	t.Parallel()
	ns := nstest.New(t)
	f := plain("udp", "198.51.100.1:4000", "192.0.2.1:53")
	insert(t, ns, f)
	nstest.Run(t, ns, "conntrack", "-I", "-t", "36000", "-p", "udp", "-s", "198.51.100.1", "-d", "192.0.2.1", "--sport", "4000", "--dport", "53", "--zone", "7")
	c := dial(t, ns)
	filter := Filter{Orig: Match{Dst: nstest.Addr("192.0.2.1")}, Where: func(f Flow) bool { return f.Zone == 7 }}
	mustFlush(t, c, 1, filter)
	wantListed(t, ns, f)
	filter.Where = nil
	mustFlush(t, c, 1, filter)
}

func TestFlowThatCameInTheMeantimeStays(t *testing.T) {
	t.Parallel()
	ns := nstest.New(t)
	c := dial(t, ns)
	f := plain("udp", "198.51.100.1:4000", "192.0.2.1:53")
	filter := Filter{Orig: Match{Dst: nstest.Addr("192.0.2.1")}}
	list := func() []Flow {
		l, err := c.List(context.Background(), filter)
		if err != nil {
			t.Fatal(err)
		}
		if len(l) != 1 {
			t.Fatalf("%d flows, want 1: %v", len(l), l)
		}
		return l
	}
	insert(t, ns, f)
	old := list()
	// The number is the same again if the new entry gets the memory of the old one:
	// so others are put there.
	nstest.Run(t, ns, "conntrack", "-F")
	for i := 0; ; i++ {
		insert(t, ns, plain("udp", fmt.Sprintf("198.51.100.9:%d", 5000+i), "192.0.2.9:53"))
		insert(t, ns, f)
		if now := list(); now[0].ID != old[0].ID {
			break
		}
		nstest.Run(t, ns, "conntrack", "-D", "-d", "192.0.2.1")
		if i == 50 {
			t.Fatal("the flow had the same number 50 times")
		}
	}
	if n, err := c.delete(context.Background(), old); n != 0 || err != nil {
		t.Errorf("deleted %d, %v; want none, and no error", n, err)
	}
	list()
	mustFlush(t, c, 1, filter)
}

func TestKernelThatKnowsNoFilterSendsAll(t *testing.T) {
	t.Parallel()
	for _, errno := range []unix.Errno{unix.EOPNOTSUPP, unix.EINVAL} {
		ns := nstest.New(t)
		stale, other := plain("udp", "198.51.100.1:4000", "192.0.2.1:53"), plain("udp", "198.51.100.1:4000", "8.8.8.8:53")
		insert(t, ns, stale, other)
		c := dialFaulty(t, ns, &nltest.Fault{Type: messageGet, Errno: errno, Nth: 1})
		mustFlush(t, c, 1, Publication{unix.IPPROTO_UDP, mustPort("0.0.0.0:53"), mustPort("10.22.0.6:53")}.Stale(isHosts))
		wantListed(t, ns, other)
	}
}

func TestErrors(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	udp53 := Filter{Proto: unix.IPPROTO_UDP, Orig: Match{DstPort: 53}, Family: unix.AF_INET}

	t.Run("no ctnetlink", func(t *testing.T) {
		c := dialFaulty(t, nstest.New(t), &nltest.Fault{Type: messageStats, Errno: unix.EINVAL})
		_, err := c.Flush(ctx, udp53)
		if !errors.Is(err, errors.ErrUnsupported) || !strings.Contains(err.Error(), "nf_conntrack_netlink") {
			t.Errorf("%v, want one that matches %v and says what to load", err, errors.ErrUnsupported)
		}
	})
	t.Run("not permitted", func(t *testing.T) {
		ns := nstest.New(t)
		insert(t, ns, plain("udp", "198.51.100.1:4000", "192.0.2.1:53"))
		c := dialFaulty(t, ns, &nltest.Fault{Type: messageGet, Errno: unix.EPERM})
		_, err := c.Flush(ctx, udp53)
		if !errors.Is(err, fs.ErrPermission) || !strings.Contains(err.Error(), "list flows udp orig dport=53") {
			t.Errorf("%v, want one that matches %v and says what was asked", err, fs.ErrPermission)
		}
	})
	t.Run("interrupted without end", func(t *testing.T) {
		ns := nstest.New(t)
		insert(t, ns, plain("udp", "198.51.100.1:4000", "192.0.2.1:53"))
		c := dialFaulty(t, ns, &nltest.Fault{Type: messageGet, Interrupt: true})
		if _, err := c.Flush(ctx, udp53); !errors.Is(err, tombolo.ErrInterrupted) {
			t.Errorf("%v, want %v", err, tombolo.ErrInterrupted)
		}
	})
	t.Run("interrupted once", func(t *testing.T) {
		ns := nstest.New(t)
		insert(t, ns, plain("udp", "198.51.100.1:4000", "192.0.2.1:53"))
		c := dialFaulty(t, ns, &nltest.Fault{Type: messageGet, Interrupt: true, Nth: 1})
		mustFlush(t, c, 1, udp53)
	})
	t.Run("one flow cannot be deleted", func(t *testing.T) {
		ns := nstest.New(t)
		stay := plain("udp", "198.51.100.1:4001", "192.0.2.1:53")
		insert(t, ns, stay)
		insert(t, ns, plain("udp", "198.51.100.1:4000", "192.0.2.1:53"))
		c := dialFaulty(t, ns, &nltest.Fault{Type: messageDelete, Errno: unix.EBUSY, Match: func(m netlink.Message) bool {
			return strings.Contains(string(m.Data), "\x0f\xa1") // 4001
		}})
		n, err := c.Flush(ctx, udp53)
		if n != 1 || !errors.Is(err, unix.EBUSY) || !strings.Contains(err.Error(), "198.51.100.1:4001 > 192.0.2.1:53") {
			t.Errorf("deleted %d, %v; want 1 and an error that names the other", n, err)
		}
		wantListed(t, ns, stay)
	})
	t.Run("none can be deleted", func(t *testing.T) {
		ns := nstest.New(t)
		insert(t, ns, plain("udp", "198.51.100.1:4000", "192.0.2.1:53"))
		insert(t, ns, plain("udp", "198.51.100.1:4001", "192.0.2.1:53"))
		c := dialFaulty(t, ns, &nltest.Fault{Type: messageDelete, Errno: unix.EBUSY})
		n, err := c.Flush(ctx, udp53)
		if n != 0 || !errors.Is(err, unix.EBUSY) || !strings.Contains(err.Error(), "2 flows could not be deleted") {
			t.Errorf("deleted %d, %v; want 0 and an error that counts them", n, err)
		}
	})
	t.Run("one filter of two fails", func(t *testing.T) {
		ns := nstest.New(t)
		insert(t, ns, plain("udp", "198.51.100.1:4000", "192.0.2.1:53"))
		n, err := dial(t, ns).Flush(ctx, Filter{}, udp53)
		if n != 1 || !errors.Is(err, errTooWide) {
			t.Errorf("deleted %d, %v; want 1 and %v", n, err, errTooWide)
		}
	})
	t.Run("nothing could be sent", func(t *testing.T) {
		c := dial(t, nstest.New(t))
		orig := Tuple{mustPort("198.51.100.1:4000"), mustPort("192.0.2.1:53")}
		if n, err := c.delete(ctx, []Flow{{Orig: orig}}); n != 0 || !errors.Is(err, nl.ErrMalformed) {
			t.Errorf("deleted %d, %v; want 0 and %v", n, err, nl.ErrMalformed)
		}
		fake := nltest.NewFake(nltest.AckAll)
		closed := On(nl.New(fake))
		fake.Close()
		if n, err := closed.delete(ctx, []Flow{{Orig: orig, tuple: []byte{4, 0, 1, 0}}}); n != 0 || !errors.Is(err, unix.EBADF) {
			t.Errorf("deleted %d, %v; want 0 and %v", n, err, unix.EBADF)
		}
	})
	t.Run("no time left", func(t *testing.T) {
		over, cancel := context.WithCancel(ctx)
		cancel()
		c := On(nl.New(fakeKernel(1)))
		if _, err := c.Flush(over, udp53); !errors.Is(err, context.Canceled) {
			t.Errorf("%v, want %v", err, context.Canceled)
		}
		if n, err := c.delete(over, []Flow{{}}); n != 0 || !errors.Is(err, context.Canceled) {
			t.Errorf("deleted %d, %v; want 0 and %v", n, err, context.Canceled)
		}
	})
}

func TestDialClosesWhatItOpened(t *testing.T) {
	t.Parallel()
	c, err := Dial(nil)
	if err != nil {
		t.Fatal(err)
	}
	if err := c.Close(); err != nil {
		t.Fatal(err)
	}
	if err := c.Close(); !errors.Is(err, unix.EBADF) {
		t.Errorf("closing it again: %v, want %v", err, unix.EBADF)
	}
	shared := On(nl.New(fakeKernel(1)))
	if err := shared.Close(); err != nil {
		t.Fatal(err)
	}
	if _, err := shared.List(context.Background(), Filter{Orig: Match{Src: nstest.Addr("10.0.0.1")}}); err != nil {
		t.Errorf("after Close, another's connection is closed: %v", err)
	}
}
