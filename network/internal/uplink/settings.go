package uplink

import (
	"errors"
	"os"
	"path/filepath"
	"strings"

	"github.com/tombolo-cni/tombolo/internal/sysctl"
)

// copySettings gives a bridge the kernel parameters of a NIC (conf and neigh), in the calling thread's namespace. It
// leaves out those that cannot be read, such as a stable_secret that is not set, and those that a bridge does not have.
func copySettings(nic, bridge string) error {
	const root = "/proc/sys/"
	paths, _ := filepath.Glob(root + "net/ipv?/*/" + nic + "/*")
	var errs []error
	for _, path := range paths {
		from := strings.TrimPrefix(path, root)
		value, err := sysctl.Read(from)
		if err != nil || !isCopied(filepath.Base(path)) {
			continue
		}
		to := strings.Replace(from, "/"+nic+"/", "/"+bridge+"/", 1)
		if _, err := sysctl.Ensure(to, value); !isGone(err) {
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}

// isCopied leaves out parameters that the kernel computes, those that cannot be written, and those that loosen and
// tighten set.
func isCopied(name string) bool {
	switch name {
	case "base_reachable_time", "retrans_time", "unres_qlen", // shown in a better unit by others
		"mc_forwarding", "stable_secret", "rp_filter", "arp_filter", "addr_gen_mode", "mtu":
		return false
	}
	return true
}

// loosen is for the time in which packets come in by the bridge and their answers still go by the NIC, or the other way
// round: a strict check of the source would drop them, and a filter leave ARP requests unanswered.
func loosen(bridge string) error {
	for name, value := range map[string]string{"rp_filter": "2", "arp_filter": "0"} {
		if _, err := sysctl.Ensure(sysctl.Link("ipv4", bridge, name), value); err != nil && !isGone(err) {
			return err
		}
	}
	return nil
}

// tighten gives the bridge the parameters that loosen sets, as the NIC has them.
func tighten(nic, bridge string) error {
	for _, name := range []string{"rp_filter", "arp_filter"} {
		value, err := sysctl.Read(sysctl.Link("ipv4", nic, name))
		if err == nil {
			_, err = sysctl.Ensure(sysctl.Link("ipv4", bridge, name), value)
		}
		if err != nil && !errors.Is(err, os.ErrNotExist) {
			return err
		}
	}
	return nil
}
