package cni

import (
	"context"
	"encoding/json"
	"os"

	current "github.com/containernetworking/cni/pkg/types/100"

	"github.com/tombolo-cni/tombolo/internal/cni/ipamconf"
	"github.com/tombolo-cni/tombolo/ipam"
)

// nameBridge is the reference's plugin that is the same as this one, but for defaults.
const nameBridge = "bridge"

// asBridge leaves of a configuration what the reference's plugin bridge knows, with its defaults,
// and what says where files are.
func (c *NetConf) asBridge() {
	c.bridge = true
	c.Mode, c.LANConf, c.NonMasqueradeCIDRs, c.BridgeNFCall, c.IngressPolicy, c.Bandwidth = "", LANConf{}, nil, nil, "", Bandwidth{}
	for _, field := range []**bool{&c.IsGateway, &c.IsDefaultGateway, &c.IPMasq, &c.HairpinMode} {
		if *field == nil {
			*field = new(bool)
		}
	}
	if c.Bridge == "" {
		c.Bridge = "cni0"
	}
	var runtime struct {
		MAC json.RawMessage `json:"mac,omitempty"`
	}
	if !isEmptyJSON(c.RuntimeConfig) && json.Unmarshal(c.RuntimeConfig, &runtime) == nil {
		c.RuntimeConfig, _ = json.Marshal(runtime) // of what was JSON before
	}
	if s := c.ipam(); s.DataDir == "" && s.Type == "host-local" {
		s.DataDir = ipam.DefaultDir
	}
}

// dhcp reads the ipam section of type dhcp.
func (c *NetConf) dhcp() (*ipamconf.DHCP, error) { return ipamconf.ReadDHCP(c.IPAM, c.bridge) }

// delBridge is del, after the DEL of the program that was here before, where that made the pod's link.
func (c *call) delBridge(ctx context.Context, conf *NetConf) error {
	by, err := c.carriers(conf)
	if err == nil && by.kept && podHasLink(c.netns, c.ifName) {
		_, err = c.handOver(ctx)
	}
	if err != nil {
		return err
	}
	return c.del(ctx, conf)
}

// checkBridge is check, but for a pod that the program made which was here before.
func (c *call) checkBridge(ctx context.Context, conf *NetConf) error {
	by, err := c.carriers(conf)
	if err != nil {
		return err
	}
	if _, err := os.Stat(c.Kept); by.ours || err != nil {
		return c.check(ctx, conf)
	}
	_, err = c.handOver(ctx)
	return err
}

// asBridge leaves out of a result what the reference's does not have.
func (c *call) asBridge(r *current.Result) *current.Result {
	if c.Name == nameBridge {
		for _, one := range r.Interfaces {
			one.Mtu = 0
		}
	}
	return r
}
