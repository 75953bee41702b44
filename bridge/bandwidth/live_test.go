package bandwidth_test

import (
	"context"
	"encoding/json"
	"errors"
	"io/fs"
	"math"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/tombolo-cni/tombolo"
	"github.com/tombolo-cni/tombolo/bridge/bandwidth"
	"github.com/tombolo-cni/tombolo/internal/nl"
	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nltest"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
)

// shown is a qdisc as tc prints it.
type shown struct {
	Kind    string `json:"kind"`
	Handle  string `json:"handle"`
	Dev     string `json:"dev"`
	Root    bool   `json:"root"`
	Options struct {
		Rate  uint64 `json:"rate"` // bytes per second
		Burst uint64 `json:"burst"`
		Lat   uint64 `json:"lat"` // µs
	} `json:"options"`
}

// qdiscs asks tc, the referee, for all but the kernel's defaults.
func (n *node) qdiscs(tb testing.TB) map[string]shown {
	tb.Helper()
	var list []shown
	must.Succeed(tb, json.Unmarshal([]byte(nstest.Run(tb, n.ns, "tc", "-j", "-s", "qdisc", "show")), &list))
	found := map[string]shown{}
	for _, q := range list {
		where := q.Dev + " root"
		if !q.Root {
			where = q.Dev + " " + q.Kind
		}
		if q.Handle != "0:" {
			found[where] = q
		}
	}
	return found
}

// nothingLeft fails the test if a qdisc, a filter or an ifb is there.
func (n *node) nothingLeft(tb testing.TB) {
	tb.Helper()
	got := n.qdiscs(tb)
	expect.That(tb, len(got) == 0, "qdiscs are left: %v", got)
	expect.Equal(tb, nstest.Run(tb, n.ns, "ip", "-o", "link", "show", "type", "ifb"), "", "ifbs are left")
	for _, side := range []string{"ingress", "egress"} {
		out, err := nstest.Try(n.ns, "tc", "filter", "show", "dev", n.target.Port, side)
		expect.That(tb, err != nil || out == "", "filters are left at %s:\n%s", side, out)
	}
}

// At the least rate a burst takes longer than the 274 s that the kernel can tell.
func TestTheLeastRateHoldsItsOwnCheck(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	s := bandwidth.Shape{Ingress: bandwidth.Limit{Rate: 8}, Egress: bandwidth.Limit{Rate: 8}}
	n.ensure(t, s)
	expect.Of(n.conn.Check(t.Context(), n.target, s)).Len(t, 0, "Check")
	expect.That(t, !n.ensure(t, s), "the second Ensure changes something")
}

func TestEnsureInstallsExactlyTheRate(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		limit       bandwidth.Limit
		rate, burst uint64 // bytes
		lat         uint64 // µs
	}{
		"10 Mbit/s":              {bandwidth.Limit{Rate: 10e6}, 1250000, 6250, 10000},
		"1 Gbit/s":               {bandwidth.Limit{Rate: 1e9}, 125e6, 625000, 10000},
		"40 Gbit/s, of 64 bits":  {bandwidth.Limit{Rate: 40e9}, 5e9, 25e6, 10000},
		"100 bit/s":              {bandwidth.Limit{Rate: 100}, 12, 3036, 0},
		"1 kbit/s":               {bandwidth.Limit{Rate: 1e3}, 125, 3036, 72864000},
		"a burst that is capped": {bandwidth.Limit{Rate: 100e6, Burst: math.MaxInt32}, 12500000, 625000, 0},
		"a burst that is given":  {bandwidth.Limit{Rate: 100e6, Burst: 800e3}, 12500000, 100000, 7000},
	} {
		nstest.RunParallel(t, name, func(t *testing.T) {
			n := newNode(t)
			s := bandwidth.Shape{Ingress: c.limit, Egress: c.limit}
			expect.That(t, n.ensure(t, s), "it says that nothing changed")
			got := n.qdiscs(t)
			expect.Equal(t, len(got), 3, "qdiscs are %v, want three", got)
			for _, where := range []string{n.target.Port + " root", n.target.IFB + " root"} {
				q := got[where]
				if q.Kind != "tbf" || q.Options.Rate != c.rate || differs(q.Options.Burst, c.burst, c.rate) || c.lat != 0 && max(q.Options.Lat, c.lat)-min(q.Options.Lat, c.lat) > 1 {
					t.Errorf("%s is %+v, want a tbf of %d bytes/s, burst %d, latency %d µs", where, q, c.rate, c.burst, c.lat)
				}
			}
			expect.Of(n.conn.Check(t.Context(), n.target, s)).Len(t, 0, "Check")
		})
	}
}

// differs allows for what the kernel's tick, and the microsecond of tc, are worth.
func differs(a, b, rate uint64) bool { return max(a, b)-min(a, b) > 1+rate/1e6 }

func TestEnsureMakesTheIFBAsOurs(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	n.ensure(t, both)
	details := nstest.Run(t, n.ns, "ip", "-d", "link", "show", n.target.IFB)
	for _, want := range []string{"alias " + n.target.Alias, ",UP,", "mtu 1279", "ifb"} {
		expect.Contains(t, details, want, "ip -d link")
	}
	expect.That(t, !strings.Contains(details, "addrgenmode"), "the ifb has IPv6:\n%s", details)
	list, err := n.conn.IFBs(t.Context())
	want := map[string]string{n.target.IFB: n.target.Alias}
	diff := cmp.Diff(want, list)
	expect.That(t, diff == "" && err == nil, "IFBs: %v (-want +got):\n%s", err, diff)
}

func shapes() map[string]bandwidth.Shape {
	return map[string]bandwidth.Shape{
		"ingress": {Ingress: both.Ingress},
		"egress":  {Egress: both.Egress},
		"both":    both,
		"none":    {},
	}
}

// Whatever was asked for before, what is asked for now is there, and nothing else;
// and what was there is found to differ.
func TestEnsureGoesFromAnyShapeToAnyOther(t *testing.T) {
	t.Parallel()
	all := shapes()
	all["faster"] = bandwidth.Shape{Ingress: bandwidth.Limit{Rate: 50e6, Burst: 1e6}, Egress: bandwidth.Limit{Rate: 60e6}}
	for from := range all {
		nstest.RunParallel(t, from, func(t *testing.T) {
			n := newNode(t)
			for to, s := range all {
				n.ensure(t, all[from])
				diffs, err := n.conn.Check(t.Context(), n.target, s)
				expect.That(t, err == nil && (len(diffs) == 0) == (from == to),
					"from %s to %s: Check finds %v, %v", from, to, diffs, err)
				expect.Equal(t, n.ensure(t, s), from != to, "from %s to %s: changed is", from, to)
				expect.Of(n.conn.Check(t.Context(), n.target, s)).Len(t, 0, "from %s to %s: Check", from, to)
				want := map[string]int{"ingress": 1, "egress": 2, "both": 3, "faster": 3, "none": 0}[to]
				got := n.qdiscs(t)
				expect.That(t, len(got) == want, "from %s to %s: %d qdiscs, want %d: %v", from, to, len(got), want, got)
				for range 2 { // gone is success
					must.Succeed(t, n.conn.Remove(t.Context(), n.target))
					n.nothingLeft(t)
				}
			}
		})
	}
}

// Another rate is given to the qdiscs that are there: their counters go on, which a
// new one's would not, and neither the ifb nor the filter is made again.
func TestEnsureChangesARateInPlace(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	n.ensure(t, both)
	give(t, n)
	must.Succeed(t, nstest.Ping(t, n.pod, nstest.Addr("10.77.0.1")))
	index := nstest.Index(t, n.ns, n.target.IFB)
	expect.That(t, n.ensure(t, bandwidth.Shape{Ingress: bandwidth.Limit{Rate: 30e6}, Egress: bandwidth.Limit{Rate: 40e6, Burst: 1e6}}),
		"it says that nothing changed")
	expect.Equal(t, nstest.Index(t, n.ns, n.target.IFB), index, "the ifb's index was %d and is", index)
	for _, dev := range []string{n.target.Port, n.target.IFB} {
		out := nstest.Run(t, n.ns, "tc", "-s", "qdisc", "show", "dev", dev, "root")
		expect.That(t, strings.Contains(out, "Sent ") && !strings.Contains(out, "Sent 0 bytes"),
			"the qdisc of %s has counted nothing:\n%s", dev, out)
	}
	out := nstest.Run(t, n.ns, "tc", "-s", "filter", "show", "dev", n.target.Port, "ingress")
	expect.That(t, !strings.Contains(out, "Sent 0 bytes"), "the filter has counted nothing:\n%s", out)
}

// give gives the host and the pod their addresses.
func give(tb testing.TB, n *node) {
	tb.Helper()
	nstest.Run(tb, n.ns, "ip", "addr", "add", "10.77.0.1/24", "dev", "br0")
	nstest.Run(tb, n.pod, "ip", "addr", "add", "10.77.0.2/24", "dev", "eth0")
}

func TestTargetsDoNotCollide(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	other, _ := n.addPod(t, "0123456789b")
	n.ensure(t, both)
	s := bandwidth.Shape{Ingress: bandwidth.Limit{Rate: 1e6}, Egress: bandwidth.Limit{Rate: 2e6}}
	changed, err := n.conn.Ensure(t.Context(), other, s)
	must.That(t, err == nil && changed, "%v %v", changed, err)
	expect.That(t, !n.ensure(t, both), "the second target changed the first")
	must.Succeed(t, n.conn.Remove(t.Context(), other))
	expect.Of(n.conn.Check(t.Context(), n.target, both)).Len(t, 0, "after the second was removed the first")
	expect.Of(n.conn.Check(t.Context(), other, bandwidth.Shape{})).Len(t, 0, "the second")
}

func TestRemoveOnceThePortIsGone(t *testing.T) {
	t.Parallel()
	for name, change := range map[string]func(*bandwidth.Target){
		"named, with its index": func(*bandwidth.Target) {},
		"named":                 func(t *bandwidth.Target) { t.PortIndex, t.MTU = 0, 0 },
		"not named":             func(t *bandwidth.Target) { t.Port, t.PortIndex, t.MTU = "", 0, 0 },
	} {
		nstest.RunParallel(t, name, func(t *testing.T) {
			n := newNode(t)
			n.ensure(t, both)
			nstest.Run(t, n.ns, "ip", "link", "del", n.target.Port)
			change(&n.target)
			must.Succeed(t, n.conn.Remove(t.Context(), n.target))
			n.nothingLeft(t)
		})
	}
}

func TestRemoveKnowsThePortByNameAlone(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	n.ensure(t, both)
	must.Succeed(t, n.conn.Remove(t.Context(), bandwidth.Target{Port: n.target.Port, IFB: n.target.IFB}))
	n.nothingLeft(t)
}

func TestEnsureAsksForWhatTheCallerDoesNotKnow(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	nstest.Run(t, n.ns, "ip", "link", "set", n.target.Port, "mtu", "9000")
	n.target.PortIndex, n.target.MTU = 0, 0
	n.ensure(t, bandwidth.Shape{Ingress: bandwidth.Limit{Rate: 1e6}})
	got := n.qdiscs(t)[n.target.Port+" root"].Options.Burst
	expect.That(t, !differs(got, 2*9018, 125e3), "the burst is %d bytes, want two frames of the port's MTU", got)
}

// What others have put at the port stays theirs.
func TestForeignFiltersAndQdiscsStay(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	port := n.target.Port
	nstest.Run(t, n.ns, "tc", "qdisc", "add", "dev", port, "root", "handle", "5:", "pfifo", "limit", "77")
	nstest.Run(t, n.ns, "tc", "qdisc", "add", "dev", port, "clsact")
	nstest.Run(t, n.ns, "tc", "filter", "add", "dev", port, "egress", "pref", "9", "u32", "match", "u32", "0", "0", "flowid", "1:1")
	s := bandwidth.Shape{Egress: both.Egress}
	n.ensure(t, s)
	expect.Of(n.conn.Check(t.Context(), n.target, s)).Len(t, 0, "Check")
	must.Succeed(t, n.conn.Remove(t.Context(), n.target))
	expect.Contains(t, nstest.Run(t, n.ns, "tc", "filter", "show", "dev", port, "egress"), "pref 9", "the other filter is gone")
	expect.Equal(t, nstest.Run(t, n.ns, "tc", "filter", "show", "dev", port, "ingress"), "", "our filter is left")
	got := n.qdiscs(t)[port+" root"]
	expect.That(t, got.Kind == "pfifo", "the root is %+v, want the pfifo that was there", got)
}

// An agent, or an earlier plugin, may have put the ingress qdisc in clsact's place,
// which serves as well.
func TestEgressWorksOverAnIngressQdiscThatIsThere(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	give(t, n)
	nstest.Run(t, n.ns, "tc", "qdisc", "add", "dev", n.target.Port, "ingress")
	s := bandwidth.Shape{Egress: both.Egress}
	n.ensure(t, s)
	expect.Success(t, nstest.Ping(t, n.pod, nstest.Addr("10.77.0.1")))
	out := nstest.Run(t, n.ns, "tc", "-s", "qdisc", "show", "dev", n.target.IFB, "root")
	expect.That(t, !strings.Contains(out, "Sent 0 bytes"), "nothing went through the ifb:\n%s", out)
	expect.Of(n.conn.Check(t.Context(), n.target, s)).Len(t, 0, "Check")
	expect.That(t, !n.ensure(t, s), "the second Ensure changed something")
	must.Succeed(t, n.conn.Remove(t.Context(), n.target))
	_, left := n.qdiscs(t)[n.target.Port+" ingress"]
	expect.That(t, left, "the ingress qdisc of somebody else's is gone")
}

func TestForeignLinkOfTheIFBsNameIsLeftAlone(t *testing.T) {
	t.Parallel()
	for name, add := range map[string][]string{
		"an ifb with another alias": {"link", "add", "IFB", "alias", "tombolo:1:ffffffffff0:net:", "type", "ifb"},
		"an ifb without an alias":   {"link", "add", "IFB", "type", "ifb"},
		"a bridge with our alias":   {"link", "add", "IFB", "type", "bridge"},
	} {
		nstest.RunParallel(t, name, func(t *testing.T) {
			n := newNode(t)
			args := append([]string(nil), add...)
			args[2] = n.target.IFB
			nstest.Run(t, n.ns, "ip", args...)
			if strings.Contains(name, "our") {
				nstest.Run(t, n.ns, "ip", "link", "set", n.target.IFB, "alias", n.target.Alias)
			}
			changed, err := n.conn.Ensure(t.Context(), n.target, both)
			expect.That(t, !changed && errors.Is(err, bandwidth.ErrForeign), "Ensure: %v, %v, want ErrForeign", changed, err)
			expect.Is(t, n.conn.Remove(t.Context(), n.target), bandwidth.ErrForeign, "Remove")
			nstest.Index(t, n.ns, n.target.IFB) // it is still there
			got := n.qdiscs(t)
			expect.That(t, len(got) == 0, "qdiscs: %v", got)
			// A caller that wants no egress shaped does not need the name.
			n.ensure(t, bandwidth.Shape{Ingress: both.Ingress})
			n.ensure(t, bandwidth.Shape{})
		})
	}
}

func TestEnsureGivesTheIFBANewAlias(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	n.ensure(t, both)
	n.target.Alias += "10.77.0.2"
	diffs, err := n.conn.Check(t.Context(), n.target, both)
	want := []tombolo.Difference{{Object: "link " + n.target.IFB, What: "alias",
		Want: `"` + n.target.Alias + `"`, Have: `"tombolo:1:` + hash + `:net:"`}}
	diff := cmp.Diff(want, diffs)
	expect.That(t, diff == "" && err == nil, "Check: %v (-want +got):\n%s", err, diff)
	expect.That(t, n.ensure(t, both) && !n.ensure(t, both), "the alias takes other than one Ensure")
}

func TestTargetsThatCannotBeMeantAreRefused(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	for name, change := range map[string]func(*bandwidth.Target){
		"no port":         func(t *bandwidth.Target) { t.Port = "" },
		"no ifb":          func(t *bandwidth.Target) { t.IFB = "" },
		"a long name":     func(t *bandwidth.Target) { t.IFB = "ifb0123456789abc" },
		"one name":        func(t *bandwidth.Target) { t.IFB = t.Port },
		"a long alias":    func(t *bandwidth.Target) { t.Alias = t.Owner + strings.Repeat("x", 255) },
		"another's alias": func(t *bandwidth.Target) { t.Alias = "tombolo:1:ffffffffff0:" },
	} {
		target := n.target
		change(&target)
		expect.Is(t, expect.Err(n.conn.Ensure(t.Context(), target, both)), tombolo.ErrInvalid, "%s", name)
	}
	_, err := n.conn.Ensure(t.Context(), n.target, bandwidth.Shape{Ingress: bandwidth.Limit{Rate: 1}})
	expect.That(t, errors.Is(err, tombolo.ErrInvalid), "a rate of 1 bit/s: error is %v, want tombolo.ErrInvalid", err)
	n.nothingLeft(t)
}

func TestMissingPortIsToldAndLeavesNothing(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	nstest.Run(t, n.ns, "ip", "link", "del", n.target.Port)
	for name, index := range map[string]int{"by index": n.target.PortIndex, "by name": 0} {
		n.target.PortIndex = index
		expect.Is(t, expect.Err(n.conn.Ensure(t.Context(), n.target, both)), fs.ErrNotExist, "%s: Ensure", name)
		diffs, err := n.conn.Check(t.Context(), n.target, both)
		expect.That(t, err == nil && len(diffs) == 1 && diffs[0].String() == "port "+n.target.Port+": link "+n.target.Port+" is missing",
			"%s: Check gives %v, %v", name, diffs, err)
	}
	n.nothingLeft(t)
}

func TestCancelledContextSendsNothing(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	var rec *nltest.Recorder
	conn := n.through(t, func(tr nl.Transport) nl.Transport { rec = nltest.Record(tr); return rec })
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	all := func() {
		t.Helper()
		for name, do := range map[string]func() error{
			"Ensure": func() error { _, err := conn.Ensure(ctx, n.target, bandwidth.Shape{Egress: both.Egress}); return err },
			"Remove": func() error { return conn.Remove(ctx, n.target) },
			"Check":  func() error { _, err := conn.Check(ctx, n.target, both); return err },
			"IFBs":   func() error { _, err := conn.IFBs(ctx); return err },
		} {
			expect.Is(t, do(), context.Canceled, "%s", name)
			sent := rec.Sent()
			expect.That(t, len(sent) == 0, "%s sent %d datagrams", name, len(sent))
		}
	}
	all()
	n.nothingLeft(t)
	// Of what is there, nothing goes and nothing changes.
	n.ensure(t, both)
	before := n.qdiscs(t)
	all()
	expect.NoDiff(t, cmp.Diff(before, n.qdiscs(t)), "qdiscs")
	expect.Of(n.conn.Check(t.Context(), n.target, both)).Len(t, 0, "Check")
}
