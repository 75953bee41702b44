package network

import (
	"path/filepath"

	"github.com/tombolo-cni/tombolo/ipam"
	"github.com/tombolo-cni/tombolo/network/internal/fail"
)

// unnamed is on record of addresses whose allocator Network.Origin does not name.
const unnamed = "allocator"

// origin is what goes on record of a network's allocator. Config.Allocators knows it by what Network.Origin says.
func (n *Node) origin(nw *Network) Origin {
	_, fixed := nw.Allocator.(ipam.Static)
	if n.allocators == nil && nw.Allocator != nil && nw.Origin.Type == "" && !fixed {
		return Origin{Type: unnamed}
	}
	return nw.Origin
}

// allocator gives what takes addresses back; nil where nothing does. Without Config.Allocators that is what needs to
// know no more than is on record.
func (n *Node) allocator(network string, origin *Origin) (ipam.Allocator, error) {
	if n.allocators != nil {
		return n.allocators(network, origin)
	}
	if origin == nil {
		return nil, nil
	}
	switch origin.Type {
	case "", "static", "dhcp":
		return nil, nil
	case "host-local":
		dir := origin.Dir
		if !filepath.IsAbs(dir) {
			dir = filepath.Join(n.dir.Path(), "ipam")
		}
		return ipam.NewHostLocal(&ipam.Config{Network: network, Dir: dir})
	case unnamed:
		return nil, fail.Errorf(ErrInvalid, "its address is of a Network.Allocator, and nothing says what takes it back: Config.Allocators is needed, or a Network.Origin of type host-local")
	}
	return nil, fail.Errorf(ErrInvalid, "its address is the IPAM plugin %q's, which only a call with the network's configuration can ask: have the runtime DEL it or call GC", origin.Type)
}
