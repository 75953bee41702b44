package uplink_test

import (
	"encoding/json"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
	"github.com/tombolo-cni/tombolo/network/internal/uplink"
)

func TestRecordSurvivesItsJournal(t *testing.T) {
	t.Parallel()
	for name, s := range recorded(t) {
		want := recordOf(uplink.Taking, s)
		b := must.Of(json.Marshal(want)).Get(t)
		got := must.Of(uplink.ParseRecord(b)).Get(t, "%s", name)
		if diff := cmp.Diff(string(b), string(must.Of(json.Marshal(got)).Get(t))); diff != "" {
			t.Errorf("%s (-want +got):\n%s", name, diff)
		}
	}
}

func TestRubbishIsNoRecord(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct{ name, text, want string }{
		{"nothing", "", "unexpected end"},
		{"no JSON", "eth0", "invalid character"},
		{"another version", `{"version":2,"NIC":"eth0","Bridge":"br0","state":"taken"}`, "version 2, where this program knows 1"},
		{"no NIC", `{"version":1,"Bridge":"br0","state":"taken"}`, `NIC ""`},
		{"one link for both", `{"version":1,"NIC":"br0","Bridge":"br0","state":"taken"}`, `NIC "br0"`},
		{"no state", `{"version":1,"NIC":"eth0","Bridge":"br0"}`, `state ""`},
		{"an unknown state", `{"version":1,"NIC":"eth0","Bridge":"br0","state":"gone"}`, `state "gone"`},
		{"a path for a name", `{"version":1,"NIC":"../all","Bridge":"br0","state":"taken"}`, `"../all"`},
	} {
		_, err := uplink.ParseRecord([]byte(tt.text))
		expect.That(t, err != nil && strings.Contains(err.Error(), tt.want), "%s: %v, want %s", tt.name, err, tt.want)
	}
}

// What a record says is planned with, whatever it is.
func FuzzParseRecord(f *testing.F) {
	f.Fuzz(func(t *testing.T, b []byte) {
		rec, err := uplink.ParseRecord(b)
		if err != nil {
			return
		}
		again := must.Of(json.Marshal(rec)).Get(t)
		_, err = uplink.ParseRecord(again)
		must.That(t, err == nil, "it does not survive: %v\n%s", err, again)
		_ = uplink.PlanRestore(&rec.Before, rec)
		now := rec.Before
		now.Addresses, now.Routes = nil, nil
		_ = uplink.PlanRestore(&now, rec)
		_, _ = uplink.PlanOf(&rec.Before, rec.Uplink)
	})
}

func TestRecordCorpus(t *testing.T) {
	if !*record {
		t.Skip("records only with -record")
	}
	for name, s := range recorded(t) {
		b, err := json.Marshal(recordOf(uplink.Taken, s))
		must.Succeed(t, err)
		nstest.SaveCorpus(t, "FuzzParseRecord", name, b)
	}
}

func recordOf(state uplink.State, before *uplink.Snapshot) *uplink.Record {
	rec := &uplink.Record{Uplink: toBridge(), State: state}
	rec.Version, rec.Before = 1, *before
	return rec
}
