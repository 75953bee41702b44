package network_test

import (
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/tombolo-cni/tombolo/bridge/bandwidth"
	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
	"github.com/tombolo-cni/tombolo/ipam"
	"github.com/tombolo-cni/tombolo/netns"
	"github.com/tombolo-cni/tombolo/network"
	"github.com/tombolo-cni/tombolo/nft"
)

// A table breaks one part in every way.
type table struct {
	before string               // lines for a shell on the host, before the Add
	with   func(*node)          // says what the network and the pod are to have
	then   func(*node) error    // changes what they have, as plugins further down the chain do
	keeper func(*node) []string // by which the keeper learns of each fault; nil: by nothing
	faults map[string]fault
}

// A fault is one way: what does it, what is said of it, and what mends it. Its texts have $P for the pod's port, $M for its
// MAC, $I for the ifb, $H for their hash, $N for the namespace and $L for the leases, # for "bridge cbr0" and @ for "interface eth0".
type fault struct {
	on, in string // lines for a shell on the host, and in the pod
	do     func(*node)
	says   string // what Inspect says, and Check: a difference a line, with its remedy
	notes  string // what Inspect notes inside of the pod, which stays
	more   string // what Check says besides
	hidden bool   // Check says nothing of it
	unseen bool   // by the keeper
	undo   string // lines that do what is advised where that is no call of Node's. Until then Repair may fail
	refuse string // why Del or Remove fails, before undo
	stays  string // lines that make on an empty host what is another's, and stays
	left   string // the same of what Repair takes away
}

// inside is what Check still says when all is mended.
func (f fault) inside() string {
	if f.notes == "" {
		return ""
	}
	return f.more
}

// run has each fault named and mended, and the pod and the network taken down after it: mended, and as it is.
func (tb table) run(t *testing.T) {
	t.Parallel()
	for name, f := range tb.faults {
		nstest.RunParallel(t, name, func(t *testing.T) {
			n := newNode(t, tb)
			n.harm(f)
			n.wantSaid(f)
			n.mend(f)
			n.wantSaid(fault{notes: f.notes, more: f.inside()})
			n.wantNothing(fault{stays: f.stays + "\n" + f.undo})
		})
		nstest.RunParallel(t, name+", and all goes", func(t *testing.T) {
			n := newNode(t, tb)
			n.harm(f)
			n.wantNothing(f)
		})
	}
}

// node is a host with a network, and one pod of it.
type node struct {
	*testing.T
	*network.Node
	table
	state, leases string          // their directories
	ns            *netns.NS       // the host's
	empty         nstest.Snapshot // the host before the Add
	nw            network.Network
	pod           network.Pod
	made          *network.Attachment
	stop          func() // the keeper
}

// host is the node before the Add.
func (tb table) host(t *testing.T) *node {
	t.Helper()
	pod := nstest.New(t)
	n := &node{T: t, table: tb, state: filepath.Join(t.TempDir(), "state"), leases: t.TempDir(), ns: nstest.New(t)}
	n.nw = network.Network{Name: "pods", Bridge: "cbr0", Gateway: true, DefaultGateway: true}
	n.pod = network.Pod{ContainerID: "c1", IfName: "eth0", NetNS: pod, Path: nstest.Path(t, pod), Addresses: []ipam.Address{
		{Prefix: nstest.Prefix("10.61.0.2/24"), Gateway: nstest.Addr("10.61.0.1")}, {Prefix: nstest.Prefix("fd61::2/64"), Gateway: nstest.Addr("fd61::1")},
	}}
	var err error
	n.Node, err = network.Open(t.Context(), &network.Config{NetNS: n.ns, StateDir: n.state, LeaseDir: n.leases})
	must.Succeed(t, err)
	const forwards = "echo 1 >/proc/sys/net/ipv4/ip_forward; echo 1 >/proc/sys/net/ipv6/conf/all/forwarding\n" // and goes on to
	nstest.Run(t, n.ns, "sh", "-ec", forwards+tb.before)
	if tb.with != nil {
		tb.with(n)
	}
	n.empty = nstest.Snap(t, n.ns, "", nil)
	return n
}

func newNode(t *testing.T, tb table) *node {
	t.Helper()
	n := tb.host(t)
	n.add()
	if tb.then != nil {
		n.do(func() error { return tb.then(n) })
	}
	n.wantSaid(fault{})
	return n
}

func (n *node) do(what func() error) { n.Helper(); must.Succeed(n, what()) }

func (n *node) add() {
	n.Helper()
	n.do(func() (err error) { n.made, err = n.Add(n.Context(), &n.nw, &n.pod); return err })
}

// names puts the pod's names into a text.
func (n *node) names(text string) string {
	hash := strings.TrimPrefix(n.made.Port, "veth")
	return strings.NewReplacer("$P", n.made.Port, "$I", "ifb"+hash, "$H", hash, "$N", n.pod.Path, "$L", n.leases, "$M", n.made.PortMAC.String(),
		"#", "bridge cbr0", "@", "interface eth0").Replace(text)
}

// lines are those of a text, in order.
func (n *node) lines(text string) (list []string) {
	list = append(list, strings.FieldsFunc(n.names(text), func(r rune) bool { return r == '\n' })...)
	slices.Sort(list)
	return list
}

func (n *node) harm(f fault) {
	n.Helper()
	nstest.Run(n, n.ns, "sh", "-ec", n.names(f.on))
	nstest.Run(n, n.pod.NetNS, "sh", "-ec", n.names(f.in))
	if f.do != nil {
		f.do(n)
	}
}

// mend does what the differences advise: first what Repair can do, then the rest.
func (n *node) mend(f fault) {
	n.Helper()
	repair := func() error { return n.Repair(n.Context()) }
	if err := repair(); f.undo == "" {
		expect.Success(n, err, "repair")
	}
	rest := slices.DeleteFunc(n.lines(f.says), func(l string) bool { return strings.HasSuffix(l, " [repair]") })
	left := n.inspected()
	if slices.ContainsFunc(rest, func(l string) bool { return !slices.Contains(left, l) }) || f.undo == "" && len(left) > len(rest) {
		n.Errorf("after repair there is\n%s\nand should be\n%s", strings.Join(left, "\n"), strings.Join(rest, "\n"))
	}
	if f.undo != "" {
		nstest.Run(n, n.ns, "sh", "-ec", n.names(f.undo))
		expect.Success(n, repair(), "repair, after what is advised")
	}
	n.pod.Path = nstest.Path(n, n.pod.NetNS) // the old one may be gone
	switch all := strings.Join(rest, "\n"); {
	case strings.Contains(all, "[gc]"):
		n.do(func() error { return expect.Err(n.CollectDead(n.Context(), n.nw.Name, false)) })
		n.add()
	case strings.Contains(all, "[start tombolod]"):
		n.keep()
	case strings.Contains(all, "[recreate pod]"):
		n.do(func() error { return n.Del(n.Context(), n.made.Key, nil) })
		n.add()
	}
}

// wantSaid compares what each look says with what a fault is to be told by.
func (n *node) wantSaid(f fault) {
	n.Helper()
	want := n.lines(f.says)
	expect.NoDiff(n, cmp.Diff(want, n.inspected()), "Inspect")
	expect.NoDiff(n, cmp.Diff(slices.Compact(n.lines(f.notes)), n.noted()), "what Inspect notes")
	if f.hidden {
		want = nil
	}
	want = append(want, n.lines(f.more)...)
	for i, line := range want {
		want[i], _, _ = strings.Cut(line, " [")
	}
	slices.Sort(want)
	expect.NoDiff(n, cmp.Diff(slices.Compact(want), n.checked()), "Check")
	if n.keeper != nil {
		n.do(func() error {
			lacking := n.keeper(n)
			expect.Equal(n, len(lacking) > 0, f.says != "" && !f.unseen, "the keeper is told of %v", lacking)
			return nil
		})
	}
}

// inspected is all that Inspect says.
func (n *node) inspected() (said []string) {
	n.Helper()
	n.do(func() error {
		in, err := n.Inspect(n.Context())
		if err != nil {
			return err
		}
		all := slices.Concat(in.Stray, in.Uplinks, in.Damaged)
		for _, r := range in.Networks {
			all = append(all, r.Differences...)
		}
		for _, r := range in.Attachments {
			all = append(all, r.Differences...)
		}
		for _, d := range all {
			said = append(said, d.String()+" ["+string(d.Remedy)+"]")
		}
		return nil
	})
	slices.Sort(said)
	return slices.Compact(said)
}

// noted is what Inspect notes inside of pods.
func (n *node) noted() (said []string) {
	n.Helper()
	n.do(func() error {
		in, err := n.Inspect(n.Context())
		if err != nil {
			return err
		}
		for _, r := range in.Attachments {
			for _, d := range r.Inside {
				said = append(said, d.String())
			}
		}
		return nil
	})
	slices.Sort(said)
	return slices.Compact(said)
}

// checked is what Check says of the pod, by what a runtime has kept of its Add.
func (n *node) checked() (said []string) {
	n.Helper()
	n.do(func() error {
		diffs, err := n.Check(n.Context(), &n.nw, n.reported())
		for _, d := range diffs {
			said = append(said, d.String())
		}
		return err
	})
	slices.Sort(said)
	return slices.Compact(said)
}

func (n *node) reported() *network.Pod {
	p := n.pod
	p.Reported = &network.Reported{MAC: n.made.MAC, HostMACs: map[string]string{n.made.Port: n.made.PortMAC.String()}, Routes: n.made.Routes}
	for _, a := range n.made.Addresses {
		p.Reported.Addresses = append(p.Reported.Addresses, a.Prefix)
	}
	return &p
}

// take takes the pod and the network down, and what is left of either.
func (n *node) take() error {
	if err := n.Del(n.Context(), n.made.Key, nil); err != nil {
		return err
	}
	if _, err := n.Collect(n.Context(), n.nw.Name, nil, nil); err != nil {
		return err
	}
	return n.Remove(n.Context(), n.nw.Name)
}

// wantNothing finds the host as it was, but for what is another's, after all has been taken down.
func (n *node) wantNothing(f fault) {
	n.Helper()
	if f.refuse != "" {
		expect.Says(n, n.take(), n.names(f.refuse))
		nstest.Run(n, n.ns, "sh", "-ec", n.names(f.undo))
	}
	must.Succeed(n, n.take())
	want := ""
	if others := n.names(f.stays + "\n" + f.left); strings.TrimSpace(others) != "" {
		without := n.table.host(n.T)
		nstest.Run(n, without.ns, "sh", "-c", others+"\ntrue")
		want = without.empty.Diff(nstest.Snap(n, without.ns, "", nil))
	}
	expect.NoDiff(n, cmp.Diff(want, n.empty.Diff(nstest.Snap(n, n.ns, "", nil))), "the host, after all is gone")
}

// everything is a pod that has all that a pod can have, on a network likewise.
func everything(n *node) {
	n.nw.Guard, n.nw.Masquerade, n.nw.Hairpin, n.nw.Routed = nft.GuardAddresses, true, true, true
	n.pod.Ports = []nft.Port{{Protocol: nft.TCP, HostPort: 8080, PodPort: 80}}
	n.pod.Limits = bandwidth.Shape{Ingress: bandwidth.Limit{Rate: 8e6}, Egress: bandwidth.Limit{Rate: 16e6}}
}

// lackingLinks is what the keeper is told where the kernel announces a change of links, addresses and routes.
func lackingLinks(n *node) []string {
	links, err := n.Upkeep().Links(n.Context())
	must.Succeed(n, err)
	return links.Lacking[n.nw.Name]
}

// lackingRules is the same where it announces a change of the firewall.
func lackingRules(n *node) []string {
	_, lacking, err := n.Upkeep().Firewall(n.Context())
	must.Succeed(n, err)
	return lacking
}
