package cni

import (
	"context"
	"fmt"
	"net/netip"
	"slices"

	"github.com/containernetworking/cni/pkg/types"

	"github.com/tombolo-cni/tombolo/ipam"
)

// staticConf is the ipam section of type static.
type staticConf struct {
	Type      string        `json:"type"`
	Addresses []addressConf `json:"addresses"`
	Routes    []routeConf   `json:"routes"`
	DNS       types.DNS     `json:"dns"`
}

type addressConf struct {
	Address netip.Prefix `json:"address"`
	Gateway netip.Addr   `json:"gateway"`
}

// static is an allocator that always assigns the same addresses. It reserves nothing. The operator or the runtime
// names the addresses, and makes sure that they are free.
type static struct {
	addresses []ipam.Address
	network   string
	byName    bool
}

// static decodes the ipam section of type static, and makes a static the allocator that assigns addresses.
func (a *allocator) static(r *ipamRequest) error {
	var conf staticConf
	if err := r.read(&conf); err != nil {
		return err
	}

	if r.Section.JSON == nil {
		return newError(codeInvalidConfig, `network %q: static needs the field "ipam"`, r.Network)
	}

	args, err := parseArgs(r.Args)
	if err != nil {
		return err
	}

	addresses, err := staticAddresses(conf.Addresses, args, &r.RequestedAddresses)
	if err != nil {
		return err
	}

	source := static{network: r.Network, byName: r.ByName}
	for i, one := range addresses {
		if !one.Address.IsValid() {
			return newError(codeInvalidConfig, "field \"ipam.addresses[%d].address\" is required", i)
		}
		if one.Gateway.Zone() != "" {
			return newError(codeInvalidConfig, "field \"ipam.addresses[%d].gateway\": %s has a zone", i, one.Gateway)
		}
		source.addresses = append(source.addresses, ipam.Address{Prefix: one.Address, Gateway: one.Gateway.Unmap()})
	}

	if r.ByName {
		a.reported = source.addresses
	}

	a.Allocator, a.dns = source, conf.DNS
	a.routes, err = routes(conf.Routes)
	return err
}

// staticAddresses returns the addresses from one of three sources, as the reference plugin does. The first is
// runtimeConfig.ips, and the second args.cni.ips. If both are empty, the addresses are the configuration's and those
// of IP in CNI_ARGS, with the gateways of GATEWAY in CNI_ARGS.
func staticAddresses(addresses []addressConf, args Args, requested *RequestedAddresses) ([]addressConf, error) {
	added, err := parsePrefixes("CNI_ARGS IP", args.List("IP"))
	if err != nil {
		return nil, err
	}

	addresses = append(addresses, added...)
	for _, text := range args.List("GATEWAY") {
		gateway, err := netip.ParseAddr(text)
		if err != nil || gateway.Zone() != "" {
			return nil, newError(codeEnvironment, "CNI_ARGS GATEWAY: %q is not an IP address", text)
		}
		for i := range addresses {
			if addresses[i].Address.Contains(gateway) {
				addresses[i].Gateway = gateway
			}
		}
	}

	switch {
	case len(requested.IPs) > 0:
		return parsePrefixes("runtimeConfig.ips", requested.IPs)
	case len(requested.ArgIPs) > 0:
		return parsePrefixes("args.cni.ips", requested.ArgIPs)
	}

	return addresses, nil
}

// parsePrefixes parses addresses with a prefix length. The length is required, since no range provides one.
func parsePrefixes(source string, texts []string) ([]addressConf, error) {
	var addresses []addressConf
	for _, text := range texts {
		prefix, err := netip.ParsePrefix(text)
		if err != nil {
			return nil, newError(codeInvalidConfig,
				"%s: %q is not an address with a prefix length, like \"10.1.0.5/24\"", source, text)
		}
		addresses = append(addresses, addressConf{Address: prefix})
	}

	return addresses, nil
}

// Bind returns s, since static needs nothing from the node.
func (s static) Bind(ipam.Node) ipam.Allocator { return s }

// Slow returns false, since static runs no other program.
func (static) Slow() bool { return false }

// Add returns the addresses, IPv4 first. Without addresses it returns an error, except under a reference plugin's
// name: there the calling plugin reports this.
func (s static) Add(context.Context, ipam.Owner) (*ipam.Allocation, error) {
	if len(s.addresses) == 0 && !s.byName {
		return nil, newError(codeInvalidConfig,
			`network %q: static has no address to give: set "ipam.addresses", or ask for one `+
				"by the capability ips, args.cni.ips or CNI_ARGS IP", s.network)
	}

	addresses := slices.Clone(s.addresses)
	slices.SortStableFunc(addresses, func(a, b ipam.Address) int {
		return a.Prefix.Addr().BitLen() - b.Prefix.Addr().BitLen()
	})
	return &ipam.Allocation{Addresses: addresses}, nil
}

// Check returns an error unless held, which comes from prevResult, contains the addresses with their gateways. Under a
// reference plugin's name, Check ignores addresses that held lacks, as the reference plugin does.
func (s static) Check(_ context.Context, _ ipam.Owner, held []ipam.Address) error {
	for _, a := range s.addresses {
		same := func(b ipam.Address) bool { return a.Prefix.Addr() == b.Prefix.Addr() }
		i := slices.IndexFunc(held, func(b ipam.Address) bool {
			isOpen := !a.Gateway.IsValid() || a.Gateway.IsUnspecified()
			return same(b) && (isOpen || a.Gateway.Unmap() == b.Gateway.Unmap())
		})
		if i < 0 && (!s.byName || slices.ContainsFunc(held, same)) {
			return withCode(codeCheckFailed, fmt.Errorf("the attachment has no address %s: %w", a, ipam.ErrNotReserved))
		}
	}

	return nil
}

// Del does nothing, since nothing is reserved.
func (static) Del(context.Context, ipam.Owner, []netip.Addr) error { return nil }

// Collect does nothing, since nothing is reserved.
func (static) Collect(context.Context, []ipam.Owner) error { return nil }

// Status returns nil, since the runtime may pass addresses with each ADD.
func (static) Status(context.Context) error { return nil }
