package main

import (
	"bytes"
	"fmt"
	"net"
	"os"
	"slices"
	"time"

	"github.com/tombolo-cni/tombolo/netns"
)

// What keeping leases costs is measured on short ones, each of which is renewed every
// minute. A round is as long as it takes for a quarter of them.
const (
	leaseRounds  = 8               // so many at most: each lease is renewed twice
	leaseShare   = 10              // one of so many rounds asked for
	leaseAtLeast = 2               // of them
	leaseQuota   = 4               // one of so many leases is renewed in a round
	leaseWorkers = 8               // who add pods at once: an ADD waits more than it works
	roundLimit   = 4 * time.Minute // longer than two renewals of a lease are apart
	roundPause   = 100 * time.Millisecond
)

// measureLeases measures who keeps a node's leases: what it takes up, and what CPU time
// a renewal costs it, with all else that it did meanwhile. The nodes' rounds run side by
// side, and nobody waits for anybody.
func (r *runner) measureLeases(s scenario, nodes []*node) error {
	counts := make([]*renewals, len(nodes))
	for i, n := range nodes {
		if err := n.fill(); err != nil {
			return n.explain(err)
		}
		counts[i] = &renewals{node: n}
		if err := counts[i].begin(); err != nil {
			return err
		}
	}
	rounds := s.rounds(r.rounds)
	for going := slices.Clone(counts); len(going) > 0; time.Sleep(roundPause) {
		for _, c := range going {
			if err := r.watch(s, c); err != nil {
				return c.node.explain(err)
			}
		}
		going = slices.DeleteFunc(going, func(c *renewals) bool { return c.rounds == rounds })
	}
	for _, c := range counts {
		if err := c.prove(); err != nil {
			return c.node.explain(err)
		}
		r.report.prove("%s of %s: after %d renewals each of %d pods had its lease, and the last one pinged its gateway",
			s.name, c.node.contender, c.total, len(c.node.resident))
	}
	return nil
}

// introduce tells a pod and its router each other's MAC address for good. The kernel has
// one table of neighbours for all namespaces together, of 1,024 by default, and drops
// packets, also those of others on this machine, when it is full. Permanent neighbours
// are not counted.
func (n *node) introduce(p *pod) error {
	inside, err := netns.Open(p.path)
	if err != nil {
		return err
	}
	defer inside.Close()
	address, err := leaseOf(p)
	if err != nil {
		return err
	}
	mac, err := hardwareAddress(namedNS{NS: inside}, podIfname)
	if err != nil {
		return err
	}
	const neighbour = "ip neigh replace %s lladdr %s nud permanent dev %s"
	if err := n.tools(n.lan.router, fmt.Sprintf(neighbour, address, mac, routerIfname)); err != nil {
		return err
	}
	return n.tools(namedNS{NS: inside}, fmt.Sprintf(neighbour, gatewayOf(subnets(false)[0]), n.lan.mac, podIfname))
}

func hardwareAddress(ns namedNS, name string) (net.HardwareAddr, error) {
	var link *net.Interface
	err := ns.Do(func() error {
		var err error
		link, err = net.InterfaceByName(name)
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("look up %s: %w", name, err)
	}
	return link.HardwareAddr, nil
}

// watch looks whether a node's round is over. What comes before the first renewal is
// no round.
func (r *runner) watch(s scenario, c *renewals) error {
	if err := c.read(); err != nil {
		return err
	}
	switch quota := max(s.pods/leaseQuota, 1); {
	case !c.going && c.count > 0:
		c.going = true
		return c.begin()
	case c.going && c.count >= quota:
		if err := r.addRenewals(s, c); err != nil {
			return err
		}
		c.rounds++
		return c.begin()
	case time.Since(c.since) > roundLimit:
		return fmt.Errorf("%s: %d renewals in %s, want %d", c.node.contender, c.count, roundLimit, quota)
	}
	return nil
}

// renewals counts a node's renewals by the server's log, from the first begin on.
type renewals struct {
	node   *node
	offset int64 // how far the log was read
	total  int
	asked  int // DISCOVERs, of pods that have a lease
	going  bool
	rounds int // that are over

	// Of the round.
	since time.Time
	cpu   time.Duration // of the keeper when it began
	count int
}

// begin starts a round.
func (c *renewals) begin() error {
	first := c.since.IsZero()
	if err := c.read(); err != nil {
		return err
	}
	if first {
		c.total, c.asked = 0, 0
	}
	cpu, err := c.node.lan.keeper.cpu()
	c.since, c.cpu, c.count = time.Now(), cpu, 0
	return err
}

// read counts what came to the log, in whole lines.
func (c *renewals) read() error {
	log, err := os.Open(c.node.lan.log)
	if err != nil {
		return err
	}
	defer log.Close()
	info, err := log.Stat()
	if err != nil {
		return err
	}
	text := make([]byte, info.Size()-c.offset)
	if _, err := log.ReadAt(text, c.offset); err != nil {
		return fmt.Errorf("read the server's log: %w", err)
	}
	c.tally(text)
	return nil
}

// tally counts the whole lines of what was read.
func (c *renewals) tally(text []byte) {
	text = text[:bytes.LastIndexByte(text, '\n')+1]
	acks := bytes.Count(text, []byte(logAck))
	c.offset += int64(len(text))
	c.count += acks
	c.total += acks
	c.asked += bytes.Count(text, []byte(logDiscover))
}

// addRenewals adds a round's figures.
func (r *runner) addRenewals(s scenario, c *renewals) error {
	cpu, err := c.node.lan.keeper.cpu()
	if err != nil {
		return err
	}
	h, err := c.node.lan.keeper.holding()
	if err != nil {
		return err
	}
	add := func(metric, unit string, value float64) { r.report.add(s.name, metric, c.node.contender, unit, value) }
	add("memory", "MiB", float64(h.resident)/1024)
	add("threads", "", float64(h.threads))
	add("descriptors", "", float64(h.descriptors))
	add("renewal cpu", "ms", milliseconds(cpu-c.cpu)/float64(c.count))
	return nil
}

// prove compares the pods' leases with the server's. A pod that had lost its own would
// have asked for another.
func (c *renewals) prove() error {
	if c.asked > 0 {
		return fmt.Errorf("%s: pods that had a lease asked for a new one: %d DISCOVERs", c.node.contender, c.asked)
	}
	leases, err := c.node.lan.leases()
	if err != nil {
		return err
	}
	for _, p := range c.node.resident {
		address, err := leaseOf(p)
		if err != nil {
			return err
		}
		if !leases[address] {
			return fmt.Errorf("%s: the server has no lease of %s, pod %d's", c.node.contender, address, p.number)
		}
	}
	return provePod(c.node.resident[len(c.node.resident)-1].path, subnets(false))
}
