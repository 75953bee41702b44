package cni

import (
	"context"
	"encoding/json"
	"errors"

	current "github.com/containernetworking/cni/pkg/types/100"

	"github.com/tombolo-cni/tombolo/internal/cni/ipamconf"
	"github.com/tombolo-cni/tombolo/internal/cni/reference/leftover"
	"github.com/tombolo-cni/tombolo/internal/cni/reference/podlink"
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

// delBridge is del, after which nothing is left of what the reference's plugin made either: of
// that there is no record.
func (c *call) delBridge(ctx context.Context, conf *NetConf) error {
	err := errors.Join(podlink.DeleteOthers(c.netns, c.ifName), c.del(ctx, conf))
	if !c.unrecorded && leftover.IsNewer(c.reference(conf)) {
		err = errors.Join(err, c.del(ctx, conf)) // the record is gone
	}
	if c.unrecorded {
		err = errors.Join(err, leftover.Masquerade(ctx, c.reference(conf)))
	}
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
