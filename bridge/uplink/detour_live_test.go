package uplink_test

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"strings"
	"testing"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/bridge/uplink"
	"github.com/tombolo-cni/tombolo/internal/nl"
	"github.com/tombolo-cni/tombolo/internal/nl/nltest"
	"github.com/tombolo-cni/tombolo/internal/nstest"
)

// through counts what is asked of the kernel in the step "port", questions left out.
func (m *mortal) through(t nl.Transport) nl.Transport { return &mortalTransport{t, m} }

type mortalTransport struct {
	nl.Transport
	m *mortal
}

func (t *mortalTransport) Send(b []byte) error {
	t.m.die(t.m.inPort && t.m.step == uplink.StepPort && isChange(b))
	err := t.Transport.Send(b)
	settleStandIn()
	return err
}

// isChange looks at a datagram's first message: of rtnetlink, every fourth type is a
// question; of netfilter's, those that change are in transactions.
func isChange(b []byte) bool {
	typ := binary.NativeEndian.Uint16(b[4:])
	return typ == unix.NFNL_MSG_BATCH_BEGIN || typ < 1<<8 && typ%4 != unix.RTM_GETLINK%4
}

// settleStandIn does what a connection over a transport of a test's own cannot: see
// nl.Conn.RefreshCarrier. It is for the caller's own namespace.
func settleStandIn() {
	conn, err := nl.Dial(unix.NETLINK_ROUTE, nil)
	if err != nil {
		return
	}
	defer conn.Close()
	// Of those that are there alone: for the name of another, the kernel looks for a module.
	links, err := net.Interfaces()
	if err != nil {
		return
	}
	for _, link := range links {
		if strings.HasPrefix(link.Name, "tombo") || strings.HasPrefix(link.Name, "tombi") || link.Name == "br0" {
			conn.RefreshCarrier(link.Name)
		}
	}
}

// detour says what there is of one.
func (l *lan) detour(tb testing.TB) string {
	tb.Helper()
	var found []string
	for line := range strings.Lines(nstest.Run(tb, l.host, "ip", "-o", "link")) {
		for _, name := range []string{"tombo", "tombi"} {
			if strings.HasPrefix(strings.TrimLeft(line, "0123456789: "), name) {
				found = append(found, name)
			}
		}
	}
	if strings.Contains(nstest.Run(tb, l.host, "nft", "list", "ruleset"), "fwd to") {
		found = append(found, "rule")
	}
	return strings.Join(found, " ")
}

func (l *lan) mustHaveNoDetour(tb testing.TB, when string) {
	tb.Helper()
	if rules := nstest.Run(tb, l.host, "nft", "list", "ruleset"); rules != "" {
		tb.Errorf("%s: nft has\n%s", when, rules)
	}
	if left := l.detour(tb); left != "" {
		tb.Errorf("%s: of a detour there is left: %s", when, left)
	}
}

// atRule calls do when the rule of a detour is there, and the NIC is as it was.
type atRule struct {
	nl.Transport
	do func()
}

func (t *atRule) Send(b []byte) error {
	err := t.Transport.Send(b)
	settleStandIn()
	const newTable = unix.NFNL_SUBSYS_NFTABLES<<8 | unix.NFT_MSG_NEWTABLE
	if first := int(binary.NativeEndian.Uint32(b)); err == nil && len(b) > first+6 && binary.NativeEndian.Uint16(b[first+4:]) == newTable {
		t.do()
	}
	return err
}

// within the detour of a takeover, with the host's namespace as the caller's.
func (l *lan) duringTake(t *testing.T, do func()) {
	t.Helper()
	called := false
	within(t, l.host, func() error {
		conn, err := uplink.DialThrough(nil, func(tr nl.Transport) nl.Transport {
			return &atRule{tr, func() { called = true; do() }}
		})
		if err != nil {
			return err
		}
		defer conn.Close()
		_, err = conn.Take(t.Context(), toBridge(), new(memory))
		return err
	})
	if !called {
		t.Error("there was no detour")
	}
}

func TestTheDetourIsForWhatIsSentToTheHost(t *testing.T) {
	t.Parallel()
	l := newLAN(t)
	l.duringTake(t, func() {
		if found := l.detour(t); found != "tombi tombo rule" && found != "tombo tombi rule" {
			t.Errorf("of the detour there is: %s", found)
		}
		links := nstest.Run(t, l.host, "ip", "-d", "link")
		for _, want := range []string{"alias tombolo:1:uplink", "addrgenmode none", "learning off flood off", "mcast_flood off bcast_flood off"} {
			if !strings.Contains(links, want) {
				t.Errorf("no %q in\n%s", want, links)
			}
		}
		if addrs := nstest.Run(t, l.host, "ip", "-o", "-6", "addr"); strings.Contains(addrs, "tomb") {
			t.Errorf("the pair has addresses:\n%s", addrs)
		}
		l.mustReach(t, "with the detour")
		ip6 := func(next byte, to string) []byte {
			b := append([]byte{0x86, 0xdd, 0x60, 0, 0, 0, 0, 0, next, 64}, make([]byte, 16)...)
			return append(b, nstest.Addr(to).AsSlice()...)
		}
		for what, tt := range map[string]struct {
			frame []byte
			round bool
		}{
			"IPv4":                          {[]byte{8, 0}, true},
			"IPv6":                          {ip6(unix.IPPROTO_UDP, "fd00::5"), true},
			"IPv6 to a link-local address":  {ip6(unix.IPPROTO_UDP, "fe80::5"), false},
			"ICMPv6":                        {ip6(unix.IPPROTO_ICMPV6, "fd00::5"), false},
			"ARP":                           {[]byte{8, 6}, false},
			"another protocol":              {[]byte{0x88, 0xb5}, false},
			"IPv4 with a VLAN tag":          {[]byte{0x81, 0, 0, 7, 8, 0}, false},
			"IPv4 with a provider's tag":    {[]byte{0x88, 0xa8, 0, 7, 8, 0}, false},
			"IPv4 with a tag of priorities": {[]byte{0x81, 0, 0x20, 0, 8, 0}, false},
		} {
			l.mustSendRound(t, what, tt.frame, tt.round)
		}
	})
	l.mustHaveNoDetour(t, "taken")
}

// mustSendRound sends the host a frame, and looks whether it comes in by the stand-in's
// port. Another, which certainly does, is sent behind it; on a busy machine it may come
// before it.
func (l *lan) mustSendRound(tb testing.TB, what string, frame []byte, want bool) {
	tb.Helper()
	var in, out int
	within(tb, l.host, func() error {
		var err error
		in, err = packetSocket(nstest.Index(tb, l.host, fmt.Sprint("tombi", nstest.Index(tb, l.host, "eth0"))))
		return err
	})
	defer unix.Close(in)
	within(tb, l.router, func() error {
		var err error
		out, err = packetSocket(nstest.Index(tb, l.router, "eth0"))
		return err
	})
	defer unix.Close(out)
	const mark = 42 // where the payload of either frame has its number
	seen, seenMark := false, false
	for i, f := range [][]byte{frame, {8, 0}} {
		f = append(append([]byte{2, 0, 0x0a, 0, 0, 5, 2, 0, 0x0a, 0, 0, 1}, f...), make([]byte, 60)...)
		copy(f[60:], []byte{mark, mark, byte(i + 1)})
		if _, err := unix.Write(out, f); err != nil {
			tb.Fatal(err)
		}
	}
	for !seenMark || want && !seen {
		b := make([]byte, 2048)
		n, _, err := unix.Recvfrom(in, b, 0)
		if err != nil {
			tb.Fatalf("%s goes round: %t, want %t; what is behind it does: %t: %v", what, seen, want, seenMark, err)
		}
		if n < 63 || b[60] != mark || b[61] != mark {
			continue
		}
		seen, seenMark = seen || b[62] == 1, seenMark || b[62] == 2
	}
	if seen != want {
		tb.Errorf("%s goes round: %t, want %t", what, seen, want)
	}
}

// packetSocket hears all of a link, and gives up after much time.
func packetSocket(link int) (int, error) {
	const all = unix.ETH_P_ALL << 8 // in network order, on a machine of the other
	fd, err := unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, all)
	if err != nil {
		return 0, err
	}
	timeout := unix.NsecToTimeval(int64(patience))
	return fd, errors.Join(unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &timeout), unix.Bind(fd, &unix.SockaddrLinklayer{Protocol: all, Ifindex: link}))
}

// What a process that was killed left is not a port, for as long as it is there.
func TestWhatIsLeftOfADetourIsNobodysPort(t *testing.T) {
	t.Parallel()
	for name, tt := range map[string]struct {
		alias, mac string
		stays      bool
	}{
		"ours":                        {alias: "tombolo:1:uplink", mac: "fe:fe:00:00:00:%02x"},
		"ours, before it had a alias": {mac: "fe:fe:00:00:00:%02x"},
		"another's":                   {alias: "mine", mac: "fe:fe:00:00:00:%02x", stays: true},
		"another's by its MAC":        {alias: "tombolo:1:uplink", mac: "02:fe:00:00:00:%02x", stays: true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			l := newLAN(t)
			rec, j := take(t, l, toBridge())
			key := nstest.Index(t, l.host, "eth0")
			port := fmt.Sprint("tombi", key)
			run(t, l.host, fmt.Sprintf("link add %s address %s type veth peer name other", port, fmt.Sprintf(tt.mac, key)), "link set "+port+" addrgenmode none", "link set other addrgenmode none",
				"link set "+port+" master br0 up")
			if tt.alias != "" {
				run(t, l.host, "link set "+port+" alias "+tt.alias)
			}
			s, err := l.conn.Snapshot(t.Context(), "eth0", "br0")
			if err != nil {
				t.Fatal(err)
			}
			steps, err := uplink.PlanRestore(s, rec)
			if err != nil {
				t.Fatal(err)
			}
			if goes := strings.Contains(steps.String(), "delete bridge br0"); goes == tt.stays {
				t.Errorf("the bridge goes: %t, want %t:\n%s", goes, !tt.stays, steps)
			}
			l.mustBeTaken(t, "with it", rec)
			if err := l.conn.Restore(t.Context(), rec, j); err != nil {
				t.Fatal(err)
			}
			l.mustReach(t, "given back")
			for _, link := range []string{port, "br0"} {
				if _, err := nstest.Try(l.host, "ip", "link", "show", link); (err == nil) != tt.stays {
					t.Errorf("%s is there: %t, want %t", link, err == nil, tt.stays)
				}
			}
		})
	}
}

func TestWithoutADetourTheNICIsTakenAllTheSame(t *testing.T) {
	t.Parallel()
	for name, tt := range map[string]struct {
		fault *nltest.Fault
		note  bool
	}{
		"no family netdev":   {&nltest.Fault{Type: unix.NFNL_SUBSYS_NFTABLES<<8 | unix.NFT_MSG_NEWTABLE, Errno: unix.EAFNOSUPPORT}, false},
		"no ingress":         {&nltest.Fault{Type: unix.NFNL_SUBSYS_NFTABLES<<8 | unix.NFT_MSG_NEWCHAIN, Errno: unix.EOPNOTSUPP}, false},
		"no fwd":             {&nltest.Fault{Type: unix.NFNL_SUBSYS_NFTABLES<<8 | unix.NFT_MSG_NEWRULE, Errno: unix.ENOENT}, false},
		"no rule for once":   {&nltest.Fault{Type: unix.NFNL_SUBSYS_NFTABLES<<8 | unix.NFT_MSG_NEWRULE, Errno: unix.ENOMEM}, true},
		"no pair":            {&nltest.Fault{Type: unix.RTM_NEWLINK, Errno: unix.EOPNOTSUPP, Match: isNew("tombi")}, false},
		"no room for a pair": {&nltest.Fault{Type: unix.RTM_NEWLINK, Errno: unix.ENOSPC, Match: isNew("tombi")}, true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			l := newLAN(t)
			before := state(t, l.host)
			nltest.MustHaveFired(t, tt.fault)
			conn, err := uplink.DialThrough(&uplink.Config{NetNS: l.host}, func(tr nl.Transport) nl.Transport { return nltest.NewFaulty(settling{tr, l}, tt.fault) })
			if err != nil {
				t.Fatal(err)
			}
			defer conn.Close()
			var j memory
			rec, err := conn.Take(t.Context(), toBridge(), &j)
			if err != nil {
				t.Fatal(err)
			}
			if noted := len(rec.Notes) > 0; noted != tt.note {
				t.Errorf("notes: %q, want any: %t", rec.Notes, tt.note)
			}
			l.mustReach(t, "taken over")
			l.mustHaveNoDetour(t, "taken over")
			if err := conn.Restore(t.Context(), rec, &j); err != nil {
				t.Fatal(err)
			}
			l.mustReach(t, "given back")
			if before, after := comparableState(before), comparableState(state(t, l.host)); before != after {
				t.Errorf("the host is another:\n%s\n%s", before, after)
			}
		})
	}
}

// settling is a socket of a host's namespace, for connections that cannot settle
// carriers by themselves.
type settling struct {
	nl.Transport
	l *lan
}

func (s settling) Send(b []byte) error {
	err := s.Transport.Send(b)
	return errors.Join(err, s.l.host.Do(func() error { settleStandIn(); return nil }))
}

// isNew says that a request is to make a link whose name begins so.
func isNew(prefix string) func(netlink.Message) bool {
	return func(m netlink.Message) bool {
		if m.Header.Flags&unix.NLM_F_CREATE == 0 || len(m.Data) < unix.SizeofIfInfomsg {
			return false
		}
		var name string
		err := nl.Decode(nl.Pick(m.Data[unix.SizeofIfInfomsg:], unix.IFLA_IFNAME), func(ad *netlink.AttributeDecoder) error {
			name = ad.String()
			return nil
		})
		return err == nil && strings.HasPrefix(name, prefix)
	}
}

// A detour that cannot be taken away is an error, of which the record is kept.
func TestADetourThatStaysIsAnError(t *testing.T) {
	t.Parallel()
	l := newLAN(t)
	fault := &nltest.Fault{Type: unix.NFNL_SUBSYS_NFTABLES<<8 | unix.NFT_MSG_DELTABLE, Errno: unix.EBUSY}
	nltest.MustHaveFired(t, fault)
	conn, err := uplink.DialThrough(&uplink.Config{NetNS: l.host}, func(tr nl.Transport) nl.Transport { return nltest.NewFaulty(settling{tr, l}, fault) })
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	var j memory
	rec, err := conn.Take(t.Context(), toBridge(), &j)
	if rec == nil || !errors.Is(err, unix.EBUSY) || !strings.Contains(err.Error(), "nft delete table netdev tombolo-uplink-") {
		t.Fatalf("take: %v, %v", rec, err)
	}
	l.mustReach(t, "with what is left")
	if rec, err = l.conn.Recover(t.Context(), rec, &j); rec != nil || err != nil {
		t.Fatalf("recover: %v, %v", rec, err)
	}
	l.mustReach(t, "recovered")
	l.mustHaveNoDetour(t, "recovered")
}
