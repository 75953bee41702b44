package conntrack

import (
	"context"
	"fmt"
	"net/netip"
	"testing"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/nl"
	"github.com/tombolo-cni/tombolo/internal/nl/nltest"
	"github.com/tombolo-cni/tombolo/internal/nstest"
	"github.com/tombolo-cni/tombolo/netns"
)

// fill makes n flows of UDP that nobody asks for, in alternate families.
func fill(tb testing.TB, ns *netns.NS, n int) {
	tb.Helper()
	conn, err := nl.Dial(unix.NETLINK_NETFILTER, &nl.Config{NetNS: ns})
	if err != nil {
		tb.Fatal(err)
	}
	defer conn.Close()
	var b nl.Batch
	for i := range n {
		src, dst := netip.AddrFrom4([4]byte{10, 1, byte(i >> 16), byte(i >> 8)}), nstest.Addr("8.8.8.8")
		if i%2 == 1 {
			src, dst = netip.AddrFrom16([16]byte{0xfd, 14: byte(i >> 16), 15: byte(i >> 8)}), nstest.Addr("2001:db8::8")
		}
		sport := uint16(1024 + i&0xff)
		there, back := netip.AddrPortFrom(src, sport), netip.AddrPortFrom(dst, 53)
		m, err := encode(messageNew, netlink.Create|netlink.Excl, familyOf(src), func(ae *netlink.AttributeEncoder) {
			nested(ae, attrTupleOrig, Tuple{Src: there, Dst: back}.encode(unix.IPPROTO_UDP))
			nested(ae, attrTupleReply, Tuple{Src: back, Dst: there}.encode(unix.IPPROTO_UDP))
			const timeout = 7 // CTA_TIMEOUT, in seconds
			ae.Uint32(timeout, 36000)
		})
		b.Add("add flow", nil, m, err)
		if b.Len() == 200 || i == n-1 {
			if err := conn.Execute(&b); err != nil {
				tb.Fatal(err)
			}
			b.Reset()
		}
	}
}

func (t Tuple) encode(proto uint8) func(*netlink.AttributeEncoder) {
	src, dst := uint16(ipV4Src), uint16(ipV4Dst)
	if t.Src.Addr().Is6() {
		src, dst = ipV6Src, ipV6Dst
	}
	return func(ae *netlink.AttributeEncoder) {
		nested(ae, tupleIP, func(ae *netlink.AttributeEncoder) {
			nl.PutAddr(ae, src, t.Src.Addr())
			nl.PutAddr(ae, dst, t.Dst.Addr())
		})
		nested(ae, tupleProto, func(ae *netlink.AttributeEncoder) {
			ae.Uint8(protoNum, proto)
			ae.Uint16(protoSrcPort, t.Src.Port())
			ae.Uint16(protoDstPort, t.Dst.Port())
		})
	}
}

// received counts the flows that the kernel has sent.
func received(rec *nltest.Recorder) int {
	n := 0
	for _, datagram := range rec.Received() {
		for _, m := range nltest.Split(datagram) {
			if m.Header.Type == messageNew {
				n++
			}
		}
	}
	return n
}

func TestKernelSendsOnlyWhatMatters(t *testing.T) {
	t.Parallel()
	const others = 20_000
	ns := nstest.New(t)
	fill(t, ns, others)
	// The filler goes to port 53, as DNS does; and so does what is looked for.
	stale4, stale6 := plain("udp", "198.51.100.1:4000", "192.0.2.1:53"), plain("udp", "[2001:db8::1]:4000", "[2001:db8:1::1]:53")
	publication := func(host, pod string) Publication {
		return Publication{unix.IPPROTO_UDP, mustPort(host), mustPort(pod)}
	}
	pod4, pod6 := flow("udp", "198.51.100.1:4000", "192.0.2.1:5300", "10.22.0.6:53", "198.51.100.1:4000"),
		flow("udp", "[2001:db8::1]:4000", "[2001:db8:1::1]:5300", "[fd00:22::6]:53", "[2001:db8::1]:4000")
	for _, tc := range []struct {
		name    string
		filters []Filter
		there   []string
		want    int // how many the kernel sends
	}{
		{"an address and a port", []Filter{publication("192.0.2.1:53", "10.22.0.6:53").Stale(nil)}, []string{stale4}, 1},
		{"a port", []Filter{publication("0.0.0.0:5300", "10.22.0.6:53").Flows()}, []string{pod4}, 1},
		{"a port, IPv6", []Filter{publication("[::]:5300", "[fd00:22::6]:53").Flows()}, []string{pod6}, 1},
		{"a port of both families", []Filter{{Proto: unix.IPPROTO_UDP, Orig: Match{DstPort: 5300}}}, []string{pod4, pod6}, 2},
		// The kernel compares what all filters of a family have in common.
		{"a sender or a receiver", Of(nstest.Addr("10.22.0.6")), []string{pod4}, others/2 + 1},
		// What no kernel up to 6.18 can do for us.
		{"a port that others have too", []Filter{publication("0.0.0.0:53", "10.22.0.6:53").Stale(isHosts)}, []string{stale4}, others/2 + 1},
		{"an IPv6 address, and a port that others have too", []Filter{publication("[2001:db8:1::1]:53", "[fd00:22::6]:53").Stale(nil)}, []string{stale6}, others/2 + 1},
	} {
		t.Run(tc.name, func(t *testing.T) {
			insert(t, ns, tc.there...)
			c, rec := dialRecorded(t, ns)
			mustFlush(t, c, len(tc.there), tc.filters...)
			if got := received(rec); got != tc.want {
				t.Errorf("the kernel sent %d flows, want %d", got, tc.want)
			}
		})
	}
	t.Run("without its filter it sends all", func(t *testing.T) {
		c, rec := dialRecorded(t, ns, &nltest.Fault{Type: messageGet, Errno: unix.EOPNOTSUPP, Nth: 1})
		mustFlush(t, c, 0, publication("192.0.2.1:53", "10.22.0.6:53").Stale(nil))
		if got := received(rec); got != others/2 {
			t.Errorf("the kernel sent %d flows, want %d", got, others/2)
		}
	})
	t.Run("all are deleted if asked for", func(t *testing.T) {
		mustFlush(t, dial(t, ns), others, Filter{Proto: unix.IPPROTO_UDP, Orig: Match{DstPort: 53}})
		wantListed(t, ns)
	})
}

// BenchmarkFlush flushes what is not there among other flows of the node.
func BenchmarkFlush(b *testing.B) {
	for _, others := range []int{0, 20_000} {
		ns := nstest.New(b)
		fill(b, ns, others)
		c := dial(b, ns)
		pod4, pod6 := nstest.Addr("10.22.0.6"), nstest.Addr("fd00:22::6")
		for _, bc := range []struct {
			name    string
			filters []Filter
		}{
			{"port", []Filter{Publication{unix.IPPROTO_UDP, mustPort("0.0.0.0:5300"), netip.AddrPortFrom(pod4, 53)}.Stale(isHosts)}},
			{"address", Of(pod4)},
			{"address6", Of(pod6)},
		} {
			b.Run(fmt.Sprintf("%s/flows=%d", bc.name, others), func(b *testing.B) {
				b.ReportAllocs()
				for b.Loop() {
					if n, err := c.Flush(context.Background(), bc.filters...); n != 0 || err != nil {
						b.Fatal(n, err)
					}
				}
			})
		}
	}
}
