package cni

import (
	"encoding/json"
	"fmt"
	"net/netip"
	"slices"

	"github.com/containernetworking/cni/pkg/types"

	"github.com/tombolo-cni/tombolo/internal/sysctl"
)

// A kernel that was booted with ipv6.disable=1, or built without IPv6, has none in any
// namespace. Networks of IPv4 alone work there; who asks for IPv6 is told, before
// anything is made that the kernel would refuse with a terse errno, or half of it.

// kernelHasIPv6 looks for what every namespace has of IPv6. Without /proc/sys nothing
// is known, and the kernel may speak for itself.
func kernelHasIPv6() bool { return sysctl.Exists(forwarding6) || !sysctl.Exists(forwarding4) }

// refuseIPv6 is about what an ADD asks for. It is called only where something is to be
// built, since a network with IPv6 is never found ready on such a kernel.
func (n *network) refuseIPv6() error {
	asked := ""
	if i := slices.IndexFunc(n.subnets, isIPv6); i >= 0 {
		asked = fmt.Sprintf("an address in %s", n.subnets[i])
	}
	if n.SLAAC {
		asked = askedSLAAC
	}
	if asked == "" || kernelHasIPv6() {
		return nil
	}
	return noIPv6(codeInvalidConfig, n.Network, asked)
}

// ipv6Status is refuseIPv6 for STATUS, which has no addresses yet, but what the
// configuration says of them. Plugins that are run have forms of their own for that.
func (c *call) ipv6Status(s settings) error {
	asked := askedSLAAC
	if !s.SLAAC {
		asked = configuredIPv6(c.stdin)
	}
	if asked == "" || kernelHasIPv6() {
		return nil
	}
	return noIPv6(codeNotAvailable, c.network, asked)
}

const askedSLAAC = `ipv6 "slaac"`

func noIPv6(code uint, network, asked string) *types.Error {
	return newError(code, "network %q asks for %s, and IPv6 is switched off in this kernel: take it out of the configuration, or boot without ipv6.disable=1 on the kernel's command line (and with a kernel that has IPv6)",
		network, asked)
}

// configuredIPv6 gives the first IPv6 subnet or address of the ipam section of
// host-local and static; "" if there is none. What cannot be read is not for it to say.
func configuredIPv6(stdin []byte) string {
	type subnet struct {
		Subnet string `json:"subnet"`
	}
	var conf struct {
		IPAM struct {
			subnet
			Ranges    [][]subnet `json:"ranges"`
			Addresses []struct {
				Address string `json:"address"`
			} `json:"addresses"`
		} `json:"ipam"`
	}
	if json.Unmarshal(stdin, &conf) != nil {
		return ""
	}
	texts := []string{conf.IPAM.Subnet}
	for _, set := range conf.IPAM.Ranges {
		for _, r := range set {
			texts = append(texts, r.Subnet)
		}
	}
	for _, a := range conf.IPAM.Addresses {
		texts = append(texts, a.Address)
	}
	for _, text := range texts {
		if p, err := netip.ParsePrefix(text); err == nil && isIPv6(p) {
			return "an address in " + p.Masked().String()
		}
	}
	return ""
}
