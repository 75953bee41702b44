package hostport

import (
	"context"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
	"github.com/tombolo-cni/tombolo/nft"
)

func TestMain(m *testing.M) { nstest.Main(m) }

// The kernel's listing tells what is left: the flow to the pod after FlushStale, and none of it
// after Flush.
func TestFlowsOfAPortAreFlushed(t *testing.T) {
	t.Parallel()
	ns := nstest.New(t)
	nstest.Run(t, ns, "ip", "link", "set", "lo", "up")
	nstest.Run(t, ns, "ip", "address", "add", "192.0.2.1/32", "dev", "lo")
	nstest.Run(t, ns, "ip", "address", "add", "192.0.2.2/32", "dev", "lo")
	nstest.Run(t, ns, "ip", "address", "add", "2001:db8::2/128", "dev", "lo")
	insert := func(client, to, answers string) {
		t.Helper()
		src, dst, reply := netip.MustParseAddrPort(client), netip.MustParseAddrPort(to), netip.MustParseAddrPort(answers)
		port := func(a netip.AddrPort) string { return strconv.Itoa(int(a.Port())) }
		nstest.Run(t, ns, "conntrack", "-I", "-t", "600", "-p", "udp", "-s", src.Addr().String(), "-d", dst.Addr().String(), "--sport", port(src), "--dport", port(dst),
			"-r", reply.Addr().String(), "-q", src.Addr().String(), "--reply-port-src", port(reply), "--reply-port-dst", port(src))
	}
	insert("198.51.100.1:4001", "192.0.2.1:53", "192.0.2.1:53")        // to the host itself
	insert("198.51.100.1:4002", "192.0.2.1:53", "10.22.0.4:5353")      // to a pod before
	insert("198.51.100.1:4003", "192.0.2.1:53", "10.22.0.5:5353")      // to the pod
	insert("198.51.100.1:4004", "198.51.100.9:53", "198.51.100.9:53")  // forwarded to elsewhere
	insert("198.51.100.1:4005", "192.0.2.2:53", "10.22.0.4:5353")      // to a pod before, at another address
	insert("198.51.100.1:4006", "192.0.2.1:54", "192.0.2.1:54")        // to another port
	insert("198.51.100.1:4007", "192.0.2.1:53", "10.23.0.5:5353")      // to another address of the pod
	insert("[2001:db8::1]:4008", "[2001:db8::2]:53", "[fd01::4]:5353") // to a pod before, over IPv6
	left := func() string {
		t.Helper()
		var sports []string
		for line := range strings.Lines(nstest.Run(t, ns, "conntrack", "-L", "-p", "udp") + nstest.Run(t, ns, "conntrack", "-L", "-p", "udp", "-f", "ipv6")) {
			for _, word := range strings.Fields(line) {
				if port, ok := strings.CutPrefix(word, "sport="); ok {
					sports = append(sports, port)
					break
				}
			}
		}
		slices.Sort(sports)
		return strings.Join(slices.Compact(sports), " ")
	}
	conn := must.Of(Dial(ns, nil)).Get(t)
	defer conn.Close()
	pod := []netip.Addr{nstest.Addr("10.22.0.5"), nstest.Addr("10.23.0.5"), nstest.Addr("fd01::5")}
	port := nft.Port{Protocol: nft.UDP, HostPort: 53, PodPort: 5353}
	named, next := port, port
	named.HostAddr, next.HostPort = nstest.Addr("192.0.2.1"), 54
	stream := next
	stream.Protocol = nft.TCP
	for _, step := range []struct {
		name  string
		do    func(context.Context, []netip.Addr, ...nft.Port) error
		ports []nft.Port
		want  string
	}{
		{"FlushStale of TCP", conn.FlushStale, []nft.Port{stream}, "4001 4002 4003 4004 4005 4006 4007 4008"},
		{"FlushStale of one address", conn.FlushStale, []nft.Port{named}, "4003 4004 4005 4006 4008"},
		{"FlushStale", conn.FlushStale, []nft.Port{port, stream}, "4003 4004 4006"},
		{"FlushStale of two ports", conn.FlushStale, []nft.Port{port, next}, "4003 4004"},
		{"Flush", conn.Flush, []nft.Port{port}, "4004"},
	} {
		must.Succeed(t, step.do(t.Context(), pod, step.ports...))
		expect.Equal(t, left(), step.want, "%s leaves the flows from", step.name)
	}
}
