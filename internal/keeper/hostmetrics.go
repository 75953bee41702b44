package keeper

import (
	"cmp"
	"fmt"
	"maps"
	"math"
	"slices"
	"strings"
	"time"

	"github.com/tombolo-cni/tombolo/internal/lease"
)

// hostLease is what the metrics tell of a lease of the host's own.
type hostLease struct {
	nic, bridge string
	expire      time.Time // zero: it does not
	trouble     bool
}

// setHost takes down how a lease of the host's own fares.
func (m *metrics) setHost(r *lease.Record) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.hosts == nil {
		m.hosts = map[string]hostLease{}
	}
	m.hosts[r.Hash()] = hostLease{nic: r.Host.NIC, bridge: r.Bridge, expire: r.Expires(), trouble: r.Error != "" || r.State == lease.Expired}
}

// hostGone forgets a record, which need not be of the host's.
func (m *metrics) hostGone(hash string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	delete(m.hosts, hash)
}

// writeHosts is part of write.
func (m *metrics) writeHosts(b *strings.Builder) {
	list := slices.SortedFunc(maps.Values(m.hosts), func(x, y hostLease) int { return cmp.Compare(x.nic, y.nic) })
	b.WriteString("# HELP tombolo_host_lease_seconds Time until the host's own lease ends, and with it the host's address.\n# TYPE tombolo_host_lease_seconds gauge\n")
	for _, h := range list {
		left := math.Inf(1)
		if !h.expire.IsZero() {
			left = max(h.expire.Sub(now()), 0).Seconds()
		}
		fmt.Fprintf(b, "tombolo_host_lease_seconds{nic=%q,bridge=%q} %.0f\n", h.nic, h.bridge, left)
	}
	b.WriteString("# HELP tombolo_host_lease_trouble 1 if the host's own lease is not being renewed; `tombolo leases` says why.\n# TYPE tombolo_host_lease_trouble gauge\n")
	for _, h := range list {
		trouble := 0
		if h.trouble {
			trouble = 1
		}
		fmt.Fprintf(b, "tombolo_host_lease_trouble{nic=%q,bridge=%q} %d\n", h.nic, h.bridge, trouble)
	}
}
