package bandwidth

import (
	"testing"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/golden"
	"github.com/tombolo-cni/tombolo/internal/nl"
	"github.com/tombolo-cni/tombolo/internal/nl/nltest"
	"github.com/tombolo-cni/tombolo/internal/nstest"
	"github.com/tombolo-cni/tombolo/internal/tc"
)

// FuzzQdisc holds that no reply of the kernel, or of what takes itself for it, makes what
// works on its result panic. The corpora have replies of a real kernel.
func FuzzQdisc(f *testing.F) {
	f.Add([]byte{})
	f.Add(make([]byte, 20))
	f.Fuzz(func(t *testing.T, b []byte) {
		var q tc.Qdisc
		if q.Decode(b) != nil {
			return
		}
		_ = describe(q)
		s := limit(q)
		if s.Rate != 0 && !q.Ours() {
			t.Errorf("it shapes %+v and is not ours: %+v", s, q)
		}
	})
}

// The seeds of the fuzz targets come from here: -update writes them.
func TestDecodersReadTheKernelsReplies(t *testing.T) {
	t.Parallel()
	ns, pod := nstest.New(t), nstest.New(t)
	nstest.Veth(t, ns, "port", pod, "eth0")
	tr, err := nl.Open(unix.NETLINK_ROUTE, &nl.Config{NetNS: ns})
	if err != nil {
		t.Fatal(err)
	}
	rec := nltest.Record(tr)
	raw := nl.New(rec)
	defer raw.Close()
	conn := On(raw)
	target := Target{Port: "port", IFB: "ifbx", Alias: "mine"}
	for _, rate := range []uint64{10e6, 40e9} {
		s := Shape{Ingress: Limit{Rate: rate}, Egress: Limit{Rate: rate}}
		if _, err := conn.Ensure(t.Context(), target, s); err != nil {
			t.Fatal(err)
		}
		rec.Received()
		if diffs, err := conn.Check(t.Context(), target, s); len(diffs) > 0 || err != nil {
			t.Fatalf("Check finds %v, %v", diffs, err)
		}
	}
	seen := map[string]int{}
	for _, d := range rec.Received() {
		for _, m := range nltest.Split(d) {
			name := map[netlink.HeaderType]string{unix.RTM_NEWQDISC: "FuzzQdisc", unix.RTM_NEWLINK: "FuzzLink"}[m.Header.Type]
			if name == "" {
				continue
			}
			if seen[name]++; golden.Updates() && name == "FuzzQdisc" { // links are read by internal/link
				nstest.SaveCorpus(t, name, "kernel"+string(rune('0'+seen[name])), m.Data)
			}
		}
	}
	if len(seen) != 2 {
		t.Errorf("replies by type: %v, want two types", seen)
	}
}
