package cni

import (
	"fmt"

	"github.com/tombolo-cni/tombolo/bridge/vlan"
)

// VLANConf are the fields of the reference plugin bridge that are about VLANs.
type VLANConf struct {
	VLAN                int     `json:"vlan"`
	VLANTrunk           []Trunk `json:"vlanTrunk"`
	PreserveDefaultVLAN bool    `json:"preserveDefaultVlan"`
}

// Trunk is an element of vlanTrunk: VLANs from MinID to MaxID, or ID, or both.
type Trunk struct {
	MinID *int `json:"minID"`
	MaxID *int `json:"maxID"`
	ID    *int `json:"id"`
}

// membership is what they say of a port. With an error, it is what of them can be meant.
func (c *VLANConf) membership() (vlan.Membership, error) {
	m := vlan.Membership{KeepDefault: c.PreserveDefaultVLAN}
	var first error
	refuse := func(format string, args ...any) {
		if first == nil {
			first = fmt.Errorf(format, args...)
		}
	}
	if c.VLAN < 0 || c.VLAN > vlan.MaxID {
		refuse("vlan %d is not within 0 and %d", c.VLAN, vlan.MaxID)
	} else {
		m.ID = uint16(c.VLAN)
	}
	for i, t := range c.VLANTrunk {
		if (t.MinID == nil) != (t.MaxID == nil) {
			refuse("vlanTrunk[%d] has one of minID and maxID: it takes both, or id", i)
			continue
		}
		for _, r := range [][2]*int{{t.MinID, t.MaxID}, {t.ID, t.ID}} {
			switch {
			case r[0] == nil:
			case *r[0] < 1 || *r[1] > vlan.MaxID:
				refuse("vlanTrunk[%d]: VLANs are from 1 to %d", i, vlan.MaxID)
			case *r[0] > *r[1]:
				refuse("vlanTrunk[%d]: minID %d is more than maxID %d", i, *r[0], *r[1])
			default:
				m.Trunk = append(m.Trunk, vlan.Range{First: uint16(*r[0]), Last: uint16(*r[1])})
			}
		}
	}
	if m.IsZero() {
		m = vlan.Membership{} // to keep what a port has is what happens then
	}
	return m, first
}
