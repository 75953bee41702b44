package bench

import (
	"context"
	"fmt"
	"io/fs"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/tombolo-cni/tombolo/internal/icmp"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
	"github.com/tombolo-cni/tombolo/netns"
)

// The network is the same on every node: each has a namespace of its own.
const (
	networkName = "bench"
	podIfname   = "eth0"
	podMTU      = 1500
)

func subnets(dual bool) []netip.Prefix {
	all := []netip.Prefix{netip.MustParsePrefix("10.88.0.0/16"), netip.MustParsePrefix("fd00:88::/64")}
	if dual {
		return all
	}
	return all[:1]
}

// gatewayOf is the first address of a subnet, which host-local takes by default.
func gatewayOf(subnet netip.Prefix) netip.Addr { return subnet.Addr().Next() }

// podAddress is the address that the pod of a number has where there is no IPAM: the
// gateway is number -1.
func podAddress(subnet netip.Prefix, pod int) netip.Prefix {
	ip := subnet.Addr().AsSlice()
	ip[len(ip)-1], ip[len(ip)-2] = byte(pod+2), byte((pod+2)>>8)
	address, _ := netip.AddrFromSlice(ip)
	return netip.PrefixFrom(address, subnet.Bits())
}

// node is a machine with pods: a namespace, and a directory for its state.
type node struct {
	contender
	tb      testing.TB
	feature feature
	host    *netns.NS
	outside *netns.NS // another machine, where the feature has one
	lan     *lan      // where addresses are leased
	dir     string
	count   atomic.Int64 // of the pods that there have been
	linked  []string     // the node's links, between two pods
	gauge   bool         // what is executed is measured by its memory
	syncs   int          // of kube-proxy there

	after func(step string) error // of an ADD in process
}

// pod is a namespace, and what a runtime keeps about it.
type pod struct {
	number int // distinct over the node's life, and so is all that is derived from it
	ns     *netns.NS
	result []byte // of its ADD
	shaped int    // the limits that the node had before
}

func (p *pod) id() string { return "bench-" + strconv.Itoa(p.number) }

// path names the pod's namespace in the file system, for this process and its children.
func (p *pod) path() string {
	return "/proc/" + strconv.Itoa(os.Getpid()) + "/fd/" + strconv.Itoa(p.ns.FD())
}

// newNode makes a contender's machine. The first ADD makes the bridge, but for those that
// do not know how to.
func newNode(tb testing.TB, c contender, f feature) *node {
	tb.Helper()
	n := &node{contender: c, tb: tb, feature: f, host: nstest.New(tb), dir: scratch(tb)}
	if slices.Contains(c.needs, "cni-kindnet") {
		must.Succeed(tb, os.RemoveAll(kindnetDir))
		tb.Cleanup(func() { _ = os.RemoveAll(kindnetDir) })
	}
	if f.outside {
		n.addOutside(tb)
	}
	if f.dhcp {
		n.addLAN(tb)
	}
	if c.proxy != "" {
		n.addProxy(tb)
	}
	if c.bridgeless {
		floorBridgeOn(tb, n)
	}
	return n
}

// warm has a pod come and go, so that the bridge is there.
func (n *node) warm(tb testing.TB) *node {
	tb.Helper()
	p := n.pod(tb)
	must.Succeed(tb, n.live(p))
	n.linked = links(tb, n.host)
	return n
}

// pod makes a namespace for a pod. It is not given back before the benchmark ends: the
// kernel would take it down during the next measurement.
func (n *node) pod(tb testing.TB) *pod {
	tb.Helper()
	p := n.again(&pod{ns: nstest.New(tb)})
	for _, network := range n.feature.served() {
		nstest.Serve(tb, p.ns, network, netip.AddrPortFrom(netip.IPv6Unspecified(), podPort))
	}
	return p
}

// again makes another pod of one whose namespace is empty once more.
func (n *node) again(p *pod) *pod { return &pod{number: int(n.count.Add(1)), ns: p.ns} }

// live has a pod come, be proven, and go.
func (n *node) live(p *pod) error {
	if err := n.measureShapers(p); err != nil {
		return err
	}
	if _, err := n.call("ADD", p); err != nil {
		return err
	}
	if err := n.prove(p); err != nil {
		return err
	}
	_, err := n.call("DEL", p)
	return err
}

// fill adds pods until there are so many, and proves the last.
func (n *node) fill(tb testing.TB, there []*pod, want, workers int) []*pod {
	tb.Helper()
	var next []*pod
	for range want - len(there) {
		next = append(next, n.pod(tb))
	}
	said := time.Now()
	var done atomic.Int64
	err := atOnce(next, workers, func(p *pod) error {
		if done.Add(1)%50 == 0 {
			progress(&said, "%s: %d of %d pods are there", n.name, len(there)+int(done.Load()), want)
		}
		_, err := n.call("ADD", p)
		if err == nil && n.lan != nil {
			err = n.introduce(p)
		}
		return err
	})
	if err == nil && len(next) > 0 {
		err = n.ping(next[len(next)-1])
	}
	must.Succeed(tb, err, "fill the node of %s", n.name)
	return append(there, next...)
}

// atOnce calls do for each pod, by some workers, until the first error of each.
func atOnce(pods []*pod, workers int, do func(*pod) error) error {
	var next atomic.Int64
	var first atomic.Pointer[error]
	var all sync.WaitGroup
	for range workers {
		all.Go(func() {
			for i := next.Add(1) - 1; i < int64(len(pods)) && first.Load() == nil; i = next.Add(1) - 1 {
				if err := do(pods[i]); err != nil {
					first.CompareAndSwap(nil, &err)
				}
			}
		})
	}
	all.Wait()
	if err := first.Load(); err != nil {
		return *err
	}
	return nil
}

// prove shows that a pod has what it was to get: the addresses of its result, its gateway
// within reach, and what its feature promises.
func (n *node) prove(p *pod) error {
	err := checkResult(p.result, subnets(n.feature.dual), n.gatewayOf)
	if err == nil && !n.idle {
		err = n.ping(p)
	}
	if err == nil && n.feature.prove != nil && !n.bridgeless && !n.idle {
		err = n.feature.prove(n, p)
	}
	if err == nil && n.lan != nil {
		err = n.proveLease(p, true)
	}
	if err != nil {
		return fmt.Errorf("%s, pod %d: %w", n.name, p.number, err)
	}
	return nil
}

func (n *node) gatewayOf(subnet netip.Prefix) netip.Addr {
	if n.gateway != nil {
		return n.gateway(subnet)
	}
	return gatewayOf(subnet)
}

func (n *node) ping(p *pod) error {
	for _, subnet := range subnets(n.feature.dual) {
		if err := ping(p.ns, n.gatewayOf(subnet)); err != nil {
			return err
		}
	}
	return nil
}

// proveGone compares links with what there has to be after a DEL.
func (n *node) proveGone(tb testing.TB, p *pod) {
	tb.Helper()
	left := links(tb, n.host)
	must.That(tb, slices.Equal(left, n.linked), "%s: links after DEL: %v, want %v", n.name, left, n.linked)
	left = links(tb, p.ns)
	must.That(tb, slices.Equal(left, []string{"lo"}), "%s: links in the pod after DEL: %v", n.name, left)
	if n.lan != nil && n.name != reference { // whose daemon sends the RELEASE when the link has gone
		must.Succeed(tb, n.proveLease(p, false))
	}
}

// inventory is all that a contender could leave behind on its node. Names only: counters,
// and the contents of a last-address file, may change.
func (n *node) inventory(tb testing.TB) string {
	tb.Helper()
	names := links(tb, n.host)
	must.Succeed(tb, filepath.WalkDir(n.dir, func(path string, d fs.DirEntry, err error) error {
		if base := filepath.Base(path); !strings.HasPrefix(base, "cni.db-") && !strings.HasPrefix(base, "dnsmasq") {
			names = append(names, path)
		}
		return err
	}))
	counters := regexp.MustCompile(`packets \d+ bytes \d+`)
	ruleset := withoutProxy(nstest.Run(tb, n.host, "nft", "list", "ruleset"))
	return strings.Join(names, "\n") + "\n" + counters.ReplaceAllString(ruleset, "")
}

// links lists the names of a namespace's interfaces, sorted.
func links(tb testing.TB, ns *netns.NS) []string {
	tb.Helper()
	var names []string
	must.Succeed(tb, ns.Do(func() error {
		interfaces, err := net.Interfaces()
		for _, i := range interfaces {
			names = append(names, i.Name)
		}
		return err
	}))
	slices.Sort(names)
	return names
}

// patience is how long an answer may take, on a busy machine.
const patience = time.Minute

// ping sends echo requests until one is answered: a link without carrier yet refuses, and
// so does an address that is still checked for duplicates.
func ping(ns *netns.NS, to netip.Addr) error {
	for until := time.Now().Add(patience); ; time.Sleep(5 * time.Millisecond) {
		err := icmp.Ping(context.Background(), ns, to, icmp.Echo{Wait: time.Until(until)})
		if err == nil || time.Now().After(until) {
			return err
		}
	}
}
