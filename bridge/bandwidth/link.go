package bandwidth

import (
	"net"

	"github.com/tombolo-cni/tombolo/internal/link"
	"github.com/tombolo-cni/tombolo/internal/nl"
)

// ifbMTU is below the least MTU of IPv6 (RFC 8200, section 5), so that the kernel gives the link
// no IPv6, which would take a third of the time. Packets on their way through an ifb may be
// longer: they are redirected, not sent.
const ifbMTU = 1279

// addIFB appends a request for an ifb, still down. Its MAC is given, so that udev
// does not change it later.
func addIFB(b *nl.Batch, name string, mac net.HardwareAddr) {
	mtu := ifbMTU
	link.Request{Name: name, MAC: mac, MTU: &mtu, Kind: "ifb"}.Create(b, "add link", name)
}

// setAlias appends a request of its own for the alias: the kernel ignores one in the request that makes a
// link.
func setAlias(b *nl.Batch, name, alias string) {
	if alias != "" {
		link.Request{Name: name, Alias: &alias}.Set(b, "set link", name)
	}
}
