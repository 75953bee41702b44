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

func (c *call) key() network.Key {
	return network.Key{Network: c.conf.Name, ContainerID: c.containerID, IfName: c.ifName}
}

// known returns facts from the configuration that DEL and GC need to find attachments without a record.
func (c *NetConf) known() *network.Known {
	s := c.settings()
	return &network.Known{Bridge: s.Bridge, GatewayLink: s.GatewayLink(), Leased: c.IPAM.Type == typeDHCP}
}

// isPods reports whether an interface in a result is the pod's end of the attachment of this call.
func (c *call) isPods(iface *current.Interface) bool {
	return iface.Sandbox != "" && iface.Name == c.ifName
}

// podAddresses returns the addresses in a result that belong to the call's interface in the pod, or to no interface. It
// skips invalid addresses.
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

// recordedConfig returns an ipam section for the IPAM in origin, and a whole configuration with this section. origin is
// the recorded type and directory of the IPAM that assigned an attachment's addresses.
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

// gc runs the verb GC. It removes the network's attachments that are missing from the runtime's list,
// cni.dev/valid-attachments. It skips attachments that another call works on. Without a list it does nothing, since the
// runtime may have lost the list. An empty list means that no attachment is valid.
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
// error even for GC, which ignores other faults: GC would remove valid attachments.
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
