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

// PassesFirewall says whether packets of IPv4, or of IPv6, that a bridge switches pass the firewall: by an attribute of
// the bridge, or by a parameter of the calling thread's namespace.
func (l *Link) PassesFirewall(ipv4 bool) bool {
	if l == nil || l.Bridge == nil {
		return false
	}
	own, path := l.Bridge.NFCallIPTables, "net/bridge/bridge-nf-call-iptables"
	if !ipv4 {
		own, path = l.Bridge.NFCallIP6Tables, "net/bridge/bridge-nf-call-ip6tables"
	}
	all, err := sysctl.Read(path)
	// Without the parameter there is no br_netfilter.
	return err == nil && (own || all == "1")
}
