package uplink

import (
	"encoding/json"
	"fmt"

	"github.com/tombolo-cni/tombolo"
	"github.com/tombolo-cni/tombolo/internal/ident"
)

// recordVersion is the version of the records that we write.
const recordVersion = 1

// State is the progress of a takeover.
type State string

// The states of a takeover.
const (
	Taking    State = "taking"    // moving the NIC's addresses and routes to the bridge
	Taken     State = "taken"     // all addresses and routes are on the bridge
	Restoring State = "restoring" // moving back to the NIC on request
	Undoing   State = "undoing"   // moving back because the takeover failed or was interrupted
)

// Record is the content of the journal: the request, its progress, and the state before the takeover. The steps are
// planned from this and the kernel's present state, so that each may be repeated.
type Record struct {
	Uplink
	State State `json:"state"`
	progress
}

// progress holds the fields of a record that do not concern its reader.
type progress struct {
	Version int `json:"version"`
	// Step is the step that is about to begin, or was in progress when the process ended.
	Step stepName `json:"step,omitempty"`
	// Before is the state before the takeover.
	Before snapshot `json:"before"`
}

// Journal stores the record of one takeover, so that it survives a crash of the process. Save is called before each
// step with the whole record. It must replace the previous record at once or not at all. After Remove there is no
// record.
type Journal interface {
	Save(record []byte) error
	Remove() error
}

// ParseRecord parses the content of a Journal.
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

// Save writes the record to a journal.
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
