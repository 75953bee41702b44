package keeper

import (
	"context"
	"encoding/json"
	"net/http"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promauto"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/lease"
	"github.com/tombolo-cni/tombolo/internal/link"
	"github.com/tombolo-cni/tombolo/internal/nl"
	"github.com/tombolo-cni/tombolo/internal/state"
)

// metrics are the counters that the loop and the workers update, and the HTTP handler reads. They have a separate
// registry, since other packages may register metrics in Prometheus' global one.
type metrics struct {
	*Config
	registry *prometheus.Registry

	next atomic.Pointer[time.Time] // the time of the next visit to a lease; zero if none
	turn atomic.Pointer[time.Time] // the time of the loop's last heartbeat

	leases                           *prometheus.GaugeVec
	renewals, acquisitions, releases prometheus.Counter
	naks, expired, unanswered        prometheus.Counter
	damaged, rescans, moves          prometheus.Counter

	firewallContested, firewallObstacles           prometheus.Gauge
	firewallLooks, firewallMends, firewallContests prometheus.Counter

	linksContested                     prometheus.Gauge
	linkLooks, driftFound, driftMended prometheus.Counter

	deadLooks, reclaims prometheus.Counter

	errors *prometheus.CounterVec // by kind: "lease", "read", or the kind of a source
}

func newMetrics(cfg *Config) *metrics {
	m := &metrics{Config: cfg, registry: prometheus.NewRegistry()}
	register := promauto.With(m.registry)
	counter := func(name, help string) prometheus.Counter {
		return register.NewCounter(prometheus.CounterOpts{Name: name, Help: help})
	}
	gauge := func(name, help string) prometheus.Gauge {
		return register.NewGauge(prometheus.GaugeOpts{Name: name, Help: help})
	}

	m.leases = register.NewGaugeVec(prometheus.GaugeOpts{Name: "tombolo_leases", Help: "Leases by state."},
		[]string{"state"})
	for _, s := range []lease.State{lease.Adding, lease.Bound, lease.Expired, lease.Sticky} {
		m.leases.WithLabelValues(string(s)) // so that the metric exists with value 0
	}

	register.NewGaugeFunc(prometheus.GaugeOpts{Name: "tombolo_lease_next_seconds",
		Help: "Seconds until the next lease is due; 0 if one is due now, or there is none."}, m.untilNext)
	m.renewals = counter("tombolo_lease_renewals_total", "Leases that a server renewed.")
	m.acquisitions = counter("tombolo_lease_acquisitions_total", "Leases that a server gave after one was lost.")
	m.releases = counter("tombolo_lease_releases_total", "Leases released because their pod was gone.")
	m.moves = counter("tombolo_lease_moves_total", "Times that an attachment got another address with its lease.")
	m.naks = counter("tombolo_lease_naks_total", "Leases that a server refused (NAK).")
	m.expired = counter("tombolo_lease_expired_total", "Leases that ran out.")
	m.unanswered = counter("tombolo_lease_unanswered_total", "Exchanges with DHCP servers without an answer in time.")
	m.damaged = counter("tombolo_lease_damaged_total", "Lease records that could not be read.")
	m.rescans = counter("tombolo_lease_rescans_total", "Times that changes were missed and all records read.")
	m.firewallContested = gauge("tombolo_firewall_contested",
		"1 if another program undoes repairs of the firewall again and again; STATUS names it.")
	m.firewallObstacles = gauge("tombolo_firewall_obstacles",
		"Other programs' firewall chains that stop pods; STATUS names them.")
	m.firewallLooks = counter("tombolo_firewall_looks_total",
		"Checks of the firewall, after changes and at intervals.")
	m.firewallMends = counter("tombolo_firewall_mends_total",
		"Repairs of the firewall after another program had changed it.")
	m.firewallContests = counter("tombolo_firewall_contests_total",
		"Times that another program began to undo the firewall's repairs again and again.")
	m.deadLooks = counter("tombolo_dead_looks_total", "Searches for pods that died without a DEL.")
	m.reclaims = counter("tombolo_dead_reclaimed_total", "Attachments deleted as their pods died without a DEL.")
	m.linksContested = gauge("tombolo_links_contested",
		"1 if another program changes again and again links, addresses or routes that pods need; the log says which.")
	m.linkLooks = counter("tombolo_links_looks_total",
		"Checks of links, addresses and routes, after changes and at intervals.")
	m.driftFound = counter("tombolo_drift_found_total",
		"Differences of links, addresses and routes from the setup that were found.")
	m.driftMended = counter("tombolo_drift_mended_total", "Links, addresses and routes that were repaired.")
	m.errors = register.NewCounterVec(prometheus.CounterOpts{Name: "tombolo_errors_total",
		Help: "Errors by kind; the log has their texts."}, []string{"kind"})
	for _, kind := range []string{"dead", "firewall", "firewalld", "lease", "links", "read"} {
		m.errors.WithLabelValues(kind) // so that the metric exists with value 0
	}

	m.registry.MustRegister(collector(m.collectCalls), collector(m.collectPods))
	return m
}

// collector is a prometheus.Collector that computes its values when metrics are requested. The labels of the values are
// not known beforehand.
type collector func(chan<- prometheus.Metric)

// Describe sends no descriptions, since they would have to contain the labels.
func (c collector) Describe(chan<- *prometheus.Desc) {}

// Collect computes the present values and sends them.
func (c collector) Collect(to chan<- prometheus.Metric) { c(to) }

// countTransition updates the metric of the leases in each state, after a lease's change of state. The empty state
// means that there is no lease.
func (m *metrics) countTransition(from, to lease.State) {
	if from != "" {
		m.leases.WithLabelValues(string(from)).Dec()
	}
	if to != "" {
		m.leases.WithLabelValues(string(to)).Inc()
	}
}

func (m *metrics) untilNext() float64 {
	next := m.next.Load()
	if next == nil || next.IsZero() {
		return 0
	}
	return max(next.Sub(now()), 0).Round(time.Millisecond).Seconds()
}

// collectCalls exports values from the plugin's records: the number of failed calls, and the use of address pools.
func (m *metrics) collectCalls(to chan<- prometheus.Metric) {
	if m.State != nil {
		list, err := m.State.Failures()
		m.read(err)
		for _, f := range list {
			export(to, "tombolo_failures_total",
				"Calls of the plugin that failed, by verb and error code, since the state directory was made.",
				prometheus.CounterValue, float64(f.Count),
				prometheus.Labels{"verb": f.Verb, "code": strconv.FormatUint(uint64(f.Code), 10)})
		}
	}

	if m.Node == nil {
		return
	}

	list, err := m.Node.Pools(context.Background())
	m.read(err)
	for _, p := range list {
		family := "ipv4"
		if p.IPv6 {
			family = "ipv6"
		}
		labels := prometheus.Labels{"network": p.Network, "range": p.Name, "family": family}
		export(to, "tombolo_pool_addresses", "Addresses in a network's pool.", prometheus.GaugeValue,
			float64(p.Size), labels)
		export(to, "tombolo_pool_reserved_addresses", "Reserved addresses in a network's pool.", prometheus.GaugeValue,
			float64(p.Reserved), labels)
	}
}

// collectPods exports the bytes and packets that each pod received and transmitted. The counters come from the host's
// end of the pod's link, which receives the packets that the pod transmits. The container is a label too, because two
// containers of one pod exist while one replaces the other.
func (m *metrics) collectPods(to chan<- prometheus.Metric) {
	if m.State == nil {
		return
	}

	// Among the host's veth interfaces are the host's ends of the pods' links.
	conn, err := nl.Dial(unix.NETLINK_ROUTE, nil)
	if err != nil {
		m.read(err)
		return
	}
	defer conn.Close()
	counters := map[string]link.Counters{}
	m.read(link.Count(conn, "veth", func(l *link.Info) { counters[l.Name] = l.Counters }))
	networks, err := m.State.Networks()
	m.read(err)
	for _, name := range networks {
		records, _, err := m.State.List(name)
		m.read(err)
		for _, r := range records {
			if c, is := counters[r.HostIf]; is {
				exportPod(to, r, &c)
			}
		}
	}
}

// exportPod exports the counters of one attachment.
func exportPod(to chan<- prometheus.Metric, r *state.Attachment, c *link.Counters) {
	namespace, pod, is := strings.Cut(r.Pod, "/")
	if !is {
		namespace, pod = "", r.Pod
	}

	labels := prometheus.Labels{"namespace": namespace, "pod": pod, "container": r.ContainerID, "network": r.Network,
		"interface": r.IfName}
	count := func(name, help string, value uint64) {
		export(to, name, help, prometheus.CounterValue, float64(value), labels)
	}
	count("tombolo_pod_receive_bytes_total", "Bytes that a pod has received at an interface.", c.TxBytes)
	count("tombolo_pod_receive_packets_total", "Packets that a pod has received at an interface.", c.TxPackets)
	count("tombolo_pod_transmit_bytes_total", "Bytes that a pod has transmitted at an interface.", c.RxBytes)
	count("tombolo_pod_transmit_packets_total", "Packets that a pod has transmitted at an interface.", c.RxPackets)
}

// read counts err, an error in reading values for the metrics. If err is nil, it does nothing.
func (m *metrics) read(err error) {
	if err != nil {
		m.errors.WithLabelValues("read").Inc()
	}
}

// export exports one value. If a label is not valid text, it exports nothing.
func export(to chan<- prometheus.Metric, name, help string, kind prometheus.ValueType, value float64,
	labels prometheus.Labels) {
	if one, err := prometheus.NewConstMetric(prometheus.NewDesc(name, help, nil, labels), kind, value); err == nil {
		to <- one
	}
}

// Handler returns an HTTP handler for the paths /metrics and /healthz. The first has Prometheus' formats. The second
// returns one line of JSON, with status 200 while the keeper's loop runs, and 503 if its last heartbeat is older than
// lease.Silence.
func (k *Keeper) Handler() http.Handler {
	mux := http.NewServeMux()
	mux.Handle("GET /metrics", promhttp.HandlerFor(k.metrics.registry,
		promhttp.HandlerOpts{ErrorHandling: promhttp.ContinueOnError, DisableCompression: true}))
	mux.HandleFunc("GET /healthz", func(w http.ResponseWriter, _ *http.Request) {
		// The loop counts as stuck before its first heartbeat too.
		var since time.Duration
		turn := k.metrics.turn.Load()
		if turn != nil {
			since = time.Since(*turn)
		}

		ok := turn != nil && since < lease.Silence
		w.Header().Set("Content-Type", "application/json")
		if !ok {
			w.WriteHeader(http.StatusServiceUnavailable)
		}
		_ = json.NewEncoder(w).Encode(map[string]any{"healthy": ok, "silentSeconds": since.Seconds()})
	})

	return mux
}
