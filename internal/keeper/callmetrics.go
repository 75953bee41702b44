package keeper

import (
	"context"
	"strconv"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// Pool is how far a range set of a network is used up.
type Pool struct {
	Network, Name  string
	IPv6           bool
	Size, Reserved uint64 // addresses
}

// readWithin bounds what is read for an answer of the metrics.
const readWithin = 5 * time.Second

// collectCalls tells what the plugin has left on disk: which calls failed, and how far pools
// are used up. It is read when it is asked for, and what cannot be read is counted.
func (m *metrics) collectCalls(to sink) {
	if m.failures != nil {
		list, err := m.failures()
		if err != nil {
			m.count(&m.readErrors)
		}
		for _, f := range list {
			to.counterWith("tombolo_failures_total", "Calls of the plugin that failed, by verb and error code, since the state directory was made.", f.Count,
				prometheus.Labels{"verb": strings.ToValidUTF8(f.Verb, "\uFFFD"), "code": strconv.FormatUint(uint64(f.Code), 10)})
		}
	}
	if m.pools != nil {
		ctx, cancel := context.WithTimeout(context.Background(), readWithin)
		defer cancel()
		list, err := m.pools(ctx)
		if err != nil {
			m.count(&m.readErrors)
		}
		for _, p := range list {
			family := "ipv4"
			if p.IPv6 {
				family = "ipv6"
			}
			labels := prometheus.Labels{"network": p.Network, "range": p.Name, "family": family}
			to.gauge("tombolo_pool_addresses", "Addresses that a network can give its pods.", float64(p.Size), labels)
			to.gauge("tombolo_pool_reserved_addresses", "Those of them that are reserved.", float64(p.Reserved), labels)
		}
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	to.counter("tombolo_read_errors_total", "Times that failures or pools could not be read for these metrics.", m.readErrors)
}
