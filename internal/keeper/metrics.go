package keeper

import (
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync"
	"time"

	"github.com/tombolo-cni/tombolo/bridge/uplink"
	"github.com/tombolo-cni/tombolo/internal/lease"
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

	firewallContested                                              bool
	firewallObstacles                                              int
	firewallLooks, firewallMends, firewallContests, firewallErrors uint64
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

// counter is one that goes up alone.
type counter struct {
	name, help string
	value      uint64
}

func writeCounters(b *strings.Builder, list []counter) {
	for _, c := range list {
		fmt.Fprintf(b, "# HELP %s %s\n# TYPE %s counter\n%s %d\n", c.name, c.help, c.name, c.name, c.value)
	}
}

// write writes Prometheus' text format. It is written here, and not by Prometheus'
// library, since that would be a third of the keeper.
func (m *metrics) write(w io.Writer) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	var b strings.Builder
	b.WriteString("# HELP tombolo_leases Leases by state.\n# TYPE tombolo_leases gauge\n")
	for _, s := range []lease.State{lease.Adding, lease.Bound, lease.Expired, lease.Sticky, lease.Adopting} {
		fmt.Fprintf(&b, "tombolo_leases{state=%q} %d\n", s, m.states[s])
	}
	b.WriteString("# HELP tombolo_lease_next_seconds Time until a lease is due; 0 if one is, or there is none.\n# TYPE tombolo_lease_next_seconds gauge\n")
	var next time.Duration
	if !m.next.IsZero() {
		next = max(m.next.Sub(now()), 0)
	}
	fmt.Fprintf(&b, "tombolo_lease_next_seconds %.3f\n", next.Seconds())
	writeCounters(&b, []counter{
		{"tombolo_lease_renewals_total", "Leases that a server renewed.", m.renewals},
		{"tombolo_lease_acquisitions_total", "Leases got after one was lost.", m.acquisitions},
		{"tombolo_lease_releases_total", "Leases released because their pod was gone.", m.releases},
		{"tombolo_lease_moves_total", "Attachments that followed their leases to other addresses.", m.moves},
		{"tombolo_lease_naks_total", "Leases that a server refused.", m.naks},
		{"tombolo_lease_expired_total", "Leases that ran out.", m.expired},
		{"tombolo_lease_unanswered_total", "Exchanges that no server answered in time.", m.unanswered},
		{"tombolo_lease_errors_total", "Things that went wrong; the log says what.", m.errors},
		{"tombolo_lease_damaged_total", "Records that could not be read and were set aside.", m.damaged},
		{"tombolo_lease_rescans_total", "Times that changes were lost and all records read anew.", m.rescans},
	})
	m.writeHosts(&b)
	m.writeUplinks(&b)
	m.writeFirewall(&b)
	_, err := io.WriteString(w, b.String())
	return err
}

// Handler serves /metrics, in Prometheus' text format, and /healthz: 200 while the
// keeper's loop turns, else 503, with a line of JSON.
func (k *Keeper) Handler() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /metrics", func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
		_ = k.metrics.write(w) // the caller has gone
	})
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
