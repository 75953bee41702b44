package netavark

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"hash/crc32"
	"net/netip"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/runtimes"
	"github.com/tombolo-cni/tombolo/route"
)

// network is podman's description of a network, reduced to the fields that the plugin uses.
type network struct {
	runtimes.Network
	ID     string            `json:"id"`
	Routes []json.RawMessage `json:"routes"`
	IPv6   bool              `json:"ipv6_enabled"`
	IPAM   map[string]string `json:"ipam_options"`
}

// create returns podman's description of a new network with the missing fields filled in. It leaves unknown fields as
// they are. It returns an error if the plugin cannot make such a network on this host now.
func create(data []byte) (any, error) {
	var all map[string]any
	n := new(network)
	if err := json.Unmarshal(data, n); err != nil {
		return nil, fmt.Errorf("create reads a network as JSON: %w", err)
	}

	_ = json.Unmarshal(data, &all) // cannot fail: the call above accepts only an object or null
	if err := n.complete(); err != nil {
		return nil, err
	}

	if _, err := n.Call("STATUS", nil); err != nil {
		return nil, err
	}

	all["network_interface"], all["subnets"], all["ipam_options"] = n.Bridge, n.Subnets, n.IPAM
	all["dns_enabled"] = false // aardvark-dns knows only podman's own bridges
	return all, nil
}

// complete sets the fields that the operator left out. It returns an error for settings that contradict each other, or
// that networks of Tombolo cannot have.
func (n *network) complete() error {
	const driver = "driver"
	bridge, mode := n.BridgeOption(), n.Mode()
	giver := "none"
	switch {
	case len(n.Subnets) > 0 || mode == "gateway":
		giver = "host-local" // podman assigns the addresses
	case mode == "lan":
		giver = "dhcp"
	}

	is6 := func(s runtimes.Subnet) bool { return s.Prefix.Addr().Is6() }
	switch asked := cmp.Or(n.IPAM[driver], giver); {
	case asked != giver:
		return fmt.Errorf("--ipam-driver %s: with mode=%s and these subnets it is %s", asked, mode, giver)
	case bridge != "" && n.Bridge != "" && n.Bridge != bridge:
		return fmt.Errorf("--interface-name %s and -o bridge=%s both name the bridge", n.Bridge, bridge)
	case n.IPv6 && n.Options["ipv6"] == "" && !slices.ContainsFunc(n.Subnets, is6):
		return errors.New("--ipv6 needs a --subnet of IPv6, or, with mode=lan, -o ipv6=slaac or -o ipv6=dhcp")
	case len(n.Routes) > 0:
		return errors.New("--route: containers in a network of tombolo have its default route alone")
	}

	n.IPAM = map[string]string{driver: giver}
	n.Bridge = cmp.Or(n.Bridge, bridge)
	if mode != "gateway" {
		return nil
	}

	n.Bridge = cmp.Or(n.Bridge, fmt.Sprintf("tb-%.12s", n.ID))
	return n.completeSubnets()
}

// completeSubnets adds missing gateways, and a free subnet if the network has none.
func (n *network) completeSubnets() error {
	if len(n.Subnets) == 0 {
		free, err := freeSubnet(n.ID)
		if err != nil {
			return err
		}
		n.Subnets = []runtimes.Subnet{{Prefix: free}}
	}

	for i := range n.Subnets {
		if s := &n.Subnets[i]; !s.Gateway.IsValid() {
			s.Gateway = s.Prefix.Masked().Addr().Next()
		}
	}
	return nil
}

// freeSubnet returns a /24 in podman's range that overlaps no route of the host, apart from default routes. The search
// begins at a subnet that depends on the new network's id. So it probably avoids the subnets of networks without
// containers, which have no routes yet.
func freeSubnet(id string) (netip.Prefix, error) {
	var routes []route.Route
	conn, err := route.Dial(nil)
	if err == nil {
		defer conn.Close()
		routes, err = conn.List(context.Background(), route.Filter{Family: unix.AF_INET})
	}

	const first, all = 89, (256 - 89) * 256 // 10.89.0.0/24 to 10.255.255.0/24
	for i := crc32.ChecksumIEEE([]byte(id)) % all; i < 2*all && err == nil; i++ {
		p := netip.PrefixFrom(netip.AddrFrom4([4]byte{10, byte(first + i%all/256), byte(i)}), 24)
		if !slices.ContainsFunc(routes, func(r route.Route) bool { return r.Dst.Bits() > 0 && r.Dst.Overlaps(p) }) {
			return p, nil
		}
	}

	return netip.Prefix{},
		cmp.Or(err, errors.New("this host has routes to all of 10.89.0.0/24 to 10.255.255.0/24: name a --subnet"))
}
