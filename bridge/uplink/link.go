package uplink

import (
	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/link"
)

// linkState is a network interface as far as a takeover is concerned with it.
type linkState struct {
	Index int    `json:"index"`
	Name  string `json:"name"`
	Kind  string `json:"kind,omitempty"` // "bridge", "veth", "vlan", …; empty for hardware and loopback
	// Type is what is on the wire (ARPHRD_*): 1 is Ethernet.
	Type uint16 `json:"type"`
	MAC  string `json:"mac,omitempty"`
	MTU  int    `json:"mtu"`
	// Flags are those of the kernel (IFF_*), IFF_LOWER_UP, the carrier, included.
	Flags uint32 `json:"flags"`
	// Master is the index of the bridge, bond or the like that it is a port of, and
	// PortOf what kind that is.
	Master int    `json:"master,omitempty"`
	PortOf string `json:"portOf,omitempty"`
	// Lower is the index of the link that it rests on (a VLAN's, a macvlan's, a
	// tunnel's) where that is in the same namespace.
	Lower int `json:"lower,omitempty"`
	// Wireless says that it is a wireless device.
	Wireless bool `json:"wireless,omitempty"`
}

// noLink stands for the index of a bridge that is not there yet.
const noLink = -1

// Up says that it was set up (IFF_UP).
func (l linkState) Up() bool { return l.Flags&unix.IFF_UP != 0 }

// links lists all of the namespace.
func (c *Conn) links() ([]linkState, error) {
	var list []linkState
	err := link.List(c.nl, "list links", "", 0, func(l *link.Link) {
		if l.Elsewhere || l.Kind == "veth" {
			l.Lower = 0 // an index of another namespace, or the other end
		}
		list = append(list, linkState{l.Index, l.Name, l.Kind, l.Type, l.MAC.String(), l.MTU, l.Flags, l.Master, l.PortOf, l.Lower, false})
	})
	return list, err
}
