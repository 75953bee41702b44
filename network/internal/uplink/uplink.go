package uplink

import (
	"encoding/json"
	"errors"
	"fmt"

	"github.com/tombolo-cni/tombolo"
	"github.com/tombolo-cni/tombolo/addr"
	"github.com/tombolo-cni/tombolo/bridge"
	"github.com/tombolo-cni/tombolo/internal/ident"
	"github.com/tombolo-cni/tombolo/internal/nl"
	"github.com/tombolo-cni/tombolo/route"
)

// ErrRefused means that a NIC cannot be taken over as it is. Nothing was changed. The text of the error has advice.
var ErrRefused = errors.New("it cannot be taken over as it is")

// Uplink describes a takeover.
type Uplink struct {
	// NIC is the interface that becomes a port. It must be an Ethernet device that is up.
	NIC string
	// Bridge is created with the NIC's MAC and MTU.
	Bridge string
	// Alias is the alias of a new bridge: see bridge.Bridge.
	Alias string
}

func (u *Uplink) validate() error {
	switch {
	case !ident.IsLinkName(u.NIC):
		return fmt.Errorf("take over a NIC: %w: its name is %q", tombolo.ErrInvalid, u.NIC)
	case !ident.IsLinkName(u.Bridge) || u.Bridge == u.NIC:
		return fmt.Errorf("take over %s: %w: the bridge's name is %q", u.NIC, tombolo.ErrInvalid, u.Bridge)
	}
	return nil
}

// Conn works on the NICs of the calling thread's network namespace. For one NIC or bridge, only one caller in all
// processes may make changes at a time. The caller must lock.
type Conn struct {
	nl     *nl.Conn
	addrs  *addr.Conn
	routes *route.Conn
	bridge *bridge.Conn
}

// On returns a Conn over an open socket of the namespace, which still belongs to its owner.
func On(s tombolo.Socket) *Conn {
	return &Conn{nl: nl.Of(s), addrs: addr.On(s), routes: route.On(s), bridge: bridge.On(s, nil)}
}

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
	State   State `json:"state"`
	Version int   `json:"version"`
	// Before is the state before the takeover.
	Before snapshot `json:"before"`
}

// Journal stores the record of one takeover, so that it survives a crash of the process. Save must replace the previous
// record at once or not at all.
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
	case r.Uplink.validate() != nil:
	case r.State == Taking, r.State == Taken, r.State == Restoring, r.State == Undoing:
		return nil
	}
	return fmt.Errorf("%w: NIC %q, bridge %q, state %q", tombolo.ErrInvalid, r.NIC, r.Bridge, r.State)
}

// save writes the record to a journal.
func (r *Record) save(j Journal) error {
	b, err := json.Marshal(r)
	if err == nil {
		err = j.Save(b)
	}
	if err != nil {
		return fmt.Errorf("save the journal: %w", err)
	}
	return nil
}
