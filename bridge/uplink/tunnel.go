package uplink

import (
	"fmt"

	"golang.org/x/sys/unix"

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
			text:    fmt.Sprintf("let tunnel %s rest on %s", l.Name, m.to.Name),
			request: func(b *nl.Batch) { appendVXLANLink(b, l.Name, l.Index, m.to.Index) },
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

// appendVXLANLink changes nothing else of the tunnel: what is not in the request stays.
func appendVXLANLink(b *nl.Batch, name string, index, lower int) {
	b.Request("set link of tunnel", nl.Name(name), unix.RTM_NEWLINK, 0, func(e *nl.Encoder) {
		linkHeader(e, index)
		e.Nest(unix.IFLA_LINKINFO, func(e *nl.Encoder) {
			e.String(unix.IFLA_INFO_KIND, "vxlan")
			e.Nest(unix.IFLA_INFO_DATA, func(e *nl.Encoder) { e.Uint32(unix.IFLA_VXLAN_LINK, uint32(lower)) })
		})
	})
}
