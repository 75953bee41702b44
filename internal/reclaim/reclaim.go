// Package reclaim is who takes addresses back where no configuration is at hand: by what is on
// record of an attachment.
package reclaim

import (
	"fmt"
	"path/filepath"

	"github.com/tombolo-cni/tombolo/ipam"
	"github.com/tombolo-cni/tombolo/network"
)

// Allocators is for network.Config: host-local's reservations need no configuration to be
// released, and static addresses and leases have none. Addresses that a plugin gave are for
// those to give back who have the network's configuration.
func Allocators(stateDir string) func(string, *network.Origin) (ipam.Allocator, error) {
	return func(name string, origin *network.Origin) (ipam.Allocator, error) {
		if origin == nil {
			return nil, nil
		}
		switch origin.Type {
		case "", "static", "dhcp":
			return nil, nil
		case "host-local":
			dir := origin.Dir
			if !filepath.IsAbs(dir) {
				dir = filepath.Join(stateDir, "ipam")
			}
			return ipam.NewHostLocal(&ipam.Config{Network: name, Dir: dir})
		}
		return nil, fmt.Errorf("its address is the IPAM plugin %q's, which only a call with the network's configuration can ask: have the runtime DEL it or call GC", origin.Type)
	}
}
