package uplink

import (
	"maps"
	"path/filepath"
	"slices"
	"strings"

	"github.com/tombolo-cni/tombolo/internal/sysctl"
)

// conf4 is the directory of links' parameters of IPv4 below /proc/sys/net.
const conf4 = "ipv4/conf/"

// readSettings reads the parameters of links (conf and neigh), in the calling thread's namespace.
// Some cannot be read, such as a stable_secret that is not set (EIO).
func readSettings(links ...string) map[string]string {
	const dir = "/proc/sys/net/"
	var patterns []string
	for _, link := range links {
		patterns = append(patterns, "ipv?/*/"+link+"/*")
	}
	settings := map[string]string{}
	for _, p := range patterns {
		paths, _ := filepath.Glob(dir + p)
		for _, path := range paths {
			path = strings.TrimPrefix(path, dir)
			if value, err := sysctl.Read("net/" + path); err == nil {
				settings[path] = value
			}
		}
	}
	return settings
}

// setting is a parameter that is to be set.
type setting struct{ path, value string }

// write sets parameters in the calling thread's namespace, of those that this kernel has.
func write(list []setting) error {
	var first error
	for _, s := range list {
		if _, err := sysctl.Ensure("net/"+s.path, s.value); err != nil && !isGone(err) && first == nil {
			first = err
		}
	}
	return first
}

// isCopied leaves out parameters that the kernel computes, those that cannot be written, and those that loose and
// strict set.
func isCopied(name string) bool {
	switch name {
	case "base_reachable_time", "retrans_time", "unres_qlen", // shown in a better unit by others
		"mc_forwarding", "stable_secret", "rp_filter", "arp_filter", "addr_gen_mode", "mtu":
		return false
	}
	return true
}

// of gives a parameter of a link.
func (s *snapshot) of(dir, link, name string) string { return s.Settings[dir+link+"/"+name] }

// copied gives what the bridge is to have of the NIC's parameters.
func (s *snapshot) copied(bridge string) []setting {
	var list []setting
	for _, path := range slices.Sorted(maps.Keys(s.Settings)) {
		parts := strings.Split(path, "/") // ipv4/conf/eth0/proxy_arp
		if len(parts) == 4 && parts[2] == s.NIC.Name && isCopied(parts[3]) {
			list = append(list, setting{strings.Join([]string{parts[0], parts[1], bridge, parts[3]}, "/"), s.Settings[path]})
		}
	}
	return list
}

// loose is for the time in which packets come in by the bridge and their answers still go by the
// NIC: a strict check of the source would drop them, and a filter leave ARP requests unanswered.
func (s *snapshot) loose(bridge string) []setting {
	list := []setting{{conf4 + bridge + "/rp_filter", "2"}, {conf4 + bridge + "/arp_filter", "0"}}
	return list
}

// strict are the same, as the NIC has them.
func (s *snapshot) strict(bridge string) []setting {
	var list []setting
	for _, name := range []string{"rp_filter", "arp_filter"} {
		if value := s.of(conf4, s.NIC.Name, name); value != "" {
			list = append(list, setting{conf4 + bridge + "/" + name, value})
		}
	}
	return list
}

// looseBack is loose for the way back: routes go by the NIC while packets still come in by the bridge.
func (s *snapshot) looseBack(rec *Record) []setting {
	if s.Bridge.Index == noLink {
		return nil
	}
	return s.loose(rec.Bridge)
}
