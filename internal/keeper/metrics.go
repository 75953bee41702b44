package keeper

import (
	"context"
	"encoding/json"
	"net/http"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"github.com/tombolo-cni/tombolo/bridge/uplink"
	"github.com/tombolo-cni/tombolo/internal/lease"
	"github.com/tombolo-cni/tombolo/internal/state"
)

// metrics are counted by loop and workers and read by the handler.
type metrics struct {
	mu     sync.Mutex
	states map[lease.State]int
	hosts  map[string]hostLease // by record hash
	next   time.Time            // of the next visit
	turn   time.Time            // when the loop last turned

	renewals, acquisitions, releases uint64
	naks, expired, unanswered        uint64
	errors, damaged, rescans, moves  uint64

	uplinks                                    map[uplink.State]int
	uplinkMends, uplinksFinished, uplinkErrors uint64

	linksContested                                 bool
	linkLooks, linkErrors, driftFound, driftMended uint64

	firewallContested                                              bool
	firewallObstacles                                              int
	firewallLooks, firewallMends, firewallContests, firewallErrors uint64

	looks, reclaims uint64 // for dead pods, and of them

	failures   func() ([]state.Failures, error)      // may be nil
	pools      func(context.Context) ([]Pool, error) // may be nil
	readErrors uint64
}

// count adds one to a counter of m.
func (m *metrics) count(counter *uint64) {
	m.mu.Lock()
	*counter++
	m.mu.Unlock()
}

// moved takes a lease from one state to another; the empty one is none.
func (m *metrics) moved(from, to lease.State) {
	if from == to {
		return
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.states == nil {
		m.states = map[lease.State]int{}
	}
	if from != "" {
		m.states[from]--
	}
	if to != "" {
		m.states[to]++
	}
}

func (m *metrics) due(next time.Time) {
	m.mu.Lock()
	m.next = next
	m.mu.Unlock()
}

func (m *metrics) turned() {
	m.mu.Lock()
	m.turn = time.Now()
	m.mu.Unlock()
}

// Describe gives no descriptions: which hosts' leases there are is known when asked.
func (m *metrics) Describe(chan<- *prometheus.Desc) {}

// Collect gives all that is known, as of one moment.
func (m *metrics) Collect(ch chan<- prometheus.Metric) {
	to := sink(ch)
	m.collectCalls(to)
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, s := range []lease.State{lease.Adding, lease.Bound, lease.Expired, lease.Sticky, lease.Adopting} {
		to.gauge("tombolo_leases", "Leases by state.", float64(m.states[s]), prometheus.Labels{"state": string(s)})
	}
	var next time.Duration
	if !m.next.IsZero() {
		next = max(m.next.Sub(now()), 0).Round(time.Millisecond)
	}
	to.gauge("tombolo_lease_next_seconds", "Time until a lease is due; 0 if one is, or there is none.", next.Seconds(), nil)
	to.counter("tombolo_lease_renewals_total", "Leases that a server renewed.", m.renewals)
	to.counter("tombolo_lease_acquisitions_total", "Leases got after one was lost.", m.acquisitions)
	to.counter("tombolo_lease_releases_total", "Leases released because their pod was gone.", m.releases)
	to.counter("tombolo_lease_moves_total", "Attachments that followed their leases to other addresses.", m.moves)
	to.counter("tombolo_lease_naks_total", "Leases that a server refused.", m.naks)
	to.counter("tombolo_lease_expired_total", "Leases that ran out.", m.expired)
	to.counter("tombolo_lease_unanswered_total", "Exchanges that no server answered in time.", m.unanswered)
	to.counter("tombolo_lease_errors_total", "Things that went wrong; the log says what.", m.errors)
	to.counter("tombolo_lease_damaged_total", "Records that could not be read.", m.damaged)
	to.counter("tombolo_lease_rescans_total", "Times that changes were lost and all records read anew.", m.rescans)
	m.collectHosts(to)
	m.collectUplinks(to)
	m.collectFirewall(to)
	m.collectReclaims(to)
	m.collectLinks(to)
}

// sink takes samples.
type sink chan<- prometheus.Metric

func (to sink) counter(name, help string, value uint64) {
	to.counterWith(name, help, value, nil)
}

func (to sink) counterWith(name, help string, value uint64, labels prometheus.Labels) {
	to <- prometheus.MustNewConstMetric(prometheus.NewDesc(name, help, nil, labels), prometheus.CounterValue, float64(value))
}

func (to sink) gauge(name, help string, value float64, labels prometheus.Labels) {
	to <- prometheus.MustNewConstMetric(prometheus.NewDesc(name, help, nil, labels), prometheus.GaugeValue, value)
}

// truth is 1 for true.
func truth(is bool) float64 {
	if is {
		return 1
	}
	return 0
}

// Handler serves /metrics, in Prometheus' formats, and /healthz: 200 while the
// keeper's loop turns, else 503, with a line of JSON.
func (k *Keeper) Handler() http.Handler {
	mux := http.NewServeMux()
	mux.Handle("GET /metrics", k.metrics.handler())
	mux.HandleFunc("GET /healthz", func(w http.ResponseWriter, _ *http.Request) {
		since, ok := k.metrics.healthy()
		w.Header().Set("Content-Type", "application/json")
		if !ok {
			w.WriteHeader(http.StatusServiceUnavailable)
		}
		_ = json.NewEncoder(w).Encode(map[string]any{"healthy": ok, "silentSeconds": since.Seconds()})
	})
	return mux
}

// handler has a registry of its own: what other packages register with Prometheus' global
// one is not ours to tell.
func (m *metrics) handler() http.Handler {
	registry := prometheus.NewRegistry()
	registry.MustRegister(m)
	return promhttp.HandlerFor(registry, promhttp.HandlerOpts{ErrorHandling: promhttp.ContinueOnError, DisableCompression: true})
}

// healthy says whether the loop turns.
func (m *metrics) healthy() (since time.Duration, _ bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.turn.IsZero() {
		return 0, false
	}
	since = time.Since(m.turn)
	return since, since < lease.Silence
}
