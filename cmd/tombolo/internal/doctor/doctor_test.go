package doctor

import (
	"testing"

	"github.com/tombolo-cni/tombolo"
	"github.com/tombolo-cni/tombolo/cmd/tombolo/internal/report"
	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
	"github.com/tombolo-cni/tombolo/network"
)

func TestMain(m *testing.M) { nstest.Main(m) }

// How these look is for test/cni, which breaks each thing on a node.
func TestADifferenceBelongsToTheStepThatItBreaks(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		d    tombolo.Difference
		step Step
	}{
		{tombolo.Difference{Text: "it is dead: port veth0 is missing"}, StepNamespace},
		{tombolo.Difference{Text: "its lease is waiting: no answer"}, StepLease},
		{tombolo.Difference{Text: "no keeper runs for the leases of /x"}, StepLease},
		{tombolo.Difference{Object: "interface eth0", What: "address", Want: "10.0.0.2/24"}, StepAddress},
		{tombolo.Difference{Object: "interface eth0", What: "route", Want: "default"}, StepRoute},
		{tombolo.Difference{Object: "interface eth0", What: "MTU", Want: "1500", Have: "9000"}, StepMTU},
		{tombolo.Difference{Object: "port veth0", What: "link", Want: "up", Have: "down"}, StepLink},
		{tombolo.Difference{Object: "bridge br0", What: "link", Want: "br0"}, StepLink},
		{tombolo.Difference{Object: "bridge br0", What: "nf_call_iptables", Want: "on", Have: "off"}, StepFirewall},
		{tombolo.Difference{Object: "set pods4 of table inet tombolo", What: "element", Want: "x"}, StepFirewall},
		{tombolo.Difference{Text: "bridge br0: the gateway 10.0.0.1/24 is missing"}, StepGateway},
		{tombolo.Difference{Text: "the host does not forward IPv4 (net.ipv4.ip_forward)"}, StepForwarding},
		{tombolo.Difference{Text: "bridge br0: the host's route to 10.0.0.0/24 is missing"}, StepForwarding},
		{tombolo.Difference{Object: "kernel parameters", What: "net/ipv4/conf/br0/forwarding", Want: "1", Have: "0"}, StepForwarding},
	} {
		expect.Equal(t, StepOf(tt.d), tt.step, "%s", tt.d)
	}
}

func TestAFindingHasTheRemedyOfItsDifference(t *testing.T) {
	t.Parallel()
	e := &examination{}
	e.recorded(report.Causes(&network.Inspection{Stray: []tombolo.Difference{
		{Text: "x", Remedy: tombolo.RemedyRepair},
		{Text: "its lease ended", Remedy: tombolo.RemedyKeeper},
		{Text: "chain f of table inet fw drops what pods send; this helps: nft add rule", Remedy: tombolo.RemedyConfigure},
		{Text: "x", Remedy: tombolo.RemedyRepair},
		{Text: "it is dead", Remedy: tombolo.RemedyCollect},
	}}))
	want := []Finding{
		{Step: StepNamespace, Evidence: "it is dead", Remedy: "tombolo gc"},
		{Step: StepLink, Evidence: "x", Remedy: "tombolo repair"},
		{Step: StepFirewall, Evidence: "chain f of table inet fw drops what pods send", Remedy: "nft add rule"},
		{Step: StepLease, Evidence: "its lease ended", Remedy: "systemctl start tombolod"},
	}
	got := e.sorted()
	must.That(t, len(got) == len(want) && e.dead, "%+v", got)
	for i := range want {
		expect.Equal(t, got[i], want[i])
	}
}
