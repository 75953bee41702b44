package cni

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/tombolo-cni/tombolo/internal/strict"
	"github.com/tombolo-cni/tombolo/ipam"
)

// A Section is the field ipam of a configuration. JSON holds the whole section. newAllocator decodes and checks it for
// our own types, except dhcp, for which NetConf.dhcp does. Other types belong to plugins, which read it themselves.
type Section struct {
	Type            string          `json:"type"`
	DataDir         string          `json:"dataDir"`
	DetectConflicts *bool           `json:"detectConflicts"`
	JSON            json.RawMessage `json:"-"`
}

// UnmarshalJSON stores the section, and decodes the fields of Section. It ignores errors in them, since a later check
// of the whole section finds them again. null counts as a missing section.
func (s *Section) UnmarshalJSON(data []byte) error {
	if string(data) == "null" {
		return nil
	}

	type fields Section // without this method
	decoded := fields{JSON: slices.Clone(data)}
	strict.Part("ipam", data, &decoded, strict.Everything)
	*s = Section(decoded)
	return nil
}

// isEmpty reports whether a JSON object is missing, null or {}.
func isEmpty(data json.RawMessage) bool {
	return slices.Contains([]string{"", "null", "{}"}, strings.Join(strings.Fields(string(data)), ""))
}

// RequestedAddresses holds requests for addresses that come from the runtime or the pod, in addition to the ipam
// section.
type RequestedAddresses struct {
	IPRanges [][]ipam.Range `json:"ipRanges"` // capability ipRanges
	IPs      []string       `json:"ips"`      // capability ips
	ArgIPs   []string       `json:"-"`        // args.cni.ips

	AnnotatedIPs []string `json:"-"` // the pod's annotation
}

// hostLocalConf is the ipam section of type host-local.
type hostLocalConf struct {
	Type       string         `json:"type"`
	ipam.Range                // the fields of a single range
	Ranges     [][]ipam.Range `json:"ranges"`
	Routes     []routeConf    `json:"routes"`
	DataDir    string         `json:"dataDir"`
	ResolvConf string         `json:"resolvConf"`
	Keep       bool           `json:"keep"`
}

// read decodes the ipam section into the given struct. It ignores unknown fields if ByName is set or the request is not
// strict. In any other request, unknown fields are errors, except keys that begin with an underscore (comments), and
// detectConflicts, which Section decodes.
func (r *ipamRequest) read(into any) error {
	if isEmpty(r.Section.JSON) {
		return nil
	}

	others := func(_, key string) bool {
		return !r.Strict || r.ByName || strings.HasPrefix(key, "_") || key == "detectConflicts" &&
			r.Section.DetectConflicts != nil
	}
	problems := strict.Part("ipam", r.Section.JSON, into, others)
	if r.All {
		return configError(errors.Join(problems...))
	}
	return configError(problems.First())
}

// sets returns the range sets in the reference plugin's order, which is part of the format on disk. First come the sets
// of runtimeConfig, then the range in the section itself, then the sets of ipam.ranges. Each set has its field's name,
// for errors.
func (h *hostLocalConf) sets(requested *RequestedAddresses) []ipam.RangeSet {
	var sets []ipam.RangeSet
	addAll := func(field string, confs [][]ipam.Range) {
		for i, ranges := range confs {
			sets = append(sets, ipam.RangeSet{Name: fmt.Sprintf("%s[%d]", field, i), Ranges: ranges})
		}
	}
	addAll("runtimeConfig.ipRanges", requested.IPRanges)
	if h.Range != (ipam.Range{}) {
		h.Range.Name = "ipam"
		sets = append(sets, ipam.RangeSet{Name: "ipam", Ranges: []ipam.Range{h.Range}})
	}

	addAll("ipam.ranges", h.Ranges)
	return sets
}

// parseRequested parses requested addresses, with or without a prefix length. It ignores the prefix length, since the
// address's range has its own.
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
