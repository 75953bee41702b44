package addr

import (
	"errors"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/tombolo-cni/tombolo/internal/nl"
	"github.com/tombolo-cni/tombolo/internal/nl/nltest"
)

// FuzzAddress reads what might be an address, and if it is one, asks for it and
// reads that: nothing that can be asked for gets lost. The seeds are what kernels
// sent: see TestRecordSeeds and TestRecordMessages.
func FuzzAddress(f *testing.F) {
	for _, list := range nltest.Recordings(f) {
		for _, r := range list {
			for _, m := range r.Messages {
				f.Add(m.Data)
			}
		}
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		a, err := decode(data)
		if err != nil {
			if !errors.Is(err, nl.ErrMalformed) {
				t.Fatalf("%v is not %v", err, nl.ErrMalformed)
			}
			return
		}
		_, _, _ = a.String(), a.Flags.String(), a.Scope.String()
		rec := nltest.Record(nltest.NewFake(nltest.AckAll))
		if err := On(nl.New(rec)).Add(a); err != nil {
			if len(a.Label) < 65000 {
				t.Fatal(err)
			}
			return
		}
		sent := nltest.Split(rec.Sent()[0])[0].Data
		mustKeepUnknown(t, data, sent)
		again, err := decode(sent)
		if err != nil {
			t.Fatal(err)
		}
		a.Flags = a.askedFlags()
		if !a.is4() {
			a.Label, a.Broadcast = "", again.Broadcast
		}
		if a.Valid != nil && (a.Preferred == nil || *a.Preferred > *a.Valid) {
			a.Preferred = a.Valid
		}
		if diff := cmp.Diff(a, again, cmpopts.EquateComparable(a.Prefix, a.Peer)); diff != "" {
			t.Errorf("read and asked for (-first +again):\n%s", diff)
		}
		if d := a.compare(&again); d != same && !(!a.is4() && a.Flags&NoDAD == 0) {
			t.Errorf("difference %d from itself", d)
		}
	})
}
