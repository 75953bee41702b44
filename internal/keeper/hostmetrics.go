package keeper

import (
	"math"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/tombolo-cni/tombolo/internal/lease"
)

// hostLease is what the metrics have about a lease of the host's own.
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

// collectHosts is part of Collect.
func (m *metrics) collectHosts(to sink) {
	for _, h := range m.hosts {
		left := math.Inf(1)
		if !h.expire.IsZero() {
			left = max(h.expire.Sub(now()), 0).Round(time.Second).Seconds()
		}
		// The kernel takes any bytes for a link's name.
		labels := prometheus.Labels{"nic": strings.ToValidUTF8(h.nic, "\uFFFD"), "bridge": strings.ToValidUTF8(h.bridge, "\uFFFD")}
		to.gauge("tombolo_host_lease_seconds", "Time until the host's own lease ends, and with it the host's address.", left, labels)
		to.gauge("tombolo_host_lease_trouble", "1 if the host's own lease is not being renewed; `tombolo leases` says why.", truth(h.trouble), labels)
	}
}
