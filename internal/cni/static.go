package cni

import (
	"cmp"
	"fmt"
	"net/netip"

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

// static decodes an ipam section of type static into a, with the addresses that the runtime or CNI_ARGS request. It
// returns an error for an invalid address, gateway or route.
func (a *allocator) static(r *ipamRequest) error {
	var conf staticConf
	if err := r.read(&conf); err != nil {
		return err
	}

	if r.Section.JSON == nil {
		return newError(codeInvalidConfig, `network %q: static needs the field "ipam"`, r.Network)
	}

	args, argsErr := parseArgs(r.Args)
	addresses, err := staticAddresses(conf.Addresses, args, &r.RequestedAddresses)
	if err := cmp.Or(argsErr, err); err != nil {
		return err
	}

	for i, one := range addresses {
		if !one.Address.IsValid() {
			return newError(codeInvalidConfig, "field \"ipam.addresses[%d].address\" is required", i)
		}
		if one.Gateway.Zone() != "" {
			return newError(codeInvalidConfig, "field \"ipam.addresses[%d].gateway\": %s has a zone", i, one.Gateway)
		}
		a.given = append(a.given, ipam.Address{Prefix: one.Address, Gateway: one.Gateway.Unmap()})
	}

	switch {
	case r.ByName:
		a.reported = a.given
	case len(a.given) == 0:
		a.noRanges = newError(codeInvalidConfig,
			`network %q: static has no address to give: set "ipam.addresses", or ask for one `+
				"by the capability ips, args.cni.ips or CNI_ARGS IP", r.Network)
	}

	a.addGateways(a.given)
	a.dns = conf.DNS
	a.routes, err = routes(conf.Routes)
	return err
}

// staticAddresses returns the addresses from the first source that has any, as the reference plugin does. The sources
// are runtimeConfig.ips, then args.cni.ips, then the section's addresses together with IP in CNI_ARGS. GATEWAY in
// CNI_ARGS sets the gateway of an address of the last source if the address's subnet contains the gateway.
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

// parsePrefixes parses addresses with a prefix length, which is required. source names the origin of the texts, for
// errors.
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

// checkGiven returns an error if held, the addresses in prevResult, has an address of the section with another gateway.
// As in the reference plugin static, the address may be missing in held. An address without a gateway in the section
// matches every gateway.
func (s *ipamSection) checkGiven(held []ipam.Address) error {
	for _, a := range s.given {
		for _, b := range held {
			isOpen := !a.Gateway.IsValid() || a.Gateway.IsUnspecified()
			if a.Prefix.Addr() == b.Prefix.Addr() && !isOpen && a.Gateway != b.Gateway.Unmap() {
				err := fmt.Errorf("the attachment has no address %s: %w", a, ipam.ErrNotReserved)
				return withCode(codeCheckFailed, err)
			}
		}
	}
	return nil
}
