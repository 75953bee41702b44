package lease

import (
	"bytes"
	"encoding/json"
	"errors"
	"testing"
	"time"

	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/golden"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
)

func listed() []*Record {
	soon, forever, ended, adding := sample(), sample(), sample(), sample()
	soon.IfName, forever.IfName, ended.IfName, adding.IfName = "eth1", "eth2", "eth3", "eth4"
	forever.Lease.Renew, forever.Lease.Rebind, forever.Lease.Expire = time.Time{}, time.Time{}, time.Time{}
	ended.State, ended.Lease.Expire = Expired, at(-time.Minute)
	soon.Lease.Expire = at(42 * time.Second)
	adding.State, adding.Lease, adding.Pod = Adding, nil, ""
	hours := sample()
	hours.Lease.Expire = at(25*time.Hour + time.Minute)
	for _, r := range []*Record{soon, forever, ended, adding} {
		r.Six = nil
	}
	hours.Six.Lease, hours.Six.Error = nil, ""
	both := sample()
	both.Six.Stateless, both.Six.Information = false, nil
	return []*Record{both, hours, soon, forever, ended, adding}
}

func TestLeasesAreListedForPeople(t *testing.T) {
	t.Parallel()
	var b bytes.Buffer
	must.Succeed(t, WriteTable(&b, listed(), at(10*time.Second)))
	golden.Compare(t, "table.txt", b.Bytes())
}

func TestLeasesAreListedForPrograms(t *testing.T) {
	t.Parallel()
	var b bytes.Buffer
	must.Succeed(t, WriteJSON(&b, listed(), at(10*time.Second)))
	golden.Compare(t, "list.json", b.Bytes())
	var back []Entry
	err := json.Unmarshal(b.Bytes(), &back)
	expect.That(t, err == nil && len(back) == 6, "read back: %d, %v", len(back), err)
	b.Reset()
	if err := WriteJSON(&b, nil, at(0)); err != nil || b.String() != "[]\n" {
		t.Errorf("of none: %q, %v", b.String(), err)
	}
}

type fullDisk struct{}

var errFull = errors.New("no space left")

func (fullDisk) Write([]byte) (int, error) { return 0, errFull }

func TestAListThatCannotBeWrittenIsAnError(t *testing.T) {
	t.Parallel()
	for name, write := range map[string]func() error{
		"table": func() error { return WriteTable(fullDisk{}, listed(), at(0)) },
		"JSON":  func() error { return WriteJSON(fullDisk{}, listed(), at(0)) },
	} {
		expect.Is(t, write(), errFull, "%s", name)
	}
}
