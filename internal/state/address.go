package state

import (
	"net/netip"
	"slices"

	"github.com/tombolo-cni/tombolo/ipam"
)

// A HostGateway is the host's address that the default route of a pod's address leads to, where
// a pod of a LAN goes out through the host.
type HostGateway struct {
	Of   netip.Prefix // the pod's address
	Host netip.Addr
	// HostAtADD is what Host was when the pod was added, and in the result, if it was another.
	HostAtADD netip.Addr
}

// HostGateways are those of the addresses of a pod that have one.
type HostGateways []HostGateway

// Of gives that of an address; the zero HostGateway is none.
func (l HostGateways) Of(p netip.Prefix) HostGateway {
	if i := l.index(p); i >= 0 {
		return l[i]
	}
	return HostGateway{}
}

// Set notes that the default route of an address leads to another address of the host.
func (l *HostGateways) Set(p netip.Prefix, own netip.Addr) {
	i := l.index(p)
	if i < 0 {
		if own.IsValid() {
			*l = append(*l, HostGateway{Of: p, Host: own})
		}
		return
	}
	if one := &(*l)[i]; own != one.Host {
		if !one.HostAtADD.IsValid() {
			one.HostAtADD = one.Host
		}
		one.Host = own
	}
}

// Moved gives the list in which an address of the pod has become another one.
func (l HostGateways) Moved(from, to netip.Prefix) HostGateways {
	l = slices.Clone(l)
	if i := l.index(from); i >= 0 {
		l[i].Of = to
	}
	return l
}

func (l HostGateways) index(p netip.Prefix) int {
	for i := range l {
		if l[i].Of == p {
			return i
		}
	}
	return -1
}

// addressFields moves Addresses, and with them HostGateways.
func (a *Attachment) addressFields(c *codec) {
	if c.decoding {
		a.HostGateways = nil
	}
	list(c, "addresses", &a.Addresses,
		func(b []byte, one ipam.Address) []byte {
			host := a.HostGateways.Of(one.Prefix)
			return encodeNested(b, func(c *codec) { addressFields(c, &one, &host) })
		},
		func(raw []byte) (ipam.Address, error) {
			var one ipam.Address
			var host HostGateway
			err := decodeNested(raw, func(c *codec) { addressFields(c, &one, &host) })
			if host.Host.IsValid() || host.HostAtADD.IsValid() {
				host.Of = one.Prefix
				a.HostGateways = append(a.HostGateways, host)
			}
			return one, err
		})
}

func addressFields(c *codec, one *ipam.Address, host *HostGateway) {
	c.prefix("prefix", &one.Prefix)
	c.addr("gateway", &one.Gateway)
	c.addr("through", &host.Host)
	c.addr("throughAtADD", &host.HostAtADD)
}

// AppendJSON appends the attachment as an object, with what is on record.
func (a *Attachment) AppendJSON(b []byte) []byte { return encodeNested(b, a.fields) }
