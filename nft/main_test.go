package nft

import (
	"context"
	"encoding/json"
	"errors"
	"net/netip"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo"
	"github.com/tombolo-cni/tombolo/internal/nftnl"
	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nltest"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
	"github.com/tombolo-cni/tombolo/netns"
)

func TestMain(m *testing.M) { nstest.Main(m) }

func messageType(msg uint16) uint16 { return uint16(nftnl.Type(msg)) }

// answerOf is a message of nf_tables: struct nfgenmsg and attributes.
func answerOf(r netlink.Message, msg, flags uint16, attrs ...netlink.Attribute) []byte {
	return nltest.Reply(r, messageType(msg), flags, append([]byte{0, unix.NFNETLINK_V0, 0, 0}, nltest.Attributes(attrs...)...))
}

func dial(tb testing.TB, ns *netns.NS) *Conn {
	tb.Helper()
	return dialMark(tb, ns, 0)
}

func dialMark(tb testing.TB, ns *netns.NS, mark uint32) *Conn {
	tb.Helper()
	c := must.Of(Dial(&Config{NetNS: ns, Mark: mark})).Get(tb)
	tb.Cleanup(func() { c.Close() })
	return c
}

func dialNew(tb testing.TB) (*Conn, *netns.NS) {
	tb.Helper()
	ns := nstest.New(tb)
	return dial(tb, ns), ns
}

// dialFaulty gives a Conn to a real kernel that fails as the test says.
func dialFaulty(tb testing.TB, ns *netns.NS, faults ...*nltest.Fault) *Conn {
	tb.Helper()
	return On(nltest.Dial(tb, unix.NETLINK_NETFILTER, ns, faults...), nil)
}

// podnet is the network of most tests: dual-stack, with masquerade.
func podnet() Network {
	return Network{Name: "podnet", Prefixes: nstest.Prefixes("10.22.0.0/16", "fd00:22::/64"), Masquerade: true}
}

func pod(owner Owner, addresses ...string) Endpoint {
	return Endpoint{Owner: owner, Network: "podnet", Bridge: "cbr0", Addrs: nstest.Addrs(addresses...), Masquerade: true}
}

// outcome is what Ensure, or Prepare without sentinels, does and finds.
type outcome struct{ Changed, Emptied bool }

func mustEnsure(tb testing.TB, c *Conn, n Network) outcome {
	tb.Helper()
	return ensured(tb, c, n, true)
}

func ensured(tb testing.TB, c *Conn, n Network, sentinels bool) outcome {
	tb.Helper()
	changed, emptied, err := c.ensure(context.Background(), n, sentinels)
	must.Succeed(tb, err)
	return outcome{changed, emptied}
}

func mustAdd(tb testing.TB, c *Conn, eps ...Endpoint) {
	tb.Helper()
	for _, ep := range eps {
		must.Succeed(tb, c.Add(context.Background(), ep))
	}
}

// wantEndpoints compares what the kernel has of all networks.
func wantEndpoints(tb testing.TB, c *Conn, want ...Endpoint) {
	tb.Helper()
	got := must.Of(c.Endpoints(context.Background(), "")).Get(tb)
	known := cmpopts.IgnoreFields(Endpoint{}, "Ports", "Guard", "GuardedPort", "SLAAC", "MAC", "PortSNAT", "Callers")
	expect.NoDiff(tb, cmp.Diff(want, got, known, cmpopts.EquateEmpty(), cmpopts.EquateComparable(netip.Addr{}, netip.Prefix{})), "endpoints")
}

// checkAll is Check and CheckEndpoint.
func checkAll(c *Conn, n Network, eps ...Endpoint) ([]tombolo.Difference, error) {
	all, err := c.Check(context.Background(), n)
	for _, ep := range eps {
		diffs, epErr := c.CheckEndpoint(context.Background(), ep)
		all, err = append(all, diffs...), errors.Join(err, epErr)
	}
	return all, err
}

// wantReady checks that Ready, Check and Ensure agree that nothing is to be done.
func wantReady(tb testing.TB, c *Conn, n Network, eps ...Endpoint) {
	tb.Helper()
	ctx := context.Background()
	expect.Of(c.Ready(ctx, n)).Is(tb, true, "Ready")
	expect.Of(checkAll(c, n, eps...)).Len(tb, 0, "Check")
	out := mustEnsure(tb, c, n)
	expect.That(tb, !out.Changed, "Ensure changed something: %+v", out)
}

func nft(tb testing.TB, ns *netns.NS, args ...string) string {
	tb.Helper()
	return nstest.Run(tb, ns, "nft", args...)
}

// listing is nft's, as JSON: what is there, by kind.
func listing(tb testing.TB, ns *netns.NS) map[string][]map[string]any {
	tb.Helper()
	var doc struct {
		Nftables []map[string]map[string]any
	}
	must.Succeed(tb, json.Unmarshal([]byte(nft(tb, ns, "-j", "list", "ruleset")), &doc))
	byKind := map[string][]map[string]any{}
	for _, entry := range doc.Nftables {
		for kind, object := range entry {
			byKind[kind] = append(byKind[kind], object)
		}
	}
	return byKind
}

// normal gives a listing of nft's without what differs from run to run: the order
// of a set's elements, and the numbers that the kernel gives rules.
func normal(listing string) string {
	elements := regexp.MustCompile(`(?s)(elements = \{ )(.*?)( \})`)
	listing = elements.ReplaceAllStringFunc(listing, func(s string) string {
		m := elements.FindStringSubmatch(s)
		list := regexp.MustCompile(`,\s+`).Split(m[2], -1)
		slices.Sort(list)
		return m[1] + strings.Join(list, ",\n\t\t\t     ") + m[3]
	})
	// With --debug=netlink.
	listing = regexp.MustCompile(`(?m)^\s+element .*\n`).ReplaceAllString(listing, "")
	// nft does this, which does nothing, to a number of one byte before it looks for it among intervals.
	listing = regexp.MustCompile(`(?m)^.*\[ byteorder reg \d+ = hton\(reg \d+, 2, 1\) \]\n`).ReplaceAllString(listing, "")
	return regexp.MustCompile(`(?m)^((?:inet|bridge|netdev) tombolo \S+)( \d+)+ *$`).ReplaceAllString(listing, "$1")
}
