package ruleset

import (
	"hash/fnv"
	"net"
	"testing"

	"github.com/google/nftables"

	"github.com/tombolo-cni/tombolo/internal/nftnl"
	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nltest"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
)

func TestMain(m *testing.M) { nstest.Main(m) }

// podnet is dual-stack, with masquerade.
func podnet() *Network {
	return &Network{Key: "podnet", Masquerade: true, Exempt: nstest.Prefixes("10.22.0.0/16", "fd00:22::/64")}
}

func dedups() []Dedup {
	mac := net.HardwareAddr{2, 0, 0, 0, 0, 1}
	return []Dedup{
		{BridgeMAC: mac, Gateway: nstest.Addr("10.22.0.1"), Subnet: nstest.Prefix("10.22.0.0/16")},
		{BridgeMAC: mac, Gateway: nstest.Addr("fd00:22::1"), Subnet: nstest.Prefix("fd00:22::/64")},
	}
}

// A chain whose rules changed without its comment would be taken for right.
func TestRulesVersionIsRaisedWithTheRules(t *testing.T) {
	t.Parallel()
	known := map[int]uint32{1: 0x73da0990}
	sum := fnv.New32a()
	for _, n := range []*Network{
		podnet(),
		{Key: "x", Masquerade: true, Exempt: nstest.Prefixes("10.0.0.0/9", "fd00::/61", "::/0"), PortSNAT: true},
		{Key: "guard", Guard: true, Dedup: dedups(), DropReports: true},
		{Key: "share", Bridge: "br0", Share: &Share{NIC: "eth0", MAC: net.HardwareAddr{2, 0, 0, 0, 0, 1}, Outer: 5, Port: "vethin"}},
	} {
		rs := New(n, nftnl.DefaultTable, nftnl.DefaultMark)
		for _, ch := range rs.Chains {
			for _, r := range ch.Rules() {
				b := must.Of(nftnl.Marshal(ch.Family, r.Steps)).Get(t)
				sum.Write(append([]byte(r.Comment), nltest.Canonical(b)...))
			}
		}
	}
	if known[rulesVersion] != sum.Sum32() {
		t.Errorf("rules of version %d have the sum %#08x, and had %#08x: once a version has been released, "+
			"a change of its rules needs a new rulesVersion, and this test a new line", rulesVersion, sum.Sum32(), known[rulesVersion])
	}
}

func TestPrioritiesAreTheLibrarys(t *testing.T) {
	t.Parallel()
	for theirs, ours := range map[*nftables.ChainPriority]int32{
		nftables.ChainPriorityRaw: priorityRaw, nftables.ChainPriorityNATDest: priorityDestinationNAT, nftables.ChainPriorityNATSource: prioritySourceNAT,
	} {
		expect.Equal(t, int32(*theirs), ours, "priority %d, and the library has %d", ours, *theirs)
	}
}

func TestTypesHaveTheLibrarysNumbers(t *testing.T) {
	t.Parallel()
	for theirs, ours := range map[nftables.SetDatatype]uint32{
		nftables.TypeInteger: nftnl.TypeInteger, nftables.TypeIPAddr: nftnl.TypeIPv4, nftables.TypeIP6Addr: nftnl.TypeIPv6,
		nftables.TypeEtherAddr: nftnl.TypeEther, nftables.TypeInetProto: nftnl.TypeProtocol, nftables.TypeInetService: nftnl.TypePort, nftables.TypeIFName: nftnl.TypeIfname,
	} {
		if theirs.GetNFTMagic() != ours {
			t.Errorf("%s: %d, and the library has %d", theirs.Name, ours, theirs.GetNFTMagic())
		}
	}
	expect.Equal(t, nftnl.TypeBits, nftables.SetConcatTypeBits, "bits for a part of a concatenation")
}
