package bandwidth_test

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/tombolo-cni/tombolo/bridge/bandwidth"
	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
)

// Each way in which others can spoil a target is found, told in the operator's
// words, and mended by one Ensure.
func TestCheckFindsAndEnsureMends(t *testing.T) {
	t.Parallel()
	const port, ifb = "veth" + hash, "ifb" + hash
	for name, c := range map[string]struct {
		spoil []string // commands
		want  []string
	}{
		"nothing": {nil, nil},
		"ingress qdisc gone": {[]string{"tc qdisc del dev PORT root"},
			[]string{"port PORT: ingress shaper tbf rate 10 Mbit/s burst 6250b limit 18750b is missing"}},
		"ingress qdisc replaced": {[]string{"tc qdisc replace dev PORT root handle 1: htb"},
			[]string{"port PORT: ingress shaper is htb 1:, should be tbf rate 10 Mbit/s burst 6250b limit 18750b"}},
		"ingress qdisc replaced under our handle": {[]string{"tc qdisc del dev PORT root", "tc qdisc add dev PORT root handle 746f: pfifo limit 10"},
			[]string{"port PORT: ingress shaper is pfifo 746f:, should be tbf rate 10 Mbit/s burst 6250b limit 18750b"}},
		"ingress rate": {[]string{"tc qdisc change dev PORT root tbf rate 100mbit burst 6250 limit 18750"},
			[]string{"port PORT: ingress shaper is tbf rate 100 Mbit/s burst 6250b limit 18750b, should be tbf rate 10 Mbit/s burst 6250b limit 18750b"}},
		"ingress burst": {[]string{"tc qdisc change dev PORT root tbf rate 10mbit burst 256mb limit 18750"},
			[]string{"port PORT: ingress shaper is tbf rate 10 Mbit/s burst 268435456b limit 18750b, should be tbf rate 10 Mbit/s burst 6250b limit 18750b"}},
		"ingress queue": {[]string{"tc qdisc change dev PORT root tbf rate 10mbit burst 6250 limit 1mb"},
			[]string{"port PORT: ingress shaper is tbf rate 10 Mbit/s burst 6250b limit 1048576b, should be tbf rate 10 Mbit/s burst 6250b limit 18750b"}},
		"a peak rate": {[]string{"tc qdisc change dev PORT root tbf rate 10mbit burst 6250 limit 18750 peakrate 11mbit mtu 2000"},
			[]string{"port PORT: ingress shaper is tbf with a peak rate, should be tbf rate 10 Mbit/s burst 6250b limit 18750b"}},
		"egress rate": {[]string{"tc qdisc change dev IFB root tbf rate 100mbit burst 12500 limit 37500"},
			[]string{"link IFB: egress shaper is tbf rate 100 Mbit/s burst 12500b limit 37500b, should be tbf rate 20 Mbit/s burst 12500b limit 37500b"}},
		"egress qdisc gone": {[]string{"tc qdisc del dev IFB root"},
			[]string{"link IFB: egress shaper tbf rate 20 Mbit/s burst 12500b limit 37500b is missing"}},
		"filter gone": {[]string{"tc filter del dev PORT ingress"},
			[]string{"port PORT: filter to IFB is missing"}},
		"clsact gone": {[]string{"tc qdisc del dev PORT clsact"},
			[]string{"port PORT: filter to IFB is missing"}},
		"filter leads elsewhere": {[]string{"tc filter del dev PORT ingress",
			"tc filter add dev PORT ingress pref 29807 protocol all u32 match u32 0 0 action mirred egress redirect dev lo"},
			[]string{"port PORT: filter is another, should be to IFB"}},
		"filter copies": {[]string{"tc filter del dev PORT ingress",
			"tc filter add dev PORT ingress pref 29807 protocol all u32 match u32 0 0 action mirred egress mirror dev IFB"},
			[]string{"port PORT: filter is another, should be to IFB"}},
		"filter for IPv4 alone": {[]string{"tc filter del dev PORT ingress",
			"tc filter add dev PORT ingress pref 29807 protocol ip u32 match u32 0 0 action mirred egress redirect dev IFB"},
			[]string{"port PORT: filter is another, should be to IFB"}},
		"filter for one address": {[]string{"tc filter del dev PORT ingress",
			"tc filter add dev PORT ingress pref 29807 protocol all u32 match ip src 10.1.1.1/32 action mirred egress redirect dev IFB"},
			[]string{"port PORT: filter is another, should be to IFB"}},
		"a filter of another kind": {[]string{"tc filter del dev PORT ingress",
			"tc filter add dev PORT ingress pref 29807 protocol all bpf bytecode 1,6_0_0_4294967295, action mirred egress redirect dev lo"},
			[]string{"port PORT: filter is another, should be to IFB"}},
		"ifb made anew, and the filter leads to the one of before": {[]string{"ip link del IFB",
			"ip link add IFB type ifb", "ip link set IFB alias ALIAS", "ip link set IFB up", "tc qdisc add dev IFB root handle 746f: tbf rate 20mbit burst 12500 limit 37500"},
			[]string{"port PORT: filter is another, should be to IFB"}},
		"the filter twice": {[]string{"tc filter add dev PORT ingress pref 29807 protocol all u32 match u32 0 0 action mirred egress redirect dev IFB"},
			[]string{"port PORT: filter is another, should be to IFB"}},
		"a second filter of our priority": {[]string{"tc filter add dev PORT ingress pref 29807 protocol all u32 match u32 0 0 action mirred egress redirect dev lo"},
			[]string{"port PORT: filter is another, should be to IFB"}},
		"ifb down": {[]string{"ip link set IFB down"},
			[]string{"link IFB: link is down, should be up"}},
		"ifb gone": {[]string{"ip link del IFB"},
			[]string{"link IFB: link IFB is missing"}},
		"all gone": {[]string{"ip link del IFB", "tc qdisc del dev PORT clsact", "tc qdisc del dev PORT root"},
			[]string{"port PORT: ingress shaper tbf rate 10 Mbit/s burst 6250b limit 18750b is missing", "port PORT: filter to IFB is missing", "link IFB: link IFB is missing"}},
	} {
		nstest.RunParallel(t, name, func(t *testing.T) {
			n := newNode(t)
			give(t, n)
			n.ensure(t, both)
			names := strings.NewReplacer("PORT", port, "IFB", ifb, "ALIAS", n.target.Alias)
			for _, command := range c.spoil {
				args := strings.Fields(names.Replace(command))
				for i := range args {
					args[i] = strings.ReplaceAll(args[i], "_", " ")
				}
				nstest.Run(t, n.ns, args[0], args[1:]...)
			}
			diffs := must.Of(n.conn.Check(t.Context(), n.target, both)).Get(t)
			var got, want []string
			for _, d := range diffs {
				got = append(got, d.String())
			}
			for _, w := range c.want {
				want = append(want, names.Replace(w))
			}
			expect.NoDiff(t, cmp.Diff(want, got), "differences")
			expect.Equal(t, n.ensure(t, both), (len(c.want) > 0), "Ensure: changed is")
			expect.Of(n.conn.Check(t.Context(), n.target, both)).Len(t, 0, "Check")
			expect.Success(t, nstest.Ping(t, n.pod, nstest.Addr("10.77.0.1")))
			expect.Success(t, n.conn.Remove(t.Context(), n.target))
			n.nothingLeft(t)
		})
	}
}

func TestCheckFindsWhatDoesNotBelongThere(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	n.ensure(t, both)
	diffs, err := n.conn.Check(t.Context(), n.target, bandwidth.Shape{})
	var got []string
	for _, d := range diffs {
		got = append(got, d.String())
	}
	want := []string{
		"port " + n.target.Port + ": ingress shaper tbf rate 10 Mbit/s burst 6250b limit 18750b does not belong there",
		"port " + n.target.Port + ": filter to " + n.target.IFB + " does not belong there",
		"link " + n.target.IFB + ": link " + n.target.IFB + " does not belong there",
	}
	diff := cmp.Diff(want, got)
	expect.That(t, diff == "" && err == nil, "%v (-want +got):\n%s", err, diff)
}
