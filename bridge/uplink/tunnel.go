package uplink

import (
	"fmt"

	"github.com/jsimonetti/rtnetlink/v2/driver"

	"github.com/tombolo-cni/tombolo/internal/link"
	"github.com/tombolo-cni/tombolo/internal/nl"
)

// moveTunnels has VXLAN tunnels that rest on one link rest on the other: those of
// flannel, for one. The kernel changes that in place.
func (m *move) moveTunnels() []operation {
	var ops []operation
	for _, l := range m.s.Links {
		if l.Lower != m.from.Index || !isMovable(&l) || m.stays.hasLink(&l) {
			continue
		}
		ops = append(ops, operation{
			text: fmt.Sprintf("let tunnel %s rest on %s", l.Name, m.to.Name),
			// What is not in the request stays.
			request: func(b *nl.Batch) {
				link.Request{Index: l.Index, Data: &driver.Vxlan{Link: new(uint32(m.to.Index))}}.Set(b, "set link of tunnel", l.Name)
			},
		})
	}
	return ops
}

// isMovable says that the kernel lets a link rest on another instead. Where a tunnel
// has a remote end of its own it does so too, and goes on sending by the first.
func isMovable(l *Link) bool { return l.Kind == "vxlan" && !l.Remote }

func (s *Snapshot) hasLink(l *Link) bool {
	for _, have := range s.Links {
		if have.Index == l.Index && have.Name == l.Name {
			return true
		}
	}
	return false
}
