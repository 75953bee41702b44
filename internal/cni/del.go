package cni

import (
	"context"
	"encoding/json"
	"net/netip"

	"github.com/containernetworking/cni/pkg/types"
	current "github.com/containernetworking/cni/pkg/types/100"

	"github.com/tombolo-cni/tombolo/network"
)

// del runs the verb DEL. It needs neither the pod's namespace nor a previous result.
func (c *call) del(ctx context.Context, node *network.Node, conf *NetConf) error {
	known := conf.known()
	known.Addresses = func() []netip.Addr {
		prev, err := conf.prevResult()
		if err != nil || prev == nil {
			return nil
		}
		return c.podAddresses(prev)
	}
	return node.Del(ctx, c.key(), known)
}

// key returns the key of the call's attachment: network, container ID and interface.
func (c *call) key() network.Key {
	return network.Key{Network: c.conf.Name, ContainerID: c.containerID, IfName: c.ifName}
}

// known returns facts from the configuration that help to take down attachments without a record.
func (c *NetConf) known() *network.Known {
	s := c.settings()
	return &network.Known{Bridge: s.Bridge, GatewayLink: s.GatewayLink(), Leased: c.IPAM.Type == typeDHCP}
}

// isPods reports whether an interface in a result is the pod's interface of this call.
func (c *call) isPods(iface *current.Interface) bool {
	return iface.Sandbox != "" && iface.Name == c.ifName
}

// podAddresses returns the addresses of the pod's interface in a result. It skips addresses of other interfaces.
func (c *call) podAddresses(prev *current.Result) []netip.Addr {
	var list []netip.Addr
	for _, ip := range prev.IPs {
		if ip.Interface != nil && !c.isPods(prev.Interfaces[*ip.Interface]) {
			continue
		}
		if p, ok := prefixOf(ip.Address); ok {
			list = append(list, p.Addr())
		}
	}

	return list
}

// recordedConfig returns an ipam section, and a whole configuration with this section. They name the IPAM that
// assigned an attachment's addresses, according to the attachment's record.
func recordedConfig(cniVersion, name string, origin *network.Origin) (Section, []byte) {
	ipamConf := struct {
		DataDir string `json:"dataDir,omitempty"`
		Type    string `json:"type,omitempty"`
	}{origin.Dir, origin.Type}

	// Encoding strings as JSON cannot fail.
	section, _ := json.Marshal(ipamConf)
	data, _ := json.Marshal(map[string]any{"cniVersion": cniVersion, "name": name, "type": "tombolo", "ipam": ipamConf})
	return Section{Type: origin.Type, DataDir: origin.Dir, JSON: section}, data
}

// gc runs the verb GC. It removes all attachments of this network that are not on the runtime's list of valid
// attachments. Without a list it does nothing, since the runtime may have lost the list. With an empty list it
// removes every attachment.
func (c *call) gc(ctx context.Context, node *network.Node, conf *NetConf) error {
	list, err := conf.validAttachments()
	if err != nil || list == nil {
		return err
	}
	keep := []network.Key{}
	for _, a := range list {
		keep = append(keep, network.Key{Network: c.conf.Name, ContainerID: a.ContainerID, IfName: a.IfName})
	}
	_, err = node.Collect(ctx, conf.Name, keep, conf.known())
	return err
}

// validAttachments returns the runtime's list of valid attachments, or nil if there is no list. An invalid list is an
// error, although GC ignores other faults: GC would remove the attachments that the list lacks.
func (c *NetConf) validAttachments() ([]types.GCAttachment, error) {
	var list []types.GCAttachment
	if len(c.ValidAttachments) == 0 {
		return nil, nil
	}

	if err := json.Unmarshal(c.ValidAttachments, &list); err != nil {
		return nil, newError(codeDecoding, "cni.dev/valid-attachments: %v", err)
	}

	for i, a := range list {
		if a.ContainerID == "" || a.IfName == "" {
			return nil, newError(codeDecoding, "cni.dev/valid-attachments[%d] lacks its containerID or its ifname", i)
		}
	}

	return list, nil
}
