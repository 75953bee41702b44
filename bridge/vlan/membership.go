package vlan

import (
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/tombolo-cni/tombolo"
	"github.com/tombolo-cni/tombolo/internal/printable"
)

// maxID is the last VLAN number; the first is 1.
const maxID = 4094

// Range is a range of VLAN IDs from First to Last, both included.
type Range struct{ First, Last uint16 }

// String returns the range as text, such as "7" or "7-9".
func (r Range) String() string {
	if r.First == r.Last {
		return strconv.Itoa(int(r.First))
	}
	return fmt.Sprintf("%d-%d", r.First, r.Last)
}

// Membership lists the VLANs of a port. With the zero Membership, the port is only in the bridge's default VLAN.
type Membership struct {
	// ID is the VLAN of the port's untagged frames, in both directions. It is 1 to 4094. 0 means 1 if Trunk is not
	// empty.
	ID uint16 `json:"id,omitempty"`
	// Trunk lists the VLANs whose frames are tagged, in both directions. If Trunk contains ID, frames of ID are still
	// untagged.
	Trunk Ranges `json:"trunk,omitempty"`
	// KeepDefault keeps the port in other VLANs that it is already in, such as the bridge's default VLAN.
	KeepDefault bool `json:"keepDefault,omitempty"`
}

// IsZero reports whether the membership contains no VLAN. It ignores KeepDefault.
func (m Membership) IsZero() bool { return m.ID == 0 && len(m.Trunk) == 0 }

// native returns the VLAN of untagged frames, or 0 for a zero Membership.
func (m Membership) native() uint16 {
	if m.ID == 0 && len(m.Trunk) > 0 {
		return 1
	}
	return m.ID
}

// Check returns an error that matches tombolo.ErrInvalid if a VLAN ID is out of range.
func (m Membership) Check() error {
	if m.ID > maxID {
		return fmt.Errorf("%w: VLAN %d, where 1 to %d are VLANs", tombolo.ErrInvalid, m.ID, maxID)
	}
	for _, r := range m.Trunk {
		if r.First == 0 || r.Last > maxID || r.First > r.Last {
			return fmt.Errorf("%w: VLANs %s, where 1 to %d are VLANs", tombolo.ErrInvalid, r, maxID)
		}
	}
	return nil
}

// Ranges is a list of ranges of VLAN IDs. Its text form is "2-4,100".
type Ranges []Range

// String returns the ranges as text, such as "2-4,100".
func (l Ranges) String() string { return printable.List(l, ",") }

// MarshalText returns the same text as String.
func (l Ranges) MarshalText() ([]byte, error) { return []byte(l.String()), nil }

// UnmarshalText parses a text that String returns. For other texts, the error matches tombolo.ErrInvalid.
func (l *Ranges) UnmarshalText(text []byte) error {

	var list Ranges
	for one := range strings.SplitSeq(string(text), ",") {
		first, last, isRange := strings.Cut(one, "-")
		if !isRange {
			last = first
		}

		a, errA := strconv.ParseUint(first, 10, 16)
		b, errB := strconv.ParseUint(last, 10, 16)
		r := Range{uint16(a), uint16(b)}
		if errA != nil || errB != nil || (Membership{Trunk: Ranges{r}}).Check() != nil {
			return fmt.Errorf("%w: %q names no VLANs", tombolo.ErrInvalid, one)
		}
		list = append(list, r)
	}

	*l = list
	return nil
}

// Constants of include/uapi/linux/if_bridge.h.
const (
	flagPVID     = 0x2 // BRIDGE_VLAN_INFO_PVID: untagged frames belong to this VLAN
	flagUntagged = 0x4 // BRIDGE_VLAN_INFO_UNTAGGED: outgoing frames lose their tag
)

// entries maps the VLAN IDs of a port to their flags in the kernel.
type entries map[uint16]uint16

// entries converts the membership to the kernel's form.
func (m Membership) entries() entries {
	list := taggedEntries(m.Trunk)
	if native := m.native(); native != 0 {
		list[native] = flagPVID | flagUntagged
	}
	return list
}

// taggedEntries returns entries for the VLANs in list, with tagged frames.
func taggedEntries(list []Range) entries {
	e := entries{}
	for _, r := range list {
		for id := int(r.First); id <= int(r.Last); id++ {
			e[uint16(id)] = 0
		}
	}
	return e
}

// changes compares existing entries with the membership. It returns the entries to delete and to add.
func (m Membership) changes(have entries) (del, add entries) {
	want := m.entries()
	del, add = entries{}, entries{}
	for id, flags := range have {
		if _, ok := want[id]; !ok && !m.KeepDefault {
			del[id] = flags
		}
	}

	for id, flags := range want {
		if there, ok := have[id]; !ok || there != flags {
			add[id] = flags
		}
	}
	return del, add
}

// entryRange is a range of consecutive VLANs with the same flags.
type entryRange struct {
	Range
	flags uint16
}

// runs returns the entries as a sorted list of as few ranges as possible.
func (e entries) runs() []entryRange {
	ids := make([]int, 0, len(e))
	for id := range e {
		ids = append(ids, int(id))
	}

	slices.Sort(ids)
	var list []entryRange
	for _, n := range ids {
		id := uint16(n)
		if last := len(list) - 1; last >= 0 && list[last].Last+1 == id && list[last].flags == e[id] &&
			e[id]&flagPVID == 0 {
			list[last].Last = id
			continue
		}
		list = append(list, entryRange{Range{id, id}, e[id]})
	}

	return list
}

// String returns the entries as the command bridge prints them: "100 pvid untagged, 200-300".
func (e entries) String() string {
	var texts []string
	for _, r := range e.runs() {
		text := r.Range.String()
		if r.flags&flagPVID != 0 {
			text += " pvid"
		}
		if r.flags&flagUntagged != 0 {
			text += " untagged"
		}
		texts = append(texts, text)
	}

	if len(texts) == 0 {
		return "none"
	}

	return strings.Join(texts, ", ")
}

// String returns the VLANs as the command bridge prints them: "100 pvid untagged, 200-300".
func (m Membership) String() string { return m.entries().String() }
