package leases

import (
	"encoding/json"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/tombolo-cni/tombolo/internal/lease"
	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/golden"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
)

func at(d time.Duration) time.Time { return time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC).Add(d) }

// sample is a record with every field set.
func sample(t *testing.T) *lease.Record {
	t.Helper()
	r := new(lease.Record)
	must.Succeed(t, json.Unmarshal(must.Of(os.ReadFile("../../../../internal/lease/testdata/record.json")).Get(t), r))
	return r
}

func listed(t *testing.T) []*lease.Record {
	soon, forever, ended, adding := sample(t), sample(t), sample(t), sample(t)
	soon.IfName, forever.IfName, ended.IfName, adding.IfName = "eth1", "eth2", "eth3", "eth4"
	forever.Lease.Renew, forever.Lease.Rebind, forever.Lease.Expire = time.Time{}, time.Time{}, time.Time{}
	ended.State, ended.Lease.Expire = lease.Expired, at(-time.Minute)
	soon.Lease.Expire = at(42 * time.Second)
	adding.State, adding.Lease, adding.Pod = lease.Adding, nil, ""
	hours := sample(t)
	hours.Lease.Expire = at(25*time.Hour + time.Minute)
	for _, r := range []*lease.Record{soon, forever, ended, adding} {
		r.Six = nil
	}
	hours.Six.Lease, hours.Six.Error = nil, ""
	both := sample(t)
	both.Six.Stateless, both.Six.Information = false, nil
	return []*lease.Record{both, hours, soon, forever, ended, adding}
}

func TestLeasesAreListedForPeople(t *testing.T) {
	t.Parallel()
	golden.Compare(t, "table.txt", Table(listed(t), at(10*time.Second)))
}

func TestLeasesAreListedForPrograms(t *testing.T) {
	t.Parallel()
	data := must.Of(json.Marshal(List(listed(t), at(10*time.Second)))).Get(t)
	golden.Compare(t, "list.json", string(data)+"\n")
	var back []Entry
	err := json.Unmarshal(data, &back)
	expect.That(t, err == nil && len(back) == 6, "read back: %d, %v", len(back), err)
}

func TestTroublesAreBelowTheTable(t *testing.T) {
	t.Parallel()
	r := sample(t)
	r.Six, r.IfName, r.Pod, r.ContainerID, r.Error, r.Note = nil, "eth0", "", "(host)", "no server renews the lease", ""
	got := Table([]*lease.Record{r}, at(0))
	expect.That(t, strings.Contains(got, "bound") &&
		strings.HasSuffix(got, "\n(host) eth0: no server renews the lease\n"), "listed as\n%s", got)
}
