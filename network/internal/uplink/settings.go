package uplink

import (
	"errors"
	"path/filepath"
	"slices"
	"strings"

	"github.com/tombolo-cni/tombolo/internal/sysctl"
)

// copySettings copies the kernel parameters (conf and neigh) of a NIC to a bridge. It leaves out those that cannot be
// read, such as an unset stable_secret, that a bridge does not have, or that setSourceChecks sets.
func copySettings(nic, bridge string) error {
	const root = "/proc/sys/"
	others := []string{"base_reachable_time", "retrans_time", "unres_qlen", // others show these values in a better unit
		"mc_forwarding", "stable_secret", "addr_gen_mode", "mtu", "rp_filter", "arp_filter"}
	paths, _ := filepath.Glob(root + "net/ipv?/*/" + nic + "/*")
	var errs []error
	for _, path := range paths {
		from := strings.TrimPrefix(path, root)
		value, err := sysctl.Read(from)
		if err != nil || slices.Contains(others, filepath.Base(path)) {
			continue
		}
		to := strings.Replace(from, "/"+nic+"/", "/"+bridge+"/", 1)
		if _, err := sysctl.Ensure(to, value); !isGone(err) {
			errs = append(errs, err)
		}
	}

	return errors.Join(errs...)
}

// setSourceChecks gives a bridge the NIC's parameters rp_filter and arp_filter. Without a NIC it sets loose ones, for
// the time when packets come in by the bridge and their replies leave by the NIC, or the reverse: a strict source check
// would drop these packets, and arp_filter would leave ARP requests unanswered.
func setSourceChecks(bridge, nic string) (err error) {
	for name, value := range map[string]string{"rp_filter": "2", "arp_filter": "0"} {
		if nic != "" {
			value, err = sysctl.Read(sysctl.Link("ipv4", nic, name))
		}
		if err == nil {
			_, err = sysctl.Ensure(sysctl.Link("ipv4", bridge, name), value)
		}
		if err != nil && !isGone(err) {
			return err
		}
	}

	return nil
}
