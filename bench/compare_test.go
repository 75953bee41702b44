package bench

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/tombolo-cni/tombolo/internal/testutil/must"
)

// scenario is a comparison: contenders whose rounds are interleaved.
type scenario struct {
	name       string
	feature    feature
	features   map[string]feature // of single contenders, where they differ
	contenders []contender
	long       bool // it takes a minute and more
	pods       int  // so many are there during the second half of the rounds
	crowd      int  // a round is so many pods, eight at once
	proxy      bool // kube-proxy is beside some
	share      int  // one in so many rounds takes place
}

const atATime = 8 // pods of a crowd

func scenarios(tb testing.TB) []scenario {
	rapid := tombolo()
	rapid.name = "tombolo-rapid"
	return []scenario{
		{name: "ipv4", feature: ipv4(), contenders: []contender{kernel(tb), attach(tb), inProcess(), empty(), floor(), tombolo(), referencePlugin(), kindnet(), cniKindnet()}},
		{name: "dual", feature: feature{name: "dual", dual: true, masquerade: true}, share: 2, contenders: []contender{floor(), tombolo(), referencePlugin()}},
		{name: "everything", feature: everything(), share: 8, long: true, contenders: []contender{floor(), tombolo(), names(), chain("iptables"), chain("nftables")}},
		{name: "everything-beside-200", feature: everything(), share: 8, pods: 200, long: true, contenders: []contender{floor(), tombolo(), chain("nftables")}},
		{name: "ipv4-beside-900", feature: ipv4(), share: 2, pods: 900, long: true, contenders: []contender{floor(), tombolo()}},
		{name: "port-beside-services", feature: port(), share: 2, proxy: true, long: true, contenders: besideServices()},
		manyPorts(1, 8, chain("iptables"), chain("nftables")),
		manyPorts(200, 8, chain("iptables"), chain("nftables")),
		manyPorts(10_000, 16, chain("nftables")),
		{name: "crowd", feature: ipv4(), share: 16, crowd: 80, contenders: []contender{floor(), tombolo(), referencePlugin(), kindnet(), cniKindnet()}},
		{name: "dhcp", feature: dhcp("dhcp", false), share: 2, contenders: []contender{tombolo(), rapid, referencePlugin()},
			features: map[string]feature{rapid.name: dhcp("dhcp", true)}},
	}
}

// manyPorts compares pods with many host ports, and with one mapping for all of them. With iptables the reference takes
// seconds for 200: it is left out at 10,000.
func manyPorts(count, share int, others ...contender) scenario {
	ranged, inOne := tombolo(), ports(count)
	ranged.name, inOne.ranged = "tombolo-range", true
	return scenario{name: fmt.Sprintf("ports-%d", count), feature: ports(count), share: share, long: true,
		contenders: append([]contender{floor(), tombolo(), ranged}, others...), features: map[string]feature{ranged.name: inOne}}
}

// rounds is how many of the rounds asked for a scenario gets; a few in any case, unless
// every benchmark is to run once.
func (s *scenario) rounds(asked int) int {
	if s.share < 2 {
		return asked
	}
	return max(min(asked, 3), asked/s.share)
}

// A pod rests before its DEL, nearly all of which the kernel waits for RCU grace periods.
// Right after an ADD those are still going on, and what starts its work later into them
// waits less: the reference's DEL then measured shorter than floor's. Grace periods go by
// the kernel's tick, of up to 10 ms, so the end of the rest is random over one.
func rest() { time.Sleep(30*time.Millisecond + rand.N(10*time.Millisecond)) }

// figures are the values of one contender, a value a round, by what was measured.
type figures map[string][]float64

const (
	addTime  = "ADD-ns"
	delTime  = "DEL-ns"
	addCPU   = "ADD-cpu-ns"
	delCPU   = "DEL-cpu-ns"
	peakMiB  = "peak-MiB"
	addFirst = "ADD-at-0-ns" // on the empty node, before its pods are there
	daemonNs = "keeper-cpu-ns"
)

// comparison is a scenario under way.
type comparison struct {
	scenario
	tb      testing.TB
	nodes   []*node
	pods    []*pod // of each node in turn: what is there
	done    int    // rounds
	figures map[string]figures
	before  []string // the inventory of each node, after the warm-up
	said    time.Time
}

func newComparison(b *testing.B, s scenario) *comparison {
	c := &comparison{scenario: s, tb: b, figures: map[string]figures{}, said: time.Now()}
	for _, each := range s.contenders {
		if why := each.missing(); why != "" {
			say("%s: without %s: %s", s.name, each.name, why)
			continue
		}
		f, own := s.features[each.name]
		if !own {
			f = s.feature
		}
		n := newNode(b, each, f).warm(b)
		if s.proxy { // the only pod with a port opens and closes the node's loopback for it
			n.fill(b, nil, 1, 1)
			n.linked = links(b, n.host)
		}
		c.nodes = append(c.nodes, n)
		c.before = append(c.before, n.inventory(b))
		c.figures[n.name] = figures{}
	}
	return c
}

// BenchmarkExec measures plugins as runtimes execute them, contenders beside each other: in each round every one of them
// adds and deletes a pod, and the order rotates. So a slow spell of the machine hits all of them, and each line's ratios
// are those of one run. The rounds take place in the first contender's line; the lines of the others report theirs.
func BenchmarkExec(b *testing.B) {
	if !executes() {
		fmt.Println("BenchmarkExec is left out: it executes plugins for 10 minutes (go test ./bench -run '^$' -bench Exec -timeout 1h)")
		b.SkipNow()
	}
	for _, s := range scenarios(b) {
		before := namespaces()
		measure(b, s.name, func(b *testing.B) { compare(b, s) })
		settle(before)
	}
	measure(b, "leases", leases)
	measure(b, "host-port", hostPort)
	measure(b, "uplink", uplink)
	measure(b, "lan-traffic", lanTraffic)
}

// measure runs a scenario, for a report on a quiet machine only.
func measure(b *testing.B, name string, run func(*testing.B)) {
	quiet := sync.OnceFunc(func() { awaitQuiet(b) })
	b.Run("scenario="+name, func(b *testing.B) {
		quiet()
		run(b)
	})
}

func compare(b *testing.B, s scenario) {
	if s.long {
		skipLong(b)
	}
	if s.feature.dhcp {
		needDHCP(b)
	}
	c := newComparison(b, s)
	for _, n := range c.nodes {
		b.Run("contender="+n.name, func(b *testing.B) {
			if b.N == 1 && !once() { // testing calls it once before
				return
			}
			c.run(b, s.rounds(b.N))
			standInLine(b, c.done)
			c.report(b, n)
		})
	}
}

// run has rounds take place until there were so many.
func (c *comparison) run(b *testing.B, want int) {
	if c.pods == nil && c.scenario.pods > 0 {
		for range want {
			c.round(b, addFirst)
		}
		for _, n := range c.nodes {
			c.pods = n.fill(c.tb, nil, c.scenario.pods, 2)
			n.linked = links(b, n.host)
		}
		c.done = 0
		for i, n := range c.nodes {
			c.before[i] = n.inventory(b)
		}
	}
	for c.done < want {
		c.round(b, addTime)
		progress(&c.said, "%s: %d of %d rounds", c.name, c.done, want)
	}
	for i, n := range c.nodes {
		if after := n.inventory(b); after != c.before[i] {
			b.Fatalf("%s left something behind; before:\n%s\nafter:\n%s", n.name, c.before[i], after)
		}
		if len(c.figures[n.name][peakMiB]) == 0 && n.plugins != nil && c.crowd == 0 {
			c.gauge(b, n)
		}
	}
}

// round has every contender add and delete one pod, or a crowd of them.
func (c *comparison) round(b *testing.B, add string) {
	for turn := range c.nodes {
		n := c.nodes[(c.done+turn)%len(c.nodes)]
		f := c.figures[n.name]
		if c.crowd > 0 {
			added, deleted := c.throng(b, n)
			c.add(f, addTime, added+deleted)
			c.add(f, delTime, deleted)
			continue
		}
		p := n.pod(c.tb)
		must.Succeed(b, n.measureShapers(p))
		kept := n.kept(b)
		synced := c.disturb(n)
		added := must.Of(n.call("ADD", p)).Get(b)
		must.Succeed(b, synced())
		must.Succeed(b, n.prove(p))
		rest()
		deleted := must.Of(n.call("DEL", p)).Get(b)
		n.proveGone(b, p)
		c.add(f, add, added.wall)
		c.add(f, delTime, deleted.wall)
		if added.cpu > 0 {
			c.add(f, addCPU, added.cpu)
			c.add(f, delCPU, deleted.cpu)
		}
		if n.lan != nil {
			c.add(f, daemonNs, n.kept(b)-kept)
		}
	}
	c.done++
}

func (c *comparison) add(f figures, what string, took time.Duration) {
	f[what] = append(f[what], float64(took))
}

// throng has a crowd come and go, and gives the wall time of all ADDs, and of all DELs.
func (c *comparison) throng(b *testing.B, n *node) (added, deleted time.Duration) {
	crowd := make([]*pod, c.crowd)
	for i := range crowd {
		crowd[i] = n.pod(b)
	}
	added = must.Of(n.crowd("ADD", crowd)).Get(b)
	for _, p := range crowd {
		must.Succeed(b, n.prove(p))
	}
	deleted = must.Of(n.crowd("DEL", crowd)).Get(b)
	n.proveGone(b, crowd[0])
	return added, deleted
}

// crowd calls a verb for pods, so many of them at a time, and takes the wall time of all.
func (n *node) crowd(verb string, pods []*pod) (time.Duration, error) {
	start := time.Now()
	err := atOnce(pods, atATime, func(p *pod) error {
		_, err := n.call(verb, p)
		return err
	})
	return time.Since(start), err
}

// gauge takes the memory of an ADD, in pods of their own: the gauge costs time.
func (c *comparison) gauge(b *testing.B, n *node) {
	if path, there := peer("peak"); !there {
		b.Logf("no memory: %s is missing", path)
		return
	}
	n.gauge = true
	defer func() { n.gauge = false }()
	for range min(5, c.done) {
		p := n.pod(c.tb)
		cost, err := n.call("ADD", p)
		if err == nil {
			_, err = n.call("DEL", p)
		}
		must.Succeed(b, err)
		if cost.peak > 0 {
			c.figures[n.name][peakMiB] = append(c.figures[n.name][peakMiB], float64(cost.peak)/1024)
		}
	}
}

// kept is the CPU time of what keeps the node's leases.
func (n *node) kept(b *testing.B) time.Duration {
	if n.lan == nil {
		return 0
	}
	return must.Of(n.lan.keeper.cpu()).Get(b)
}

// report gives a contender's medians, and its ratios to the others.
func (c *comparison) report(b *testing.B, n *node) {
	f := c.figures[n.name]
	b.ReportMetric(median(f[addTime]), "ns/op")
	for what, values := range f {
		if what != addTime {
			b.ReportMetric(median(values), what)
		}
	}
	b.ReportMetric(quantile(f[addTime], 0.95), "p95-ns/op")
	if before := f[addFirst]; len(before) > 0 {
		ratioOf(f[addTime], before).report(b, "growth")
	}
	over := compared()[n.name]
	if slices.Contains(over, "go-limit") && c.figures["empty"] != nil && c.figures["kernel"] != nil {
		ratioOf(f[addTime], c.figures["empty"][addTime], c.figures["kernel"][addTime]).report(b, "ADD/go-limit")
	}
	for _, other := range c.nodes {
		if !slices.Contains(over, other.name) {
			continue
		}
		o := c.figures[other.name]
		for what, verb := range map[string]string{addTime: "ADD", delTime: "DEL", addFirst: "ADD-at-0", addCPU: "ADD-cpu", peakMiB: "peak"} {
			if len(f[what]) > 0 && len(o[what]) > 0 {
				ratioOf(f[what], o[what]).report(b, verb+"/"+other.name)
			}
		}
	}
}

// compared says what a contender's figures are reported as multiples of. The Go limit is an
// empty plugin and the kernel's work: nothing in Go goes below it.
func compared() map[string][]string {
	return map[string][]string{
		"attach":             {"kernel"},
		"tombolo-in-process": {"kernel"},
		"tombolo":            {"go-limit", "floor", reference, "kindnet", "cni-kindnet", "chain-iptables", "chain-nftables"},
		"tombolo-rapid":      {reference},
		"tombolo-range":      {"tombolo", "floor", "chain-iptables", "chain-nftables"},
		"names":              {"tombolo", "chain-iptables", "chain-nftables"},
		reference:            {"go-limit", "floor"},
		"tombolo-unchanged":  {"tombolo"},
		"tombolo-changed":    {"tombolo"},
		"tombolo-changing":   {"tombolo"},
	}
}

// report reports a ratio with its 95 % interval.
func (r interval) report(b *testing.B, name string) {
	b.ReportMetric(r.value, name)
	if !strings.HasPrefix(name, "peak") { // which hardly varies
		b.ReportMetric(r.low, name+":low")
		b.ReportMetric(r.high, name+":high")
	}
}
