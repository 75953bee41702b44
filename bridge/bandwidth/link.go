package bandwidth

import (
	"net"

	"github.com/tombolo-cni/tombolo/internal/link"
	"github.com/tombolo-cni/tombolo/internal/nl"
)

// addIFB appends a request for an ifb, still down. Its MAC is given, so that udev
// does not change it later.
func addIFB(b *nl.Batch, name string, mac net.HardwareAddr, mtu int) {
	link.Request{Name: name, MAC: mac, MTU: &mtu, Kind: "ifb"}.Create(b, "add link", name)
}

// setIFB appends what the kernel passes over in a request that creates: the alias,
// and that no link-local address is to be made.
func setIFB(b *nl.Batch, name, alias string, mtu int) {
	// Below the least MTU of IPv6 (RFC 8200, section 5) a link has no IPv6 to set.
	r := link.Request{Name: name, NoLinkLocal: mtu >= 1280}
	if alias != "" {
		r.Alias = &alias
	}
	r.Set(b, "set link", name)
}
