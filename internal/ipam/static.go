package ipam

import (
	"context"
	"net"
	"net/netip"
	"slices"

	"github.com/containernetworking/cni/pkg/types"
	current "github.com/containernetworking/cni/pkg/types/100"
)

// staticConf is the ipam section of static.
type staticConf struct {
	Type      string        `json:"type"`
	Addresses []addressConf `json:"addresses"`
	Routes    []routeConf   `json:"routes"`
	DNS       dnsConf       `json:"dns"`
}

type addressConf struct {
	Address netip.Prefix `json:"address"`
	Gateway netip.Addr   `json:"gateway"`
}

// dnsConf is the library's DNS, here so that a change of that does not change
// what our configs take.
type dnsConf struct {
	Nameservers []string `json:"nameservers"`
	Domain      string   `json:"domain"`
	Search      []string `json:"search"`
	Options     []string `json:"options"`
}

// static gives the addresses that the config or the caller names. Nothing is
// reserved: whether they are free is up to who named them.
type static struct {
	network string
	confErr error

	addresses []addressConf
	routes    []*types.Route
	dns       types.DNS
}

func newStatic(r *Request) (Allocator, error) {
	s := &static{network: r.Network}
	s.confErr = s.configure(r)
	if s.confErr != nil && r.Strict {
		return nil, s.confErr
	}
	return s, nil
}

// configure decodes the netconf.
func (s *static) configure(r *Request) error {
	var conf netconf[staticConf]
	if err := conf.load(r); err != nil {
		return err
	}
	args, err := parseArgs(r.Args)
	if err != nil {
		return err
	}
	s.addresses, err = staticAddresses(&conf, args)
	if err != nil {
		return err
	}
	var addrs []netip.Addr
	for i, a := range s.addresses {
		if !a.Address.IsValid() {
			return newError(codeInvalidConfig, nil, "field \"ipam.addresses[%d].address\" is required", i)
		}
		if a.Gateway.Zone() != "" {
			return newError(codeInvalidConfig, nil, "field \"ipam.addresses[%d].gateway\": %s has a zone", i, a.Gateway)
		}
		addrs = append(addrs, a.Address.Addr())
	}
	if err := conf.checkFamilies(addrs); err != nil {
		return err
	}
	if s.routes, err = routes(conf.IPAM.Routes); err != nil {
		return err
	}
	s.dns = types.DNS(conf.IPAM.DNS)
	return nil
}

// staticAddresses merges the four sources in the order of the reference plugin:
// CNI_ARGS adds to the config's addresses and sets their gateways, args.cni.ips
// replaces all of that, and runtimeConfig.ips replaces it again.
func staticAddresses(conf *netconf[staticConf], args *envArgs) ([]addressConf, error) {
	addresses := slices.Clone(conf.IPAM.Addresses)
	added, err := parsePrefixes("CNI_ARGS IP", args.ips)
	if err != nil {
		return nil, err
	}
	addresses = append(addresses, added...)
	for _, text := range args.gateways {
		gateway, err := netip.ParseAddr(text)
		if err != nil || gateway.Zone() != "" {
			return nil, newError(codeInvalidEnv, err, "CNI_ARGS GATEWAY: %q is not an IP address", text)
		}
		for i := range addresses {
			if addresses[i].Address.Contains(gateway) {
				addresses[i].Gateway = gateway
			}
		}
	}
	for _, source := range []struct {
		name  string
		texts []string
	}{
		{"args.cni.ips", conf.Args.CNI.IPs},
		{"runtimeConfig.ips", conf.RuntimeConfig.IPs},
	} {
		if len(source.texts) == 0 {
			continue
		}
		if addresses, err = parsePrefixes(source.name, source.texts); err != nil {
			return nil, err
		}
	}
	return addresses, nil
}

// parsePrefixes reads addresses that need a prefix length, as there is no range
// to take it from.
func parsePrefixes(source string, texts []string) ([]addressConf, error) {
	var addresses []addressConf
	for _, text := range texts {
		prefix, err := netip.ParsePrefix(text)
		if err != nil {
			return nil, newError(codeInvalidConfig, err, "%s: %q is not an address with a prefix length, like \"10.1.0.5/24\"", source, text)
		}
		addresses = append(addresses, addressConf{Address: prefix})
	}
	return addresses, nil
}

// Add returns the addresses. That there are none is an error: static without an
// address is a mistake.
func (s *static) Add(context.Context) (*current.Result, error) {
	if s.confErr != nil {
		return nil, s.confErr
	}
	if len(s.addresses) == 0 {
		return nil, newError(codeInvalidConfig, nil, `network %q: static has no address to give: set "ipam.addresses", or ask for one `+
			"by the capability ips, args.cni.ips or CNI_ARGS IP", s.network)
	}
	result := &current.Result{CNIVersion: current.ImplementedSpecVersion, Routes: s.routes, DNS: s.dns}
	for _, a := range s.addresses {
		config := &current.IPConfig{Address: net.IPNet{
			IP:   a.Address.Addr().AsSlice(),
			Mask: net.CIDRMask(a.Address.Bits(), a.Address.Addr().BitLen()),
		}}
		if a.Gateway.IsValid() {
			config.Gateway = a.Gateway.Unmap().AsSlice()
		}
		result.IPs = append(result.IPs, config)
	}
	sortIPs(result.IPs)
	return result, nil
}

// Del has nothing to release.
func (s *static) Del(context.Context, []netip.Addr) error { return nil }

// GC has nothing to release.
func (s *static) GC(context.Context, []Owner) error { return nil }

// Check compares the addresses and their gateways with those of prev.
func (s *static) Check(_ context.Context, prev *current.Result) error {
	if s.confErr != nil {
		return s.confErr
	}
	for _, a := range s.addresses {
		if !slices.ContainsFunc(prevIPs(prev), func(ip *current.IPConfig) bool { return sameAddress(a, ip) }) {
			return newError(CodeCheckFailed, ErrNotReserved, "network %q: prevResult has no address %s with gateway %s, which the config names",
				s.network, a.Address, a.Gateway)
		}
	}
	return nil
}

func prevIPs(prev *current.Result) []*current.IPConfig {
	if prev == nil {
		return nil
	}
	return prev.IPs
}

// sameAddress compares the address, and the gateway if the config names one.
func sameAddress(a addressConf, ip *current.IPConfig) bool {
	if ip == nil {
		return false
	}
	addr, _ := netip.AddrFromSlice(ip.Address.IP)
	gateway, _ := netip.AddrFromSlice(ip.Gateway)
	return addr.Unmap() == a.Address.Addr() && (!a.Gateway.IsValid() || gateway.Unmap() == a.Gateway.Unmap())
}

// Status is always good once the config is: the addresses may come with each
// ADD.
func (s *static) Status(context.Context) error { return s.confErr }
