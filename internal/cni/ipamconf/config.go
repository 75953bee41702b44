package ipamconf

import (
	"fmt"
	"net"
	"net/netip"
	"strings"

	"github.com/containernetworking/cni/pkg/types"

	"github.com/tombolo-cni/tombolo/internal/strict"
	"github.com/tombolo-cni/tombolo/ipam"
)

// A netconf is what the in-process types read of one: the generic parts, and
// their own ipam section S.
type netconf[S any] struct {
	CNIVersion    string `json:"cniVersion"`
	IPAM          S      `json:"ipam"`
	RuntimeConfig struct {
		IPRanges [][]rangeConf `json:"ipRanges"` // capability ipRanges
		IPs      []string      `json:"ips"`      // capability ips
	} `json:"runtimeConfig"`
	Args struct {
		CNI struct {
			IPs []string `json:"ips"`
		} `json:"cni"`
	} `json:"args"`
}

// hostLocalConf is the ipam section of host-local.
type hostLocalConf struct {
	Type       string        `json:"type"`
	rangeConf                // the form with a single range
	Ranges     [][]rangeConf `json:"ranges"`
	Routes     []routeConf   `json:"routes"`
	DataDir    string        `json:"dataDir"`
	ResolvConf string        `json:"resolvConf"`
}

// rangeConf is ipam.Range as a config has it.
type rangeConf struct {
	Subnet     netip.Prefix `json:"subnet"`
	RangeStart netip.Addr   `json:"rangeStart"`
	RangeEnd   netip.Addr   `json:"rangeEnd"`
	Gateway    netip.Addr   `json:"gateway"`
}

// routeConf has the fields of the library's route (CNI specification 1.1.0,
// "Add Success"). That one decodes itself, and so hides unknown fields.
type routeConf struct {
	Dst      netip.Prefix `json:"dst"`
	GW       netip.Addr   `json:"gw"`
	MTU      int          `json:"mtu"`
	AdvMSS   int          `json:"advmss"`
	Priority int          `json:"priority"`
	Table    *int         `json:"table"`
	Scope    *int         `json:"scope"`
}

// load decodes the netconf into c. Where r is strict, and not by name, unknown
// fields inside of ipam are errors.
func (c *netconf[S]) load(r *Request) error {
	exempt := outsideIPAM
	if !r.Strict || r.ByName {
		exempt = func(string, string) bool { return true }
	}
	if r.All {
		return ConfigError(strict.All(r.Stdin, c, exempt))
	}
	return ConfigError(strict.Unmarshal(r.Stdin, c, exempt))
}

// getsRanges reports whether the runtime is asked to hand ranges over.
func (r *Request) getsRanges() bool {
	var c struct {
		Capabilities struct {
			IPRanges bool `json:"ipRanges"`
		} `json:"capabilities"`
	}
	return strict.Lenient(r.Stdin, &c) == nil && c.Capabilities.IPRanges
}

// oneAddressPerFamily reports whether the config's version is one whose result
// holds at most one address of each family: those before 0.3.0, of which there
// are two. No version is 0.1.0.
func (c *netconf[S]) oneAddressPerFamily() bool {
	return c.CNIVersion == "" || c.CNIVersion == "0.1.0" || c.CNIVersion == "0.2.0"
}

// sets are the ranges of the config in the reference's order, which is part of the format
// on disk: runtimeConfig comes first, then the inline range. Errors call them by their
// fields.
func (c *netconf[S]) sets(h *hostLocalConf) []ipam.RangeSet {
	var sets []ipam.RangeSet
	addAll := func(field string, confs [][]rangeConf) {
		for i, ranges := range confs {
			set := ipam.RangeSet{Name: fmt.Sprintf("%s[%d]", field, i)}
			for _, r := range ranges {
				set.Ranges = append(set.Ranges, r.named(""))
			}
			sets = append(sets, set)
		}
	}
	addAll("runtimeConfig.ipRanges", c.RuntimeConfig.IPRanges)
	if h.rangeConf != (rangeConf{}) {
		sets = append(sets, ipam.RangeSet{Name: "ipam", Ranges: []ipam.Range{h.named("ipam")}})
	}
	addAll("ipam.ranges", h.Ranges)
	return sets
}

func (r rangeConf) named(name string) ipam.Range {
	return ipam.Range{Subnet: r.Subnet, RangeStart: r.RangeStart, RangeEnd: r.RangeEnd, Gateway: r.Gateway, Name: name}
}

// checkFamilies refuses more addresses than the config's version can name.
func (c *netconf[S]) checkFamilies(addresses []netip.Addr) error {
	v4, v6 := 0, 0
	for _, addr := range addresses {
		if addr.Is4() {
			v4++
		} else {
			v6++
		}
	}
	if c.oneAddressPerFamily() && (v4 > 1 || v6 > 1) {
		return newError(codeInvalidConfig, nil, "cniVersion %q allows one address of each family, the config asks for %d of IPv4 and %d of IPv6: "+
			"use 0.3.0 or later", c.CNIVersion, v4, v6)
	}
	return nil
}

// routes converts the routes of the config for the result.
func routes(confs []routeConf) ([]*types.Route, error) {
	var result []*types.Route
	for i, conf := range confs {
		route, err := conf.route(i)
		if err != nil {
			return nil, err
		}
		result = append(result, route)
	}
	return result, nil
}

// route is the config's i-th.
func (conf *routeConf) route(i int) (*types.Route, error) {
	if !conf.Dst.IsValid() {
		return nil, newError(codeInvalidConfig, nil, "field \"ipam.routes[%d].dst\" is required", i)
	}
	if conf.GW.Zone() != "" {
		return nil, newError(codeInvalidConfig, nil, "field \"ipam.routes[%d].gw\": %s has a zone", i, conf.GW)
	}
	route := &types.Route{
		Dst: net.IPNet{
			IP:   conf.Dst.Addr().AsSlice(),
			Mask: net.CIDRMask(conf.Dst.Bits(), conf.Dst.Addr().BitLen()),
		},
		MTU:      conf.MTU,
		AdvMSS:   conf.AdvMSS,
		Priority: conf.Priority,
		Table:    conf.Table,
		Scope:    conf.Scope,
	}
	if conf.GW.IsValid() {
		route.GW = conf.GW.Unmap().AsSlice()
	}
	return route, nil
}

// salvageDataDir reads ipam.dataDir from a config that cannot be read as a
// whole.
func salvageDataDir(stdin []byte) string {
	var conf struct {
		IPAM struct {
			DataDir string `json:"dataDir"`
		} `json:"ipam"`
	}
	// What is wrong has been reported, or does not matter to DEL and GC.
	_ = strict.Lenient(stdin, &conf)
	return conf.IPAM.DataDir
}

// parseRequested reads addresses that were asked for, with or without a
// prefix length, which does not matter here: the range that holds the address
// has its own.
func parseRequested(texts []string) ([]netip.Addr, error) {
	var list []netip.Addr
	for _, text := range texts {
		addr, err := netip.ParseAddr(text)
		if strings.Contains(text, "/") {
			var prefix netip.Prefix
			prefix, err = netip.ParsePrefix(text)
			addr = prefix.Addr()
		}
		if err != nil || addr.Zone() != "" {
			return nil, newError(codeInvalidConfig, err, "requested address %q is not an IP address", text)
		}
		list = append(list, addr)
	}
	return list, nil
}
