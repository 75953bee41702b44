package ruleset

import (
	"net"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/tombolo-cni/tombolo/internal/ident"
	"github.com/tombolo-cni/tombolo/internal/nftnl"
	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
)

const podMAC = "02:00:00:00:00:05"

func mac(text string) net.HardwareAddr {
	b, err := net.ParseMAC(text)
	if err != nil {
		panic(err)
	}
	return b
}

func TestLinkLocalAddressIsTheKernels(t *testing.T) {
	t.Parallel()
	ns := nstest.New(t)
	nstest.Veth(t, ns, "left", ns, "right")
	for _, text := range []string{podMAC, "fe:dc:ba:98:76:54", "00:11:22:33:44:55"} {
		nstest.Run(t, ns, "sh", "-ec", "ip link set left down; ip link set left address "+text+"; ip link set left addrgenmode eui64; ip link set left up")
		if got, want := nstest.Run(t, ns, "ip", "-6", "-o", "addr", "show", "dev", "left"), ident.LinkLocal(mac(text)).String()+"/64"; !strings.Contains(got, want) {
			t.Errorf("%s has %s, want %s", text, got, want)
		}
	}
}

// A comment names one rule of the chain, for nft's Check.
func TestCommentsOfGuardRulesDiffer(t *testing.T) {
	t.Parallel()
	const maxComment = 128 // of nft
	rs := New(&Network{Key: "guard", Guard: true, DropReports: true}, nftnl.DefaultTable, nftnl.DefaultMark)
	for _, ch := range rs.Chains {
		var comments []string
		for _, r := range ch.Rules() {
			expect.That(t, len(r.Comment) < maxComment && !slices.Contains(comments, r.Comment),
				"%s: %q: too long, or twice", ch.Name, r.Comment)
			expect.That(t, len(r.Steps) > 0, "%s: %q: no steps", ch.Name, r.Comment)
			comments = append(comments, r.Comment)
		}
		expect.That(t, len(comments) > 0, "%s: no rules", ch.Name)
	}
}

// Every element is of a set that there is, and has a key of its length.
func TestElementsFitTheirSets(t *testing.T) {
	t.Parallel()
	for _, p := range []GuardedPort{
		{Name: "veth1", MAC: mac(podMAC)},
		{Name: "veth1", MAC: mac(podMAC), Addrs: []netip.Addr{nstest.Addr("10.22.0.5"), nstest.Addr("fd00::5"), nstest.Addr("10.22.0.5")}},
		{Name: "veth1", MAC: mac(podMAC), SLAAC: true, Untrusted: true},
		{Name: "veth1", MAC: mac(podMAC), Addrs: []netip.Addr{nstest.Addr("10.22.0.5")}, MACOnly: true},
	} {
		for _, el := range p.Elements() {
			i := slices.IndexFunc(guardSets(), func(s Set) bool { return s.Place == el.Set })
			expect.That(t, i >= 0 && int(guardSets()[i].KeyLen) == len(el.Key), "%s", el)
		}
	}
}
