package lease

import (
	"encoding/binary"
	"net/netip"
	"time"

	"github.com/insomniacslk/dhcp/dhcpv4"
)

// parsePacket reads a lease of dhcpcd (/var/lib/dhcpcd/<nic>.lease): the server's ACK as
// it came (RFC 2131, section 2). It is nil for what is none. The client identifier is in
// there only if the server sent it back (RFC 6842).
func parsePacket(data []byte) *found {
	d, err := dhcpv4.FromBytes(data)
	if err != nil || d.MessageType() != dhcpv4.MessageTypeAck {
		return nil
	}
	f := &found{
		address: addrOf(d.YourIPAddr), server: addrOf(d.ServerIdentifier()), domain: d.DomainName(), hostName: d.HostName(),
		renew: spanOf(d, dhcpv4.OptionRenewTimeValue), rebind: spanOf(d, dhcpv4.OptionRebindingTimeValue), lifetime: spanOf(d, dhcpv4.OptionIPAddressLeaseTime),
	}
	id := d.Options.Get(dhcpv4.OptionClientIdentifier)
	f.identify(id, id != nil)
	for _, ip := range d.Router() {
		if a := addrOf(ip); a.IsValid() {
			f.routers = append(f.routers, a)
		}
	}
	for _, ip := range d.DNS() {
		if a := addrOf(ip); a.IsValid() {
			f.dns = append(f.dns, a)
		}
	}
	if mtu := d.Options.Get(dhcpv4.OptionInterfaceMTU); len(mtu) == 2 {
		f.mtu = int(binary.BigEndian.Uint16(mtu))
	}
	for _, r := range d.ClasslessStaticRoute() {
		if r == nil || r.Dest == nil {
			continue
		}
		bits, _ := r.Dest.Mask.Size()
		if one, ok := routeOf(netip.PrefixFrom(addrOf(r.Dest.IP), bits), addrOf(r.Router)); ok {
			f.routes = append(f.routes, one)
		}
	}
	if f.routes == nil {
		f.router()
	}
	return f.usable()
}

// addrOf is invalid for what is no IPv4 address.
func addrOf(ip []byte) netip.Addr {
	a, _ := netip.AddrFromSlice(ip)
	if a = a.Unmap(); !a.Is4() {
		return netip.Addr{}
	}
	return a
}

// spanOf reads an option of four bytes as seconds; 0 where there is none.
func spanOf(d *dhcpv4.DHCPv4, code dhcpv4.OptionCode) time.Duration {
	value := d.Options.Get(code)
	if len(value) != 4 {
		return 0
	}
	return seconds(uint64(binary.BigEndian.Uint32(value)))
}
