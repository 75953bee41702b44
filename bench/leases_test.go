package bench

import (
	"bytes"
	"fmt"
	"io"
	"net/netip"
	"os"
	"testing"
	"time"
)

// What keeping leases costs is measured on some that are renewed every minute. The
// measurement ends when so many renewals have been counted of every pod.
const (
	leasePods    = 1000
	renewalsEach = 0.5
	leaseWorkers = 8               // that add pods at once: an ADD waits more than it works
	renewalsIn   = 5 * time.Minute // all of them, since two of a lease are a minute apart
)

// leases measures what keeps the leases of a node's pods, one contender after the
// other: the CPU time of a renewal (ns/op), with all else that it does meanwhile, and what
// it takes up.
func leases(b *testing.B) {
	skipLong(b)
	needDHCP(b)
	for _, c := range []contender{tombolo(), referencePlugin()} {
		if why := c.missing(); why != "" {
			say("leases: without %s: %s", c.name, why)
			continue
		}
		f := dhcp("leases", false)
		f.renewed = true
		r := &renewals{node: newNode(b, c, f), acked: map[netip.Addr]time.Time{}}
		r.pods = r.node.fill(b, nil, leasePods, leaseWorkers)
		if err := r.watch(); err != nil {
			b.Fatal(r.node.explain(err))
		}
		b.Run("contender="+c.name, func(b *testing.B) {
			standInLine(b, r.count)
			if err := r.report(b); err != nil {
				b.Fatal(r.node.explain(err))
			}
		})
	}
}

// renewals counts a node's renewals by the server's log, from the first one that comes
// after the pods are there.
type renewals struct {
	node         *node
	pods         []*pod
	offset       int64                    // how far the log was read
	count, asked int                      // of renewals; of DISCOVERs by pods that have a lease, and NAKs
	acked        map[netip.Addr]time.Time // when the server last granted an address
	began, ended time.Time
	cpu          time.Duration // when it began; then, what it took
	figures      map[string]float64
}

func (r *renewals) watch() error {
	if err := r.read(); err != nil {
		return err
	}
	r.count, r.asked = 0, 0
	limit, said := time.Now().Add(renewalsIn), time.Now()
	for ; r.ended.IsZero(); time.Sleep(100 * time.Millisecond) {
		if err := r.look(); err != nil {
			return err
		}
		if time.Now().After(limit) {
			return fmt.Errorf("%s: %d renewals of %d leases in %s", r.node.name, r.count, len(r.pods), renewalsIn)
		}
		progress(&said, "leases: %s has renewed %d", r.node.name, r.count)
	}
	return nil
}

// look counts, and takes the figures when there are enough.
func (r *renewals) look() error {
	if err := r.read(); err != nil {
		return err
	}
	cpu, err := r.node.lan.keeper.cpu()
	switch {
	case err != nil:
		return err
	case r.began.IsZero() && r.count > 0: // what came before it is nothing of these renewals
		r.began, r.cpu, r.count = time.Now(), cpu, 0
	case !r.began.IsZero() && float64(r.count) >= renewalsEach*float64(len(r.pods)):
		r.cpu, r.ended = cpu-r.cpu, time.Now()
		return r.measure()
	}
	return nil
}

// read counts what came to the log, in whole lines.
func (r *renewals) read() error {
	log, err := os.Open(r.node.lan.log)
	if err != nil {
		return err
	}
	defer log.Close()
	if _, err := log.Seek(r.offset, io.SeekStart); err != nil {
		return err
	}
	text, err := io.ReadAll(log)
	if err != nil {
		return err
	}
	text = text[:bytes.LastIndexByte(text, '\n')+1]
	r.offset += int64(len(text))
	for line := range bytes.Lines(text) {
		// Of "… DHCPACK(eth0) 10.88.1.7 0a:58:…" and the like.
		if _, granted, ok := bytes.Cut(line, []byte(" DHCPACK(")); ok {
			if f := bytes.Fields(granted); len(f) > 1 {
				address, _ := netip.ParseAddr(string(f[1]))
				r.acked[address] = time.Now()
				r.count++
			}
		}
		if bytes.Contains(line, []byte(" DHCPDISCOVER(")) || bytes.Contains(line, []byte(" DHCPNAK(")) {
			r.asked++
		}
	}
	return nil
}

// measure takes what the keeper has and holds.
func (r *renewals) measure() error {
	keeper := r.node.lan.keeper
	kib, err := keeper.status("VmRSS")
	if err != nil {
		return err
	}
	threads, err := keeper.status("Threads")
	if err != nil {
		return err
	}
	open, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", keeper.cmd.Process.Pid))
	r.figures = map[string]float64{"memory-MiB": float64(kib) / 1024, "threads": float64(threads), "descriptors": float64(len(open)),
		"leases": float64(len(r.pods)), "ns/op": float64(r.cpu) / float64(r.count)}
	return err
}

// report proves that every pod has its lease still: one that had lost its own would have
// asked for another, as a server says that does not renew one (DHCPNAK).
func (r *renewals) report(b *testing.B) error {
	if r.asked > 0 {
		return fmt.Errorf("pods that had a lease asked for a new one, or were refused theirs: %d DISCOVERs and NAKs", r.asked)
	}
	for _, p := range r.pods {
		if address, err := leaseOf(p); err != nil || r.acked[address].IsZero() {
			return fmt.Errorf("the server has granted nothing to pod %d, with %s: %w", p.number, address, err)
		}
	}
	err := r.node.ping(r.pods[len(r.pods)-1])
	for what, value := range r.figures {
		b.ReportMetric(value, what)
	}
	return err
}
