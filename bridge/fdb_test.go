package bridge_test

import (
	"net"
	"strings"
	"testing"

	"github.com/tombolo-cni/tombolo/bridge"
	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
	"github.com/tombolo-cni/tombolo/netns"
)

// behind is the port that br0 takes a MAC to be behind, and what the bridge says of it:
// "br0" for the bridge's own.
func (n *node) behind(tb testing.TB, mac net.HardwareAddr) (port, entry string) {
	tb.Helper()
	for line := range strings.Lines(nstest.Run(tb, n.ns, "bridge", "fdb", "show", "br", "br0")) {
		// Ports have entries of their own in the database of their link, which say "self".
		if f := strings.Fields(line); len(f) > 2 && f[0] == mac.String() && !strings.Contains(line, " self") && !strings.Contains(line, " vlan ") {
			return f[2], line
		}
	}
	return "", ""
}

// say has a pod send a frame to nobody, as from a MAC.
func say(tb testing.TB, pod *netns.NS, from net.HardwareAddr) {
	tb.Helper()
	frame := append(append([]byte{2, 0x77, 0, 0, 0, 1}, from...), 0x88, 0xb5)
	nstest.SendFrame(tb, pod, append(frame, make([]byte, 46)...))
}

func silent(i byte) bridge.Port {
	p := port(i)
	p.PeerMAC = net.HardwareAddr{2, 0, 0, 0, 1, i}
	p.StaticFDB, p.NoLearning = true, true
	return p
}

func TestPodWithAStaticEntryTeachesTheBridgeNothing(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	hostile, teacher := silent(0), port(1)
	inHostile, _ := attach(t, n, hostile)
	inTeacher, _ := attach(t, n, teacher)
	neighbour := silent(2)
	inNeighbour, _ := attach(t, n, neighbour)
	stranger := mac("02:00:00:00:02:00")

	say(t, inTeacher, stranger)
	must.Until(t, "the bridge learns from a port that it is to learn from", func() bool {
		behind, _ := n.behind(t, stranger)
		return behind == teacher.Name
	})
	// Neither does the port get what belongs to others, nor do others get what is its own.
	for _, m := range []net.HardwareAddr{stranger, neighbour.PeerMAC, mac("02:00:00:00:02:01")} {
		say(t, inHostile, m)
	}
	say(t, inTeacher, neighbour.PeerMAC)
	expect.Success(t, nstest.Ping(t, inNeighbour, addrs(hostile)[0]))
	for m, want := range map[string]string{stranger.String(): teacher.Name, neighbour.PeerMAC.String(): neighbour.Name, "02:00:00:00:02:01": "", hostile.PeerMAC.String(): hostile.Name} {
		behind, entry := n.behind(t, mac(m))
		expect.That(t, behind == want, "%s is behind %q, want %q: %s", m, behind, want, entry)
	}
	// What is behind the pod, as a bridge of its own, is reached all the same.
	nstest.Run(t, inHostile, "ip", "link", "add", "inner", "link", "eth0", "type", "macvlan", "mode", "bridge")
	nstest.Run(t, inHostile, "ip", "addr", "add", "10.44.0.99/24", "dev", "inner")
	nstest.Run(t, inHostile, "ip", "link", "set", "inner", "up")
	expect.Success(t, nstest.Ping(t, inTeacher, nstest.Addr("10.44.0.99")))
}

func TestStaticEntryTakesTheMACFromWhomTheBridgeHeardItAndNobodyElse(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	teacher := port(0)
	inTeacher, _ := attach(t, n, teacher)
	br, err := n.conn.Link(t.Context(), "br0")
	must.Succeed(t, err)
	owner := silent(1)
	_, owned := attach(t, n, owner)
	for _, tt := range []struct {
		name  string
		mac   net.HardwareAddr
		heard bool
		want  string // of the bridge's entry; the new port unless it is said
	}{
		{name: "new to the bridge", mac: mac("02:00:00:00:03:01")},
		{name: "heard elsewhere", mac: mac("02:00:00:00:03:02"), heard: true},
		{name: "the bridge's own", mac: br.MAC, want: "br0"},
		{name: "another pod's", mac: owner.PeerMAC, want: owner.Name},
		{name: "another port's", mac: owned.MAC, want: owner.Name},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if tt.heard {
				say(t, inTeacher, tt.mac)
				must.Until(t, "the bridge learns", func() bool {
					behind, _ := n.behind(t, tt.mac)
					return behind == teacher.Name
				})
			}
			p := silent(2)
			p.PeerMAC = tt.mac
			attach(t, n, p)
			defer func() { expect.Success(t, n.conn.Detach(t.Context(), p.Name, p.Alias)) }()
			want := tt.want
			if want == "" {
				want = p.Name
			}
			check := func(when string) {
				t.Helper()
				behind, entry := n.behind(t, tt.mac)
				expect.That(t, behind == want, "%s, it is behind %q, want %q: %s", when, behind, want, entry)
				diffs, err := n.conn.Check(t.Context(), p)
				expect.That(t, err == nil && (len(diffs) == 0) == (tt.want == ""),
					"%s, Check says %v, %v", when, diffs, err)
			}
			check("after Attach")
			must.Succeed(t, n.conn.Enslave(t.Context(), p))
			check("after Enslave")
			if tt.want != "" {
				return
			}
			nstest.Run(t, n.ns, "bridge", "fdb", "del", tt.mac.String(), "dev", p.Name, "master")
			if diffs, err := n.conn.Check(t.Context(), p); err != nil || len(diffs) != 1 || !strings.Contains(diffs[0].String(), "static FDB entry") {
				t.Errorf("without the entry, Check says %v, %v", diffs, err)
			}
		})
	}
}
