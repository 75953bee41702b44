package tc

import (
	"testing"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/nl"
	"github.com/tombolo-cni/tombolo/internal/testutil/golden"
	"github.com/tombolo-cni/tombolo/internal/testutil/nltest"
)

// TestRequestBytes compares what is sent with a file that says for each request
// which tc(8) command it stands for.
func TestRequestBytes(t *testing.T) {
	t.Parallel()
	l := Device{Name: "p", Index: 7}
	var text string
	for _, c := range []struct {
		command string
		append  func(*nl.Batch)
	}{
		{"tc qdisc replace dev 7 root handle 746f: tbf rate 10mbit burst 6250 limit 18750",
			func(b *nl.Batch) { l.SetTBF(b, Bucket{Rate: 1250000, Burst: 6250, Limit: 18750}) }},
		{"tc qdisc replace dev 7 root handle 746f: tbf rate 40gbit burst 25mb limit 75mb",
			func(b *nl.Batch) { l.SetTBF(b, Bucket{Rate: 5e9, Burst: 25e6, Limit: 75e6}) }},
		{"tc qdisc del dev 7 root", func(b *nl.Batch) { l.DelQdisc(b, Root) }},
		{"tc qdisc add dev 7 clsact", func(b *nl.Batch) { l.AddClsact(b) }},
		{"tc qdisc del dev 7 clsact", func(b *nl.Batch) { l.DelQdisc(b, Clsact) }},
		{"tc qdisc show dev 7 root", func(b *nl.Batch) { l.GetQdisc(b, Root, &Qdisc{}) }},
		{"tc filter add dev 7 ingress pref 29807 protocol all u32 match u32 0 0 action mirred egress redirect dev 8",
			func(b *nl.Batch) { l.AddRedirect(b, 8) }},
		{"tc filter del dev 7 ingress pref 29807 protocol all", func(b *nl.Batch) { l.DelFilters(b, unix.ETH_P_ALL) }},
	} {
		var b nl.Batch
		c.append(&b)
		text += "# " + c.command + "\n" + nltest.Text(sizeofTCMsg, b.Bytes())
	}
	golden.Compare(t, "requests.golden", text)
}
