package leases

import (
	"bytes"
	"encoding/json"
	"errors"
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
	var b bytes.Buffer
	must.Succeed(t, Table(&b, listed(t), at(10*time.Second)))
	golden.Compare(t, "table.txt", b.Bytes())
}

func TestLeasesAreListedForPrograms(t *testing.T) {
	t.Parallel()
	var b bytes.Buffer
	must.Succeed(t, JSON(&b, listed(t), at(10*time.Second)))
	golden.Compare(t, "list.json", b.Bytes())
	var back []Entry
	err := json.Unmarshal(b.Bytes(), &back)
	expect.That(t, err == nil && len(back) == 6, "read back: %d, %v", len(back), err)
	b.Reset()
	if err := JSON(&b, nil, at(0)); err != nil || b.String() != "[]\n" {
		t.Errorf("of none: %q, %v", b.String(), err)
	}
}

type fullDisk struct{}

var errFull = errors.New("no space left")

func (fullDisk) Write([]byte) (int, error) { return 0, errFull }

func TestAListThatCannotBeWrittenIsAnError(t *testing.T) {
	t.Parallel()
	for name, write := range map[string]func() error{
		"table": func() error { return Table(fullDisk{}, listed(t), at(0)) },
		"JSON":  func() error { return JSON(fullDisk{}, listed(t), at(0)) },
	} {
		expect.Is(t, write(), errFull, "%s", name)
	}
}

func TestTroublesAreBelowTheTable(t *testing.T) {
	t.Parallel()
	r := sample(t)
	r.Six, r.IfName, r.Pod, r.ContainerID, r.Error = nil, "eth0", "", "(host)", "no server renews the lease"
	var b bytes.Buffer
	must.Succeed(t, Table(&b, []*lease.Record{r}, at(0)))
	if got := b.String(); !strings.Contains(got, "bound") || !strings.HasSuffix(got, "\n(host) eth0: no server renews the lease\n") {
		t.Errorf("listed as\n%s", got)
	}
}
