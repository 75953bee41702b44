package uplink

import (
	"errors"
	"os"
	"path/filepath"
	"strings"

	"github.com/tombolo-cni/tombolo/internal/sysctl"
)

// copySettings copies the kernel parameters (conf and neigh) of a NIC to a bridge, in the calling thread's namespace.
// It leaves out those that cannot be read, such as an unset stable_secret, and those that a bridge does not have.
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

// isCopied reports whether a parameter is copied. It is not if the kernel computes it, if it cannot be written, or if
// loosen and tighten set it.
func isCopied(name string) bool {
	switch name {
	case "base_reachable_time", "retrans_time", "unres_qlen", // others show these values in a better unit
		"mc_forwarding", "stable_secret", "rp_filter", "arp_filter", "addr_gen_mode", "mtu":
		return false
	}
	return true
}

// loosen sets parameters for the time when packets come in by the bridge and their replies leave by the NIC, or the
// reverse. A strict source check would drop these packets, and arp_filter would leave ARP requests unanswered.
func loosen(bridge string) error {
	for name, value := range map[string]string{"rp_filter": "2", "arp_filter": "0"} {
		if _, err := sysctl.Ensure(sysctl.Link("ipv4", bridge, name), value); err != nil && !isGone(err) {
			return err
		}
	}
	return nil
}

// tighten sets the parameters of loosen to the NIC's values.
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
