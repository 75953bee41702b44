package uplink

import (
	"encoding/json"
	"fmt"

	"github.com/tombolo-cni/tombolo"
	"github.com/tombolo-cni/tombolo/internal/ident"
)

// recordVersion is that of the records which are written.
const recordVersion = 1

// State is how far a takeover is.
type State string

// The states.
const (
	Taking    State = "taking"    // on the way to the bridge
	Taken     State = "taken"     // the bridge has it all
	Restoring State = "restoring" // on the way back to the NIC, because it was asked for
	Undoing   State = "undoing"   // on the way back because the takeover failed, or was cut short
)

// Record is what the journal keeps: what was asked for, how far it is, and what was there before. The steps are
// planned from this and from what the kernel has at the time, so that each may be repeated.
type Record struct {
	Uplink
	State State `json:"state"`
	progress
}

// progress is what of a record is nothing to its reader.
type progress struct {
	Version int `json:"version"`
	// Step is the step that is about to be done, or was under way when the process ended.
	Step stepName `json:"step,omitempty"`
	// Before is what there was before the takeover.
	Before snapshot `json:"before"`
}

// Journal keeps the record of one takeover over a crash of the process. Save is
// called before each step, with the whole record: it must replace the one before
// at once or not at all. After Remove there is none.
type Journal interface {
	Save(record []byte) error
	Remove() error
}

// ParseRecord reads what a Journal has kept.
func ParseRecord(b []byte) (*Record, error) {
	var r Record
	err := json.Unmarshal(b, &r)
	if err == nil {
		err = r.validate()
	}
	if err != nil {
		return nil, fmt.Errorf("read the record of a takeover: %w", err)
	}
	return &r, nil
}

func (r *Record) validate() error {
	switch {
	case r.Version != recordVersion:
		return fmt.Errorf("%w: version %d, where this program knows %d", tombolo.ErrInvalid, r.Version, recordVersion)
	case !ident.IsLinkName(r.NIC) || !ident.IsLinkName(r.Bridge) || r.NIC == r.Bridge:
	case r.State == Taking, r.State == Taken, r.State == Restoring, r.State == Undoing:
		return nil
	}
	return fmt.Errorf("%w: NIC %q, bridge %q, state %q", tombolo.ErrInvalid, r.NIC, r.Bridge, r.State)
}

// Save writes the record by a journal.
func (r *Record) Save(j Journal) error {
	b, err := json.Marshal(r)
	if err == nil {
		err = j.Save(b)
	}
	if err != nil {
		return fmt.Errorf("save the journal: %w", err)
	}
	return nil
}
