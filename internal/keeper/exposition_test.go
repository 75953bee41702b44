package keeper

import (
	"context"
	"fmt"
	"math"
	"net/http"
	"net/http/httptest"
	"os"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/tombolo-cni/tombolo/bridge/uplink"
	"github.com/tombolo-cni/tombolo/internal/lease"
	"github.com/tombolo-cni/tombolo/internal/state"
)

// TestMetricsAreThoseThatTheyWere holds names, types, help and values to what tombolod wrote
// before it had Prometheus' library, which sorts by name.
func TestMetricsAreThoseThatTheyWere(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		was, err := os.ReadFile("testdata/metrics.golden")
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(samples(t, string(was)), samples(t, exposition(t, known()))); diff != "" {
			t.Errorf("metrics (-before +now):\n%s", diff)
		}
	})
}

// exposition is what Handler serves of m.
func exposition(t *testing.T, m *metrics) string {
	t.Helper()
	w := httptest.NewRecorder()
	m.handler().ServeHTTP(w, httptest.NewRequest(http.MethodGet, "/metrics", nil))
	if got := w.Header().Get("Content-Type"); !strings.HasPrefix(got, "text/plain; version=0.0.4; charset=utf-8") {
		t.Errorf("Content-Type %q", got)
	}
	return w.Body.String()
}

// samples gives all values of a text, by name and sorted labels, with types and help,
// whatever their order.
func samples(t *testing.T, text string) map[string]string {
	t.Helper()
	all := map[string]string{}
	label := regexp.MustCompile(`\w+="(?:[^"\\]|\\.)*"`)
	for line := range strings.Lines(text) {
		line = strings.TrimSpace(line)
		if strings.HasPrefix(line, "# ") {
			f := strings.SplitN(line, " ", 4)
			all[f[1]+" "+f[2]] = f[3]
			continue
		}
		at := strings.LastIndex(line, " ")
		name, _, _ := strings.Cut(line[:at], "{")
		value, err := strconv.ParseFloat(line[at+1:], 64)
		if err != nil {
			t.Errorf("line %q: %v", line, err)
		}
		all[fmt.Sprint(name, slices.Sorted(slices.Values(label.FindAllString(line, -1))))] = fmt.Sprint(value)
	}
	return all
}

// known has a value of its own in each field.
func known() *metrics {
	return &metrics{
		states: map[lease.State]int{lease.Adding: 1, lease.Bound: 200, lease.Expired: 3, lease.Sticky: 4},
		hosts: map[string]hostLease{
			"1": {nic: "eth0", bridge: "br0", expire: now().Add(3540400 * time.Millisecond)},
			"2": {nic: "eth1", bridge: `b"r\1`, trouble: true},
			"3": {nic: "eth2", bridge: "br2", expire: now().Add(-time.Minute), trouble: true},
		},
		next:     now().Add(290123456 * time.Microsecond),
		renewals: 11, acquisitions: 12, releases: 13, naks: 14, expired: 15, unanswered: 16, errors: 17, damaged: 18, rescans: 19, moves: 20,
		uplinks: map[uplink.State]int{uplink.Taken: 2, uplink.Restoring: 1}, uplinkMends: 21, uplinksFinished: 22, uplinkErrors: 23,
		firewallContested: true, firewallObstacles: 24, firewallLooks: 25, firewallMends: 26, firewallContests: 27, firewallErrors: 28000000,
		looks: 29, reclaims: 30,
		linksContested: true, linkLooks: 31, linkErrors: 32, driftFound: 33, driftMended: 34,
		failures: func() ([]state.Failures, error) {
			return []state.Failures{{Verb: "ADD", Code: 100, Count: 35}, {Verb: "DEL", Code: 11, Count: 36}}, os.ErrInvalid
		},
		pools: func(context.Context) ([]Pool, error) {
			return []Pool{
				{Network: "pods", Name: "10.22.0.0/16", Size: 65533, Reserved: 37},
				{Network: "pods", Name: "fd22::/64", IPv6: true, Size: math.MaxUint64, Reserved: 38},
			}, os.ErrInvalid
		},
		readErrors: 39, // and two more
	}
}
