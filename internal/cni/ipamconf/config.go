package ipamconf

import (
	"fmt"
	"net/netip"
	"strings"

	"github.com/tombolo-cni/tombolo/internal/strict"
	"github.com/tombolo-cni/tombolo/ipam"
)

// A netconf is what the in-process types read of one: the generic parts, and
// their own ipam section S.
type netconf[S any] struct {
	IPAM          S `json:"ipam"`
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
			return nil, newError(codeInvalidConfig, "requested address %q is not an IP address", text)
		}
		list = append(list, addr)
	}
	return list, nil
}
