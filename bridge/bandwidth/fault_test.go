package bandwidth_test

import (
	"errors"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/bridge/bandwidth"
	"github.com/tombolo-cni/tombolo/internal/nl"
	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nltest"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
)

// through gives a Conn in n's namespace whose transport wrap makes.
func (n *node) through(tb testing.TB, wrap func(nl.Transport) nl.Transport) *bandwidth.Conn {
	tb.Helper()
	t := must.Of(nl.Open(unix.NETLINK_ROUTE, n.ns)).Get(tb)
	conn := nl.New(wrap(t))
	tb.Cleanup(func() { conn.Close() })
	return bandwidth.On(conn)
}

func (n *node) faulty(tb testing.TB, faults ...*nltest.Fault) *bandwidth.Conn {
	tb.Helper()
	return n.through(tb, func(t nl.Transport) nl.Transport { return nltest.NewFaulty(t, faults...) })
}

func TestFailedEnsureLeavesNothing(t *testing.T) {
	t.Parallel()
	for name, fault := range map[string]*nltest.Fault{
		"the look at the ifb":         {Type: unix.RTM_GETLINK, Nth: 1},
		"the look at the root":        {Type: unix.RTM_GETQDISC, Nth: 1},
		"the look at clsact":          {Type: unix.RTM_GETQDISC, Nth: 2},
		"the ifb":                     {Type: unix.RTM_NEWLINK, Nth: 1},
		"its alias":                   {Type: unix.RTM_NEWLINK, Nth: 2},
		"its index":                   {Type: unix.RTM_GETLINK, Nth: 2, Times: 1},
		"its qdisc":                   {Type: unix.RTM_NEWQDISC, Nth: 1},
		"its coming up":               {Type: unix.RTM_NEWLINK, Nth: 3},
		"clsact":                      {Type: unix.RTM_NEWQDISC, Nth: 2},
		"the filter":                  {Type: unix.RTM_NEWTFILTER},
		"the port's qdisc, when last": {Type: unix.RTM_NEWQDISC, Nth: 3},
	} {
		nstest.RunParallel(t, name, func(t *testing.T) {
			n := newNode(t)
			fault.Errno, fault.Text = unix.ENOBUFS, "no room today"
			conn := n.faulty(t, fault)
			nltest.MustHaveFired(t, fault)
			changed, err := conn.Ensure(t.Context(), n.target, both)
			expect.That(t, !changed && errors.Is(err, unix.ENOBUFS) && strings.Contains(err.Error(), "no room today"),
				"Ensure gives %v, %v, want ENOBUFS with the kernel's text", changed, err)
			n.nothingLeft(t)
		})
	}
}

func TestFailedUndoIsToldBesideTheCause(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	cause := &nltest.Fault{Type: unix.RTM_NEWTFILTER, Errno: unix.ENOBUFS}
	stuck := &nltest.Fault{Type: unix.RTM_DELLINK, Errno: unix.EBUSY}
	nltest.MustHaveFired(t, cause, stuck)
	_, err := n.faulty(t, cause, stuck).Ensure(t.Context(), n.target, both)
	expect.That(t, errors.Is(err, unix.ENOBUFS) && errors.Is(err, unix.EBUSY),
		"error is %v, want both ENOBUFS and EBUSY in it", err)
}

// A repair that fails leaves what it found.
func TestFailedChangeKeepsTheShaper(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	n.ensure(t, both)
	fault := &nltest.Fault{Type: unix.RTM_NEWQDISC, Errno: unix.ENOBUFS}
	nltest.MustHaveFired(t, fault)
	_, err := n.faulty(t, fault).Ensure(t.Context(), n.target, bandwidth.Shape{Ingress: bandwidth.Limit{Rate: 1e6}, Egress: bandwidth.Limit{Rate: 1e6}})
	expect.That(t, errors.Is(err, unix.ENOBUFS), "error is %v, want ENOBUFS", err)
	expect.Of(n.conn.Check(t.Context(), n.target, both)).Len(t, 0, "Check")
}

func TestWhatTheKernelLacksIsNamed(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		fault *nltest.Fault
		want  string
	}{
		"ifb":    {&nltest.Fault{Type: unix.RTM_NEWLINK, Nth: 1, Errno: unix.EOPNOTSUPP, Text: "Unknown device type"}, "load ifb"},
		"tbf":    {&nltest.Fault{Type: unix.RTM_NEWQDISC, Nth: 1, Errno: unix.ENOENT, Text: "Specified qdisc kind is unknown"}, "load sch_tbf"},
		"clsact": {&nltest.Fault{Type: unix.RTM_NEWQDISC, Nth: 2, Errno: unix.ENOENT, Text: "Specified qdisc kind is unknown"}, "sch_ingress"},
		"u32":    {&nltest.Fault{Type: unix.RTM_NEWTFILTER, Errno: unix.ENOENT, Text: "TC classifier not found"}, "cls_u32 and act_mirred"},
	} {
		nstest.RunParallel(t, name, func(t *testing.T) {
			n := newNode(t)
			conn := n.faulty(t, c.fault)
			nltest.MustHaveFired(t, c.fault)
			_, err := conn.Ensure(t.Context(), n.target, both)
			expect.That(t, errors.Is(err, bandwidth.ErrNotSupported) && errors.Is(err, c.fault.Errno) &&
				strings.Contains(err.Error(), c.want) && strings.Contains(err.Error(), c.fault.Text),
				"error is %v, want ErrNotSupported with %q", err, c.want)
			n.nothingLeft(t)
		})
	}
}

func TestRemoveGoesOnPastErrors(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	n.ensure(t, both)
	root := &nltest.Fault{Type: unix.RTM_DELQDISC, Errno: unix.EBUSY}
	nltest.MustHaveFired(t, root)
	expect.Is(t, n.faulty(t, root).Remove(t.Context(), n.target), unix.EBUSY)
	expect.Equal(t, nstest.Run(t, n.ns, "ip", "-o", "link", "show", "type", "ifb"), "", "the ifb is left")
	expect.Success(t, n.conn.Remove(t.Context(), n.target))
	n.nothingLeft(t)
}

// What a pod costs must not depend on how many there are.
func TestFreshEnsureAndRemoveListNothing(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	var rec *nltest.Recorder
	conn := n.through(t, func(tr nl.Transport) nl.Transport { rec = nltest.Record(tr); return rec })
	must.Succeed(t, expect.Err(conn.Ensure(t.Context(), n.target, both)))
	// The look, the ifb, its index, all the rest. Over a socket, which a recorder is
	// not, the index takes no datagram.
	if sent := rec.Sent(); len(sent) != 4 || dumps(sent) != 0 {
		t.Errorf("Ensure sent %d datagrams and %d dumps, want 4 and none", len(sent), dumps(sent))
	}
	nstest.Run(t, n.ns, "ip", "link", "del", n.target.Port)
	must.Succeed(t, conn.Remove(t.Context(), bandwidth.Target{IFB: n.target.IFB, Owner: n.target.Owner}))
	if sent := rec.Sent(); len(sent) != 2 || dumps(sent) != 0 {
		t.Errorf("Remove sent %d datagrams and %d dumps, want 2 and none", len(sent), dumps(sent))
	}
}

func dumps(datagrams [][]byte) int {
	var n int
	for _, d := range datagrams {
		for _, m := range nltest.Split(d) {
			if m.Header.Flags&unix.NLM_F_DUMP == unix.NLM_F_DUMP {
				n++
			}
		}
	}
	return n
}

func TestEnsureStaysWithinItsAllocations(t *testing.T) {
	n := newNode(t)
	allocs := testing.AllocsPerRun(10, func() {
		must.That(t, n.ensure(t, both), "nothing changed")
		must.Succeed(t, n.conn.Remove(t.Context(), n.target))
	})
	const most = 350
	t.Logf("%.0f allocations for an Ensure and a Remove", allocs)
	expect.That(t, allocs <= most, "%.0f allocations for an Ensure and a Remove, where %d are the most", allocs, most)
}

// test/vm/run.sh noipv6 has a kernel that is like this in truth.
func TestKernelWithoutIPv6GetsAllElse(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	refusal := nltest.NoIPv6()
	conn := n.faulty(t, refusal)
	// Made, and then given another alias.
	for _, alias := range []string{n.target.Alias, n.target.Owner + "other:"} {
		n.target.Alias = alias
		expect.Of(conn.Ensure(t.Context(), n.target, both)).Is(t, true, "Ensure")
		expect.Equal(t, refusal.Fired(), 0, "the kernel has refused")
		expect.Contains(t, nstest.Run(t, n.ns, "ip", "link", "show", n.target.IFB), "alias "+alias, "the ifb has not the alias %s", alias)
	}
	expect.Of(n.conn.Check(t.Context(), n.target, both)).Len(t, 0, "Check")
}
