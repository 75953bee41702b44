package bridge

import (
	"errors"
	"fmt"

	"github.com/tombolo-cni/tombolo"
	"github.com/tombolo-cni/tombolo/internal/sysctl"
)

// ErrNoNetfilter is the cause where a bridge is to show its packets to the firewall
// (Bridge.NFCall) and this kernel, in its present state, has nothing that does so.
var ErrNoNetfilter = errors.New("bridged packets do not pass the firewall")

// ProbeNetfilter asks whether the kernel module br_netfilter is there, without which
// NFCall has no effect: nil, or an ErrNoNetfilter that says what to do. Nothing here
// loads the module; once it is loaded, it acts on bridges that were there before.
func ProbeNetfilter() error { return probeNetfilter(sysctl.Exists) }

// probeNetfilter looks for what comes with the module, in each namespace (Linux 5.3).
func probeNetfilter(exists func(path string) bool) error {
	if exists("net/bridge/bridge-nf-call-iptables") {
		return nil
	}
	return &tombolo.OpError{Op: "find the kernel module", Object: "br_netfilter", Err: fmt.Errorf(
		"%w: it is not loaded; run modprobe br_netfilter, and name it in a file in /etc/modules-load.d, so that it is loaded at boot",
		ErrNoNetfilter)}
}
