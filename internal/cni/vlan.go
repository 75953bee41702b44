package cni

import (
	"github.com/tombolo-cni/tombolo/bridge/vlan"
)

// VLANConf are the fields of the reference plugin bridge that are about VLANs.
type VLANConf struct {
	VLAN                uint16  `json:"vlan"`
	VLANTrunk           []Trunk `json:"vlanTrunk"`
	PreserveDefaultVLAN bool    `json:"preserveDefaultVlan"`
}

// Trunk is an element of vlanTrunk: VLANs from MinID to MaxID, or ID, or both.
type Trunk struct {
	MinID *uint16 `json:"minID"`
	MaxID *uint16 `json:"maxID"`
	ID    *uint16 `json:"id"`
}

// membership is what they say of a port.
func (c *VLANConf) membership() vlan.Membership {
	m := vlan.Membership{ID: c.VLAN, KeepDefault: c.PreserveDefaultVLAN}
	for _, t := range c.VLANTrunk {
		for _, r := range [][2]*uint16{{t.MinID, t.MaxID}, {t.ID, t.ID}} {
			if r[0] != nil && r[1] != nil {
				m.Trunk = append(m.Trunk, vlan.Range{First: *r[0], Last: *r[1]})
			}
		}
	}
	if m.IsZero() {
		m = vlan.Membership{} // to keep what a port has is what happens then
	}
	return m
}

// vlanProblems are about VLANs that there cannot be, and about those that a network cannot be in.
func (c *NetConf) vlanProblems(p *problems) {
	for i, t := range c.VLANTrunk {
		p.add((t.MinID == nil) != (t.MaxID == nil), "vlanTrunk[%d] has one of minID and maxID: it takes both, or id", i)
	}
	s := c.settings()
	if err := s.CheckVLAN(); err != nil {
		p.add(true, "%v", err)
	}
}
