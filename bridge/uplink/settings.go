package uplink

import (
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"slices"
	"sort"
	"strconv"
	"strings"

	"github.com/tombolo-cni/tombolo"
	"github.com/tombolo-cni/tombolo/internal/sysctl"
)

// Directories of per-link parameters below /proc/sys/net.
const (
	conf4  = "ipv4/conf/"
	conf6  = "ipv6/conf/"
	neigh4 = "ipv4/neigh/"
	neigh6 = "ipv6/neigh/"
)

// Parameters of all links that the plan looks at.
const (
	forwarding6All = conf6 + "all/forwarding"
	rpFilterAll    = conf4 + "all/rp_filter"
)

// readSettings reads the parameters of links, in the namespace of the calling
// thread. A directory that is not there, that of IPv6 on a link whose MTU is too
// small, say, has none.
func readSettings(links []string) (map[string]string, error) {
	settings := map[string]string{}
	for _, link := range links {
		for _, dir := range []string{conf4, conf6, neigh4, neigh6} {
			if err := readDir(settings, dir+link); err != nil {
				return nil, err
			}
		}
	}
	for _, path := range []string{forwarding6All, rpFilterAll} {
		if err := readSetting(settings, path); err != nil {
			return nil, err
		}
	}
	return settings, nil
}

func readDir(settings map[string]string, dir string) error {
	entries, err := os.ReadDir("/proc/sys/net/" + dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return &tombolo.OpError{Op: "list", Object: "/proc/sys/net/" + dir, Err: err}
	}
	for _, e := range entries {
		if err := readSetting(settings, dir+"/"+e.Name()); err != nil {
			return err
		}
	}
	return nil
}

// readSetting passes over what cannot be read: stable_secret is not there (EIO) until
// it is set.
func readSetting(settings map[string]string, path string) error {
	value, err := sysctl.Read("net/" + path)
	if err == nil {
		settings[path] = value
	}
	return nil
}

// readDefaults reads the parameters that a new link gets, where a link has others: the
// rest need not be recorded.
func readDefaults(settings map[string]string, link string) error {
	all := map[string]string{}
	for _, dir := range []string{conf4, conf6, neigh4, neigh6} {
		if err := readDir(all, dir+newLink); err != nil {
			return err
		}
	}
	for path, value := range all {
		if own, _ := renamed(path, newLink, link); settings[own] != value {
			settings[path] = value
		}
	}
	return nil
}

// newLink stands in a path for links that are made from now on; no link can have the
// name.
const newLink = "default"

// setting is a parameter that is to be set.
type setting struct{ path, value string }

func (s setting) String() string { return "set net/" + s.path + " to " + s.value }

// write sets it, in the namespace of the calling thread.
func (s setting) write() error {
	_, err := sysctl.Ensure("net/"+s.path, s.value)
	return err
}

// notCopied are parameters that are not a matter of taste: what the kernel computes
// from others or lets nobody write, and those that the plan sets by itself.
func notCopied(path string) bool {
	switch {
	case strings.HasPrefix(path, neigh4), strings.HasPrefix(path, neigh6):
		switch name(path) {
		case "base_reachable_time", "retrans_time", "unres_qlen": // shown in a better unit by others
			return true
		}
	case strings.HasPrefix(path, conf4):
		switch name(path) {
		case "mc_forwarding", "rp_filter", "arp_filter":
			return true
		}
	case strings.HasPrefix(path, conf6):
		switch name(path) {
		case "mc_forwarding", "stable_secret", "addr_gen_mode", "mtu", "accept_ra":
			return true
		}
	}
	return false
}

// name gives the last part of a path.
func name(path string) string { return path[strings.LastIndexByte(path, '/')+1:] }

// of gives a parameter of a link.
func (s *Snapshot) of(dir, link, name string) string { return s.Settings[dir+link+"/"+name] }

// copied gives what the bridge is to have of the NIC's parameters, where it differs.
// Of a bridge that is not there yet, nothing is known, and all of it is given.
func (s *Snapshot) copied(bridge string) []setting {
	var list []setting
	for _, path := range slices.Sorted(maps.Keys(s.Settings)) {
		to, ours := renamed(path, s.NIC.Name, bridge)
		if !ours || notCopied(path) {
			continue
		}
		if have, known := s.Settings[to]; known && have == s.Settings[path] {
			continue
		}
		list = append(list, setting{to, s.Settings[path]})
	}
	// IPv6 off takes all IPv6 parameters of a link along if it goes first, and is not
	// to be on for a moment: so it is the first.
	first := func(s setting) bool { return name(s.path) == "disable_ipv6" }
	sort.SliceStable(list, func(i, j int) bool { return first(list[i]) && !first(list[j]) })
	return list
}

// told are those of what is copied that an operator has to be told of: of a bridge that
// is not there yet, those that a new link gets otherwise. What it gets for its neighbours
// the kernel shows in the first namespace only, and elsewhere nothing is told of them.
func (s *Snapshot) told(list []setting, bridge string) []setting {
	return slices.DeleteFunc(slices.Clone(list), func(p setting) bool {
		path, _ := renamed(p.path, bridge, newLink)
		_, differs := s.Settings[path]
		return s.Bridge == nil && !differs
	})
}

// renamed gives the path of the same parameter of another link; false for one that
// is not the first link's.
func renamed(path, from, to string) (string, bool) {
	for _, dir := range []string{conf4, conf6, neigh4, neigh6} {
		if rest, ok := strings.CutPrefix(path, dir+from+"/"); ok && !strings.Contains(rest, "/") {
			return dir + to + "/" + rest, true
		}
	}
	return "", false
}

// acceptsRA says that the kernel itself follows router advertisements on a link.
func (s *Snapshot) acceptsRA(link string) bool {
	switch s.of(conf6, link, "accept_ra") {
	case "2":
		return s.of(conf6, link, "disable_ipv6") != "1"
	case "1":
		return s.of(conf6, link, "forwarding") == "0" && s.of(conf6, link, "disable_ipv6") != "1"
	}
	return false
}

// acceptRA is what a link's accept_ra has to be, so that what was learnt from
// routers on the NIC goes on being refreshed: forwarding, which somebody else may
// have switched on since, makes the kernel ignore 1.
func (s *Snapshot) acceptRA(asked string) string {
	if asked == "1" && s.Settings[forwarding6All] != "0" && s.Settings[forwarding6All] != "" {
		return "2"
	}
	return asked
}

// raPriority is the priority that the kernel gives default routes which it learns
// from routers (ra_defrtr_metric, Linux 5.12).
func (s *Snapshot) raPriority(link string) uint32 {
	n, err := strconv.ParseUint(s.of(conf6, link, "ra_defrtr_metric"), 10, 32)
	if err != nil || n == 0 {
		return 1024 // IP6_RT_PRIO_USER
	}
	return uint32(n)
}

// mtu6 says that IPv6 has a smaller MTU than its link, as routers may ask for.
func (s *Snapshot) mtu6(link string, mtu int) (string, bool) {
	value := s.of(conf6, link, "mtu")
	return value, value != "" && value != fmt.Sprint(mtu)
}
