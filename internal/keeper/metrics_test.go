package keeper

import (
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/tombolo-cni/tombolo/internal/lease"
	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/golden"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
)

func get(t *testing.T, k *Keeper, path string) (int, string) {
	t.Helper()
	w := httptest.NewRecorder()
	k.Handler().ServeHTTP(w, httptest.NewRequest(http.MethodGet, path, nil))
	return w.Code, w.Body.String()
}

func TestMetricsTellHowLeasesFare(t *testing.T) {
	in(t, func(t *testing.T, w *world) {
		for i := range 3 {
			w.add(w.record(i + 1))
		}
		adding := w.record(9)
		adding.State, adding.Lease, adding.Applied = lease.Adding, nil, lease.Applied{}
		w.add(adding)
		w.start()
		w.later(10 * time.Second)
		_, body := get(t, w.keep, "/metrics")
		for _, line := range []string{
			`tombolo_leases{state="adding"} 1`, `tombolo_leases{state="bound"} 3`, `tombolo_leases{state="expired"} 0`,
			"tombolo_lease_renewals_total 0", "tombolo_lease_next_seconds 290", "# TYPE tombolo_lease_naks_total counter",
		} {
			expect.That(t, strings.Contains(body, line+"\n"), "no line %q in\n%s", line, body)
		}
		w.later(35 * time.Minute)
		if _, body = get(t, w.keep, "/metrics"); !strings.Contains(body, "tombolo_lease_renewals_total 3\n") {
			t.Errorf("after three renewals:\n%s", body)
		}
		checkExposition(t, body)
	})
}

// checkExposition holds a text to the format: each sample after a HELP and a TYPE of
// its name.
func checkExposition(t *testing.T, body string) {
	t.Helper()
	helped, typed := map[string]bool{}, map[string]bool{}
	for line := range strings.Lines(body) {
		f := strings.Fields(line)
		switch {
		case strings.HasPrefix(line, "# HELP "):
			helped[f[2]] = len(f) > 3
		case strings.HasPrefix(line, "# TYPE "):
			typed[f[2]] = f[3] == "gauge" || f[3] == "counter"
		default:
			name, _, _ := strings.Cut(f[0], "{")
			if len(f) != 2 || !helped[name] || !typed[name] {
				t.Errorf("line %q", line)
			}
		}
	}
}

// Dashboards and alerts go by names, types and help.
func TestMetricsAreThoseThatTheyWere(t *testing.T) {
	in(t, func(t *testing.T, w *world) {
		w.start()
		_, body := get(t, w.keep, "/metrics")
		lines := slices.DeleteFunc(strings.SplitAfter(body, "\n"), func(line string) bool { return !strings.HasPrefix(line, "#") })
		slices.Sort(lines)
		golden.Compare(t, "metrics.golden", []byte(strings.Join(lines, "")))
	})
}

func TestHealthIsThatTheLoopTurns(t *testing.T) {
	in(t, func(t *testing.T, w *world) {
		w.start()
		for range 3 {
			w.later(time.Minute)
			if code, body := get(t, w.keep, "/healthz"); code != http.StatusOK || !strings.Contains(body, `"healthy":true`) {
				t.Errorf("while it runs: %d %s", code, body)
			}
		}
		w.stop()
		w.later(lease.Silence)
		if code, body := get(t, w.keep, "/healthz"); code != http.StatusServiceUnavailable || !strings.Contains(body, `"healthy":false`) {
			t.Errorf("after its end: %d %s", code, body)
		}
	})
	k := must.Of(New(&Config{Leases: newWorld(t).dir})).Get(t)
	if code, _ := get(t, k, "/healthz"); code != http.StatusServiceUnavailable {
		t.Errorf("before it began: %d", code)
	}
	if code, _ := get(t, k, "/other"); code != http.StatusNotFound {
		t.Errorf("another path: %d", code)
	}
}

func TestTheLoopEndsWhenItsHeartbeatDoes(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t)
		k := must.Of(New(&Config{Leases: w.dir})).Get(t)
		k.node = w
		beats := 0
		err := k.newLoop(t.Context()).run(w.changes, func() error {
			if beats++; beats > 3 {
				return io.ErrUnexpectedEOF
			}
			return nil
		})
		expect.That(t, errors.Is(err, io.ErrUnexpectedEOF), "ended with %v", err)
		close(w.changes)
		if err := k.newLoop(t.Context()).run(w.changes, func() error { return nil }); err == nil || !strings.Contains(err.Error(), "directory is gone") {
			t.Errorf("without its directory it ended with %v", err)
		}
	})
}

func TestAKeeperNeedsADirectory(t *testing.T) {
	t.Parallel()
	for _, cfg := range []*Config{nil, {}} {
		if _, err := New(cfg); err == nil {
			t.Error("New succeeded")
		}
	}
}

func TestThereIsOneKeeperForADirectory(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	p := must.Of(w.dir.Keep()).Get(t)
	defer p.Close()
	k := must.Of(New(&Config{Leases: w.dir})).Get(t)
	if err := k.Run(t.Context()); !errors.Is(err, lease.ErrOtherKeeper) {
		t.Errorf("Run: %v, want %v", err, lease.ErrOtherKeeper)
	}
}
