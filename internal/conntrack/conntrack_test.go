package conntrack

import (
	"context"
	"errors"
	"io/fs"
	"maps"
	"net/netip"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/nl"
	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/golden"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nltest"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
	"github.com/tombolo-cni/tombolo/netns"
)

func TestMain(m *testing.M) { nstest.Main(m) }

func dial(tb testing.TB, ns *netns.NS) *Conn {
	tb.Helper()
	c := must.Of(Dial(ns)).Get(tb)
	tb.Cleanup(func() { c.Close() })
	return c
}

func mustFlush(tb testing.TB, c *Conn, want int, questions ...Selector) {
	tb.Helper()
	expect.Equal(tb, must.Of(c.Flush(context.Background(), questions...)).Get(tb), want, "flushed")
}

// wantListed compares what conntrack lists of both families, in the words of insert.
func wantListed(tb testing.TB, ns *netns.NS, want ...string) {
	tb.Helper()
	var got []string
	for line := range strings.Lines(nstest.Run(tb, ns, "conntrack", "-L", "-o", "extended")) {
		fields := regexp.MustCompile(`\b(?:src|dst|sport|dport|type|code|id)=\S+`).FindAllString(line, -1)
		got = append(got, strings.Fields(line)[2]+" "+strings.Join(fields, " "))
	}
	slices.Sort(got)
	expect.NoDiff(tb, cmp.Diff(slices.Sorted(slices.Values(want)), got), "flows that conntrack lists")
}

// insert makes flows by conntrack -I. They are written as it prints them: the
// protocol, the original tuple and the reply. It cannot translate pings.
func insert(tb testing.TB, ns *netns.NS, flows ...string) {
	tb.Helper()
	commands := ""
	for _, flow := range flows {
		f := strings.Fields(flow)
		value := func(i int) string { _, v, _ := strings.Cut(f[i], "="); return v }
		args := []string{"-I", "-t", "36000", "-p", f[0], "-s", value(1), "-d", value(2)}
		switch f[0] {
		case "icmp":
			args = append(args, "--icmp-type", value(3), "--icmp-code", value(4), "--icmp-id", value(5))
		default:
			args = append(args, "--sport", value(3), "--dport", value(4),
				"-r", value(5), "-q", value(6), "--reply-port-src", value(7), "--reply-port-dst", value(8))
		}
		if f[0] == "tcp" {
			args = append(args, "--state", "ESTABLISHED")
		}
		commands += strings.Join(args, " ") + "\n"
	}
	file := filepath.Join(tb.TempDir(), "flows")
	must.Succeed(tb, os.WriteFile(file, []byte(commands), 0o644))
	nstest.Run(tb, ns, "conntrack", "-R", file)
}

// flow writes a flow down. There is a translation where the answers come from somewhere else than it goes to.
func flow(proto, src, dst, answerSrc, answerDst string) string {
	text := func(s, d string) string {
		from, to := netip.MustParseAddrPort(s), netip.MustParseAddrPort(d)
		port := func(at string) string { return at[strings.LastIndexByte(at, ':')+1:] }
		return "src=" + from.Addr().String() + " dst=" + to.Addr().String() + " sport=" + port(s) + " dport=" + port(d)
	}
	return proto + " " + text(src, dst) + " " + text(answerSrc, answerDst)
}

// plain is a flow without a translation.
func plain(proto, src, dst string) string { return flow(proto, src, dst, dst, src) }

// node has, by name, flows of a node with a pod (10.22.0.6, fd00:22::6) that has published UDP port 53.
func node() map[string]string {
	return map[string]string{
		"4 to the host":               plain("udp", "198.51.100.1:4000", "192.0.2.1:53"),
		"4 to the pod":                flow("udp", "198.51.100.1:4002", "192.0.2.1:53", "10.22.0.6:5353", "198.51.100.1:4002"),
		"4 to the pod's other port":   flow("udp", "198.51.100.1:4002", "192.0.2.1:54", "10.22.0.6:5354", "198.51.100.1:4002"),
		"4 to the pod directly":       plain("udp", "10.22.0.9:4000", "10.22.0.6:5353"),
		"4 forwarded":                 plain("udp", "10.22.0.9:4000", "8.8.8.8:53"),
		"4 from the pod, masqueraded": flow("udp", "10.22.0.6:4001", "8.8.8.8:53", "8.8.8.8:53", "192.0.2.1:4444"),
		"4 by tcp":                    plain("tcp", "198.51.100.1:4000", "192.0.2.1:53"),
		"4 by tcp to the pod":         flow("tcp", "198.51.100.1:4002", "192.0.2.1:53", "10.22.0.6:5353", "198.51.100.1:4002"),
		"6 to the host":               plain("udp", "[2001:db8::1]:4000", "[2001:db8:1::1]:53"),
		"6 to the pod":                flow("udp", "[2001:db8::1]:4002", "[2001:db8:1::1]:53", "[fd00:22::6]:5353", "[2001:db8::1]:4002"),
		"6 from the pod, masqueraded": flow("udp", "[fd00:22::6]:4000", "[2001:db8::53]:53", "[2001:db8::53]:53", "[2001:db8:1::1]:4000"),
		"6 forwarded":                 plain("udp", "[fd00:22::9]:4000", "[2001:db8::53]:53"),
		"4 ping from the pod":         "icmp src=10.22.0.6 dst=8.8.8.8 type=8 code=0 id=77 src=8.8.8.8 dst=10.22.0.6 type=0 code=0 id=77",
		"4 ping from another":         "icmp src=10.22.0.9 dst=8.8.8.8 type=8 code=0 id=77 src=8.8.8.8 dst=10.22.0.9 type=0 code=0 id=77",
	}
}

func all(*Flow) bool { return true }

func TestFlushTakesWhatIsAskedForAndNothingElse(t *testing.T) {
	t.Parallel()
	to := func(a string) func(*Flow) bool {
		return func(f *Flow) bool { return f.Reply.Src.Addr() == nstest.Addr(a) }
	}
	for name, tc := range map[string]struct {
		questions []Selector
		gone      []string
	}{
		"a port":                      {[]Selector{{unix.AF_INET, unix.IPPROTO_UDP, 53, all}}, []string{"4 to the host", "4 to the pod", "4 forwarded", "4 from the pod, masqueraded"}},
		"a port, to the pod":          {[]Selector{{unix.AF_INET, unix.IPPROTO_UDP, 53, to("10.22.0.6")}}, []string{"4 to the pod"}},
		"a protocol, to the pod":      {[]Selector{{unix.AF_INET, unix.IPPROTO_UDP, 0, to("10.22.0.6")}}, []string{"4 to the pod", "4 to the pod's other port", "4 to the pod directly"}},
		"IPv6, to the pod":            {[]Selector{{unix.AF_INET6, unix.IPPROTO_UDP, 53, to("fd00:22::6")}}, []string{"6 to the pod"}},
		"by tcp":                      {[]Selector{{unix.AF_INET, unix.IPPROTO_TCP, 53, all}}, []string{"4 by tcp", "4 by tcp to the pod"}},
		"all of addresses":            {[]Selector{Of(nstest.Addr("10.22.0.6")), Of(nstest.Addr("fd00:22::6"))}, []string{"4 to the pod", "4 to the pod's other port", "4 to the pod directly", "4 from the pod, masqueraded", "4 by tcp to the pod", "4 ping from the pod", "6 to the pod", "6 from the pod, masqueraded"}},
		"the same twice, and no flow": {[]Selector{{unix.AF_INET6, 0, 0, to("fd00:22::6")}, {unix.AF_INET6, 0, 0, to("fd00:22::6")}, Of(nstest.Addr("10.22.0.7"))}, nil},
	} {
		nstest.RunParallel(t, name, func(t *testing.T) {
			ns, other := nstest.New(t), nstest.New(t)
			flows := node()
			insert(t, ns, slices.Collect(maps.Values(flows))...)
			insert(t, other, flows["4 to the pod"])
			c := dial(t, ns)
			if tc.gone == nil {
				tc.gone = []string{"6 to the pod"}
			}
			mustFlush(t, c, len(tc.gone), tc.questions...)
			for _, name := range tc.gone {
				_, ok := flows[name]
				must.That(t, ok, "no flow is called %q", name)
				delete(flows, name)
			}
			wantListed(t, ns, slices.Collect(maps.Values(flows))...)
			wantListed(t, other, node()["4 to the pod"])
			mustFlush(t, c, 0, tc.questions...)
		})
	}
}

func TestFlowOfAZoneIsDeletedInItsZone(t *testing.T) {
	t.Parallel()
	ns := nstest.New(t)
	f := plain("udp", "198.51.100.1:4000", "192.0.2.1:53")
	insert(t, ns, f)
	nstest.Run(t, ns, "conntrack", "-I", "-t", "36000", "-p", "udp", "-s", "198.51.100.1", "-d", "192.0.2.1", "--sport", "4000", "--dport", "53", "--zone", "7")
	mustFlush(t, dial(t, ns), 1, Selector{Family: unix.AF_INET, Where: func(f *Flow) bool { return f.zone == 7 }})
	wantListed(t, ns, f)
}

// A flow that began meanwhile has another number.
func TestFlowThatCameInTheMeantimeStays(t *testing.T) {
	t.Parallel()
	ns := nstest.New(t)
	f := plain("udp", "198.51.100.1:4000", "192.0.2.1:53")
	insert(t, ns, f)
	mustFlush(t, dial(t, ns), 0, Selector{Family: unix.AF_INET, Where: func(f *Flow) bool { f.id++; return true }})
	wantListed(t, ns, f)
}

func TestErrors(t *testing.T) {
	t.Parallel()
	ns := nstest.New(t)
	flows := []string{plain("udp", "198.51.100.1:4000", "192.0.2.1:53"), plain("udp", "198.51.100.1:4001", "192.0.2.1:53")}
	insert(t, ns, flows...)
	udp53 := Selector{unix.AF_INET, unix.IPPROTO_UDP, 53, all}
	for _, tc := range []struct {
		fault *nltest.Fault
		is    error
		says  string
	}{
		{&nltest.Fault{Type: messageStats, Errno: unix.EINVAL}, errors.ErrUnsupported, "nf_conntrack_netlink"},
		{&nltest.Fault{Type: messageGet, Errno: unix.EPERM}, fs.ErrPermission, "list flows"},
		{&nltest.Fault{Type: messageDelete, Errno: unix.EBUSY}, unix.EBUSY, "delete flow of protocol 17 from 198.51.100.1:400"},
	} {
		c := &Conn{nl: nltest.Dial(t, unix.NETLINK_NETFILTER, ns, tc.fault)}
		if _, err := c.Flush(context.Background(), udp53); !errors.Is(err, tc.is) || !strings.Contains(err.Error(), tc.says) {
			t.Errorf("%v, want one that matches %v and says %q", err, tc.is, tc.says)
		}
	}
	wantListed(t, ns, flows...)
	c := &Conn{nl: nltest.Dial(t, unix.NETLINK_NETFILTER, ns, &nltest.Fault{Type: messageGet, Interrupt: true, Nth: 1})}
	mustFlush(t, c, 2, udp53)
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	insert(t, ns, flows[0])
	n, err := dial(t, ns).Flush(ctx, udp53)
	expect.That(t, n == 0 && errors.Is(err, context.Canceled), "with a context that is done: %d, %v", n, err)
}

func TestFlowsOfEveryProtocolAreRead(t *testing.T) {
	t.Parallel()
	ns := nstest.New(t)
	insert(t, ns, slices.Collect(maps.Values(node()))...)
	tr := must.Of(nl.Open(unix.NETLINK_NETFILTER, ns)).Get(t)
	rec := nltest.Record(tr)
	c := &Conn{nl: nl.New(rec)}
	t.Cleanup(func() { c.Close() })
	list := must.Of(c.List(context.Background(), Of(nstest.Addr("10.22.0.6")), Of(nstest.Addr("fd00:22::6")))).Get(t)
	var got []string
	for _, flow := range list {
		got = append(got, flow.String())
	}
	for _, want := range []string{
		"of protocol 1 from 10.22.0.6:0 to 8.8.8.8:0, answered by 8.8.8.8:0",
		"of protocol 17 from 10.22.0.6:4001 to 8.8.8.8:53, answered by 8.8.8.8:53",
		"of protocol 6 from 198.51.100.1:4002 to 192.0.2.1:53, answered by 10.22.0.6:5353",
		"of protocol 17 from [2001:db8::1]:4002 to [2001:db8:1::1]:53, answered by [fd00:22::6]:5353",
	} {
		expect.That(t, slices.Contains(got, want), "%q is not in the list:\n%s", want, strings.Join(got, "\n"))
	}
	if !golden.Updates() {
		return
	}
	for _, datagram := range rec.Received() {
		for _, m := range nltest.Split(datagram) {
			if m.Header.Type == messageStats {
				nstest.SaveCorpus(t, "FuzzStats", "kernel", m.Data)
			} else if flow, err := decode(m.Data); err == nil {
				nstest.SaveCorpus(t, "FuzzFlow", "kernel-"+flow.Orig.Src.Addr().String(), m.Data)
			}
		}
	}
}

// FuzzFlow reads what might be a flow. If it is one, the request that deletes it must
// have the tuple in it, without which the kernel would delete all flows.
func FuzzFlow(f *testing.F) {
	f.Add([]byte{unix.AF_INET, 0, 0, 0})
	f.Fuzz(func(t *testing.T, data []byte) {
		flow, err := decode(data)
		if err != nil {
			return
		}
		m := must.Of(flow.deleteMessage()).Get(t)
		attrs, err := netlink.NewAttributeDecoder(m.Data[headerLen:])
		must.That(t, err == nil && attrs.Next() && attrs.Type() == attrTupleOrig && len(attrs.Bytes()) != 0,
			"the request to delete %s begins with %x, %v", &flow, m.Data, err)
	})
}

func FuzzStats(f *testing.F) {
	f.Add([]byte{0, 0, 0, 0, 8, 0, statsEntries, 0, 0, 0, 1, 0})
	f.Fuzz(func(t *testing.T, data []byte) {
		_, err := decodeStats(data)
		must.That(t, err == nil || errors.Is(err, nl.ErrMalformed), "%v is not %v", err, nl.ErrMalformed)
	})
}
