package cni

import (
	current "github.com/containernetworking/cni/pkg/types/100"

	"github.com/tombolo-cni/tombolo/ipam"
)

// nameBridge is the reference's plugin that is the same as this one, but for defaults.
const nameBridge = "bridge"

// asBridge leaves of a configuration what the reference's plugin bridge knows, with its defaults,
// and what says where files are.
func (c *NetConf) asBridge() {
	c.Mode, c.LANConf, c.NonMasqueradeCIDRs, c.BridgeNFCall, c.IngressPolicy, c.Bandwidth = "", LANConf{}, nil, nil, "", Bandwidth{}
	for _, field := range []**bool{&c.IsGateway, &c.IsDefaultGateway, &c.IPMasq, &c.HairpinMode} {
		if *field == nil {
			*field = new(bool)
		}
	}
	if c.Bridge == "" {
		c.Bridge = "cni0"
	}
	c.RuntimeConfig = runtimeConfig{MAC: c.RuntimeConfig.MAC, Asked: c.RuntimeConfig.Asked}
	if s := &c.IPAM; s.DataDir == "" && s.Type == "host-local" {
		s.DataDir = ipam.DefaultDir
	}
}

// asBridge leaves out of a result what the reference's does not have.
func asBridge(r *current.Result) {
	for _, one := range r.Interfaces {
		one.Mtu = 0
	}
}
