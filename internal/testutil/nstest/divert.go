package nstest

import (
	"strings"
	"testing"

	"github.com/tombolo-cni/tombolo/netns"
)

// Diversions are ways in which a process with all rights in a pod's namespace has a
// machine hear and answer what is sent there that is not on the pod's link.
func Diversions() []string { return []string{"renamed", "redirected"} }

// Divert makes a namespace whose eth0 takes the place of what is beyond a pod's interface:
// of one of that name, once the pod has "renamed" its own; or with all that is sent by the
// pod's own "redirected" to it and back.
func Divert(tb testing.TB, pod *netns.NS, link, way string) *netns.NS {
	tb.Helper()
	rogue, address := New(tb), MAC(tb, pod, link)
	switch way {
	case "renamed":
		Run(tb, pod, "sh", "-ec", "ip link set "+link+" down; ip link set "+link+" name own0; ip link set own0 up")
		Veth(tb, pod, link, rogue, "eth0")
		Run(tb, pod, "ip", "link", "set", link, "address", address)
	case "redirected":
		Veth(tb, pod, "aside0", rogue, "eth0")
		Run(tb, pod, "ip", "link", "set", "aside0", "address", address) // else it is for others what comes back
		for from, to := range map[string]string{link: "egress redirect dev aside0", "aside0": "ingress redirect dev " + link} {
			hook, action, _ := strings.Cut(to, " ")
			Run(tb, pod, "tc", "qdisc", "add", "dev", from, "clsact")
			args := strings.Fields("filter add dev " + from + " " + hook + " protocol all u32 match u32 0 0 action mirred " + hook + " " + action)
			Run(tb, pod, "tc", args...)
		}
	default:
		tb.Fatalf("no way %q", way)
	}
	return rogue
}

// MAC gives a link's MAC address.
func MAC(tb testing.TB, ns *netns.NS, link string) string {
	tb.Helper()
	_, rest, _ := strings.Cut(Run(tb, ns, "ip", "-o", "link", "show", link), "link/ether ")
	mac, _, _ := strings.Cut(rest, " ")
	return mac
}
