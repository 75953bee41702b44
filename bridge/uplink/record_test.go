package uplink_test

import (
	"encoding/json"
	"errors"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/tombolo-cni/tombolo/bridge/uplink"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
)

func TestRecordSurvivesItsJournal(t *testing.T) {
	t.Parallel()
	for name, s := range recorded(t) {
		want := &uplink.Record{Version: 1, Uplink: toBridge(), State: uplink.Taking, Step: uplink.StepRoutes, Before: *s}
		b, err := json.Marshal(want)
		if err != nil {
			t.Fatal(err)
		}
		got, err := uplink.ParseRecord(b)
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		if diff := cmp.Diff(want, got, cmpopts.IgnoreUnexported(uplink.Snapshot{}), cmpopts.EquateComparable(nstest.Addr("::"), nstest.Prefix("::/0")), cmpopts.EquateEmpty()); diff != "" {
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
		if _, err := uplink.ParseRecord([]byte(tt.text)); err == nil || !strings.Contains(err.Error(), tt.want) {
			t.Errorf("%s: %v, want %s", tt.name, err, tt.want)
		}
	}
	var conn uplink.Conn
	for what, err := range map[string]error{
		"restore": conn.Restore(t.Context(), &uplink.Record{}, &memory{}),
		"recover": func() error { _, err := conn.Recover(t.Context(), &uplink.Record{}, &memory{}); return err }(),
		"check":   func() error { _, _, err := conn.Check(t.Context(), &uplink.Record{}); return err }(),
		"mend":    func() error { _, err := conn.Mend(t.Context(), &uplink.Record{}, &memory{}); return err }(),
	} {
		if !errors.Is(err, uplink.ErrInvalid) {
			t.Errorf("%s of an empty record: %v, want %v", what, err, uplink.ErrInvalid)
		}
	}
}

// What a record says is planned with, whatever it is.
func FuzzParseRecord(f *testing.F) {
	f.Fuzz(func(t *testing.T, b []byte) {
		rec, err := uplink.ParseRecord(b)
		if err != nil {
			return
		}
		again, err := json.Marshal(rec)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := uplink.ParseRecord(again); err != nil {
			t.Fatalf("it does not survive: %v\n%s", err, again)
		}
		_ = uplink.PlanRestore(&rec.Before, rec).String()
		now := rec.Before
		now.Addresses, now.Routes = nil, nil
		_ = uplink.PlanRestore(&now, rec).String()
		if steps, err := uplink.Plan(&rec.Before, rec.Uplink); err == nil {
			_ = steps.String()
		}
	})
}

func TestRecordCorpus(t *testing.T) {
	if !*record {
		t.Skip("records only with -record")
	}
	for name, s := range recorded(t) {
		b, err := json.Marshal(&uplink.Record{Version: 1, Uplink: toBridge(), State: uplink.Taken, Before: *s})
		if err != nil {
			t.Fatal(err)
		}
		nstest.SaveCorpus(t, "FuzzParseRecord", name, b)
	}
}
