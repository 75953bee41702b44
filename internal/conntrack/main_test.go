package conntrack

import (
	"context"
	"encoding/binary"
	"net/netip"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/nl"
	"github.com/tombolo-cni/tombolo/internal/nl/nltest"
	"github.com/tombolo-cni/tombolo/internal/nstest"
	"github.com/tombolo-cni/tombolo/netns"
)

func TestMain(m *testing.M) { nstest.Main(m) }

func dial(tb testing.TB, ns *netns.NS) *Conn {
	tb.Helper()
	c, err := Dial(&Config{NetNS: ns})
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() { c.Close() })
	return c
}

// dialFaulty gives a Conn to a real kernel that fails as the test says.
func dialFaulty(tb testing.TB, ns *netns.NS, faults ...*nltest.Fault) *Conn {
	tb.Helper()
	c, _ := dialRecorded(tb, ns, faults...)
	return c
}

// dialRecorded gives what passes over the connection besides.
func dialRecorded(tb testing.TB, ns *netns.NS, faults ...*nltest.Fault) (*Conn, *nltest.Recorder) {
	tb.Helper()
	t, err := nl.Open(unix.NETLINK_NETFILTER, &nl.Config{NetNS: ns})
	if err != nil {
		tb.Fatal(err)
	}
	rec := nltest.Record(nltest.NewFaulty(t, faults...))
	conn := nl.New(rec)
	tb.Cleanup(func() { conn.Close() })
	nltest.MustHaveFired(tb, faults...)
	return On(conn), rec
}

// crowded is a kernel that says it has a million flows, so that filters are put to it
// one by one.
type crowded struct{ nl.Transport }

func (c crowded) Receive(b []byte) (int, error) {
	n, err := c.Transport.Receive(b)
	const entries = unix.NLMSG_HDRLEN + headerLen + unix.NLA_HDRLEN
	if err == nil && n >= entries+4 && binary.NativeEndian.Uint16(b[4:]) == messageStats {
		binary.BigEndian.PutUint32(b[entries:], 1_000_000)
	}
	return n, err
}

func dialCrowded(tb testing.TB, ns *netns.NS) *Conn {
	tb.Helper()
	t, err := nl.Open(unix.NETLINK_NETFILTER, &nl.Config{NetNS: ns})
	if err != nil {
		tb.Fatal(err)
	}
	conn := nl.New(crowded{t})
	tb.Cleanup(func() { conn.Close() })
	return On(conn)
}

// fakeKernel has a number of flows, and never one that is asked for.
func fakeKernel(count uint32) *nltest.Fake {
	return nltest.NewFake(func(requests []netlink.Message) [][]byte {
		if r := requests[0]; r.Header.Type == messageStats {
			return [][]byte{nltest.Reply(r, messageStats, 0, nltest.Body(header(unix.AF_UNSPEC), func(ae *netlink.AttributeEncoder) {
				ae.Bytes(statsEntries, binary.BigEndian.AppendUint32(nil, count))
			}))}
		}
		return nltest.AckAll(requests)
	})
}

func mustFlush(tb testing.TB, c *Conn, want int, filters ...Filter) {
	tb.Helper()
	got, err := c.Flush(context.Background(), filters...)
	if err != nil {
		tb.Fatal(err)
	}
	if got != want {
		tb.Errorf("flushed %d flows, want %d", got, want)
	}
}

// listed gives what conntrack lists of both families, in the words of insert, sorted.
func listed(tb testing.TB, ns *netns.NS) []string {
	tb.Helper()
	var list []string
	// It lists both families unless told otherwise.
	for line := range strings.Lines(nstest.Run(tb, ns, "conntrack", "-L", "-o", "extended")) {
		fields := regexp.MustCompile(`\b(?:src|dst|sport|dport|type|code|id)=\S+`).FindAllString(line, -1)
		proto := strings.Fields(line)[2]
		list = append(list, proto+" "+strings.Join(fields, " "))
	}
	slices.Sort(list)
	return list
}

// wantListed compares what conntrack lists.
func wantListed(tb testing.TB, ns *netns.NS, want ...string) {
	tb.Helper()
	want = slices.Clone(want)
	slices.Sort(want)
	if diff := cmp.Diff(want, listed(tb, ns)); diff != "" {
		tb.Errorf("flows that conntrack lists (-want +got):\n%s", diff)
	}
}

// insert makes flows by conntrack -I. They are written as listed prints them: the
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
		switch f[0] {
		case "tcp":
			args = append(args, "--state", "ESTABLISHED")
		case "sctp":
			args = append(args, "--state", "ESTABLISHED", "--orig-vtag", "1", "--reply-vtag", "2")
		}
		commands += strings.Join(args, " ") + "\n"
	}
	file := filepath.Join(tb.TempDir(), "flows")
	if err := os.WriteFile(file, []byte(commands), 0o644); err != nil {
		tb.Fatal(err)
	}
	nstest.Run(tb, ns, "conntrack", "-R", file)
}

// flow writes a flow down as insert and listed do. There is a translation where the
// answers come from somewhere else than the flow goes to.
func flow(proto, src, dst, answerSrc, answerDst string) string {
	a, b, c, d := netip.MustParseAddrPort(src), netip.MustParseAddrPort(dst), netip.MustParseAddrPort(answerSrc), netip.MustParseAddrPort(answerDst)
	text := func(s, d netip.AddrPort) string {
		return strings.Join([]string{
			"src=" + s.Addr().String(), "dst=" + d.Addr().String(),
			"sport=" + portOf(s), "dport=" + portOf(d),
		}, " ")
	}
	return proto + " " + text(a, b) + " " + text(c, d)
}

func portOf(a netip.AddrPort) string { return strconv.Itoa(int(a.Port())) }

// plain is a flow without a translation.
func plain(proto, src, dst string) string { return flow(proto, src, dst, dst, src) }
