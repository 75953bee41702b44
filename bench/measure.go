package main

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"
)

const (
	peakRounds  = 5 // ADDs for the memory figure, which hardly varies
	fillWorkers = 2 // who add pods at once, where that is not measured

	// A pod rests before its DEL, nearly all of which the kernel waits for RCU grace
	// periods. Right after an ADD those are still going on, and whoever starts its
	// work later into them waits less: the reference's DEL then measured shorter than
	// floor's. Grace periods go by the kernel's tick, of up to 10 ms, so the end of
	// the rest is random over one.
	restAtLeast = 30 * time.Millisecond
	restRandom  = 10 * time.Millisecond
)

// runner measures scenarios and collects the figures.
type runner struct {
	dir        string // of the sandbox
	records    string // on a disk
	binaries   binaries
	contenders []string
	rounds     int
	report     report
}

// measure runs one scenario from its own fresh nodes.
func (r *runner) measure(s scenario) error {
	switch {
	case s.attach:
		return r.measureAttach(s)
	case s.ports > 0:
		return r.measurePorts(s)
	}
	if why := serverMissing(s); why != "" {
		r.report.skip("%s", why)
		return nil
	}
	if s = s.hurried(r.rounds); s.impatient && slices.Contains(r.contenders, reference) {
		r.report.note("%s: %s's daemon asks again after a second, not ten, when it loses its first packet", s.name, reference)
	}
	nodes, err := r.nodes(s)
	defer func() {
		for _, n := range nodes {
			n.leave()
		}
	}()
	switch {
	case err != nil:
		return err
	case s.leases:
		return r.measureLeases(s, nodes)
	case s.dhcp:
		return r.measureDHCP(s, nodes)
	}
	if s.pods == 0 {
		if err := r.interleave(nodes, "add", "del"); err != nil {
			return err
		}
		return r.measurePeaks(nodes)
	}
	return r.measureGrowth(nodes)
}

// nodes makes a node for each contender that can take part in a scenario.
func (r *runner) nodes(s scenario) ([]*node, error) {
	var nodes []*node
	for _, contender := range r.contenders {
		if !s.takes(contender) {
			continue
		}
		if why := r.cannot(contender, s); why != "" {
			r.report.skip("%s", why)
			continue
		}
		dir := filepath.Join(r.dir, s.name, contender)
		n, err := newNode(contender, dir, s, r.binaries)
		if err != nil {
			return nodes, err
		}
		nodes = append(nodes, n)
		if s.dhcp {
			if err := n.addLAN(dir, filepath.Join(r.records, s.name, contender)); err != nil {
				return nodes, err
			}
		}
	}
	return nodes, nil
}

// cannot says why a contender cannot take part, if so.
func (r *runner) cannot(contender string, s scenario) string {
	if s.attach && contender == reference {
		return fmt.Sprintf("%s in %s: it has no packages to attach with", contender, s.name)
	}
	// In process, our contender is this program.
	if absent := r.binaries.missing(contender, s); absent != nil && !(s.attach && contender == tombolo) {
		return fmt.Sprintf("%s in %s: %s missing", contender, s.name, strings.Join(absent, " and "))
	}
	return ""
}

// measureGrowth compares an ADD on a node with pods with one on the same node before.
func (r *runner) measureGrowth(nodes []*node) error {
	if err := r.interleave(nodes, "add at 0", "del at 0"); err != nil {
		return err
	}
	for _, n := range nodes {
		if err := n.fill(); err != nil {
			return err
		}
	}
	if err := r.interleave(nodes, "add", "del"); err != nil {
		return err
	}
	for _, n := range nodes {
		before := r.report.find(n.scenario.name, "add at 0", n.contender)
		after := r.report.find(n.scenario.name, "add", n.contender)
		r.report.add(n.scenario.name, "growth", n.contender, times, median(after.values)/median(before.values))
	}
	return nil
}

// fill adds the scenario's pods and leaves them there.
func (n *node) fill() error {
	paths, err := n.makePods("resident", n.scenario.pods)
	if err != nil {
		return err
	}
	for _, path := range paths {
		n.resident = append(n.resident, n.newPod(path))
	}
	workers := fillWorkers
	if n.scenario.dhcp {
		workers = leaseWorkers
	}
	if err := n.addAll(n.resident, workers); err != nil {
		return fmt.Errorf("%s: fill the node: %w", n.contender, err)
	}
	return provePod(paths[len(paths)-1], subnets(n.scenario.dual))
}

// addAll adds pods by a few workers, until the first error.
func (n *node) addAll(pods []*pod, workers int) error {
	var next atomic.Int64
	errs := make([]error, workers)
	var all sync.WaitGroup
	for worker := range workers {
		all.Go(func() {
			for i := next.Add(1) - 1; i < int64(len(pods)) && errs[worker] == nil; i = next.Add(1) - 1 {
				_, errs[worker] = n.execute("ADD", pods[i], run)
				if errs[worker] == nil && n.scenario.leases {
					errs[worker] = n.introduce(pods[i])
				}
			}
		})
	}
	all.Wait()
	return errors.Join(errs...)
}

// interleave runs the rounds: in each, every contender adds and deletes one pod, and
// the order rotates, so that nobody always runs in the wake of the same other's DEL.
func (r *runner) interleave(nodes []*node, add, del string) error {
	if len(nodes) == 0 {
		return nil
	}
	s := nodes[0].scenario
	rounds, warmUp := s.rounds(r.rounds), s.warmUp()
	pods := make([][]string, len(nodes))
	before := make([]string, len(nodes))
	for i, n := range nodes {
		var err error
		if pods[i], err = n.makePods(add, warmUp+rounds); err != nil {
			return err
		}
	}
	for round := range warmUp + rounds {
		for turn := range nodes {
			i := (round + turn) % len(nodes)
			n := nodes[i]
			pod, err := n.live(pods[i][round])
			if err != nil {
				return fmt.Errorf("%s, round %d: %w", n.contender, round, n.explain(err))
			}
			if round < warmUp {
				if before[i], err = n.inventory(); err != nil {
					return err
				}
				continue
			}
			r.addCost(n, add, pod.added)
			r.addCost(n, del, pod.deleted)
			if n.kept() {
				r.report.add(s.name, "keeper cpu", n.contender, "ms", milliseconds(pod.keeping))
			}
		}
	}
	for i, n := range nodes {
		after, err := n.inventory()
		if err != nil {
			return err
		}
		if after != before[i] {
			return fmt.Errorf("%s left something behind; before:\n%s\nafter:\n%s", n.contender, before[i], after)
		}
		r.report.prove("%s, %s of %s: each of %d pods %s, each DEL left nothing",
			s.name, add, n.contender, len(pods[i]), n.proven())
	}
	return nil
}

// proven is what live saw of each pod.
func (n *node) proven() string {
	if n.scenario.dhcp {
		return "had a lease by the server's file, pinged its gateway"
	}
	if n.scenario.full && n.contender != floor {
		return "pinged its gateway and, through a policy of DROP, the outside, answered at its host port, was limited"
	}
	return "pinged its gateway"
}

func (r *runner) addCost(n *node, metric string, o outcome) {
	r.report.add(n.scenario.name, metric, n.contender, "ms", milliseconds(o.wall))
	r.report.add(n.scenario.name, metric+" cpu", n.contender, "ms", milliseconds(o.cpu))
}

// life is what one pod cost.
type life struct {
	added, deleted outcome
	keeping        time.Duration // of CPU, of who keeps its lease
}

// live gives a namespace its pod and takes it away again: an ADD, the proof that the
// pod has what it should, a DEL, the proof that nothing is left.
func (n *node) live(path string) (life, error) {
	p := n.newPod(path)
	links, err := n.ns.links()
	if err != nil {
		return life{}, err
	}
	shapers := 0
	if n.scenario.full {
		if shapers, err = n.shapers(); err != nil {
			return life{}, err
		}
	}
	keeping, err := n.keeping()
	if err != nil {
		return life{}, err
	}
	added, err := n.execute("ADD", p, run)
	if err != nil {
		return life{}, err
	}
	if err := n.prove(p, shapers); err != nil {
		return life{}, err
	}
	time.Sleep(restAtLeast + rand.N(restRandom))
	deleted, err := n.execute("DEL", p, run)
	if err != nil {
		return life{}, err
	}
	if p.number > 0 { // the first ADD may have made the bridge
		err = proveGone(n, links, path)
	}
	if err == nil && n.scenario.dhcp {
		err = n.proveLease(p, false)
	}
	kept, failed := n.keeping()
	return life{added, deleted, kept - keeping}, errors.Join(err, failed)
}

func (n *node) prove(p *pod, shapers int) error {
	if n.contender != floor { // which gives no result
		if err := checkResult(p.result, subnets(n.scenario.dual)); err != nil {
			return err
		}
	}
	err := provePod(p.path, subnets(n.scenario.dual))
	if err == nil && n.scenario.full {
		err = n.proveFull(p, shapers)
	}
	if err == nil && n.scenario.dhcp {
		err = n.proveLease(p, true)
	}
	return err
}

// measurePeaks takes the memory figures, in lives of their own: the gauge costs time.
func (r *runner) measurePeaks(nodes []*node) error {
	if _, err := os.Stat(r.binaries.peak()); err != nil {
		r.report.skip("memory: %s is missing", r.binaries.peak())
		return nil
	}
	for _, n := range nodes {
		paths, err := n.makePods("peak", min(peakRounds, (n.scenario.rounds(r.rounds)+1)/2))
		if err != nil {
			return err
		}
		for _, path := range paths {
			kib, err := n.peak(path)
			if err != nil {
				return fmt.Errorf("%s, memory: %w", n.contender, err)
			}
			r.report.add(n.scenario.name, "peak", n.contender, "MiB", float64(kib)/1024)
		}
	}
	return nil
}

// peak is the memory of an ADD, in KiB; the pod is deleted again.
func (n *node) peak(path string) (int, error) {
	p := n.newPod(path)
	o, err := n.execute("ADD", p, func(c command) (outcome, error) { return peakMemory(n.binaries.peak(), c) })
	if err != nil {
		return 0, err
	}
	_, err = n.execute("DEL", p, run)
	return o.peak, err
}

// makePods makes namespaces in advance, fresh ones for every ADD. They are never
// removed one by one: taking them down is the kernel's work in the background, and
// would run into the next measurement.
func (n *node) makePods(purpose string, count int) ([]string, error) {
	paths := make([]string, count)
	for i := range paths {
		paths[i] = filepath.Join(filepath.Dir(n.state), "pods", purpose+"-"+strconv.Itoa(i))
		ns, err := newNS(paths[i])
		if err != nil {
			return nil, err
		}
		if err := ns.Close(); err != nil {
			return nil, err
		}
	}
	return paths, nil
}

// newPod numbers the node's pods, from 0.
func (n *node) newPod(path string) *pod {
	n.pods++
	return &pod{number: n.pods - 1, path: path}
}

func milliseconds(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }
