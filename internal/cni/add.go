package cni

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"github.com/containernetworking/cni/pkg/types"
	current "github.com/containernetworking/cni/pkg/types/100"

	"github.com/tombolo-cni/tombolo/internal/cni/ipamconf"
	"github.com/tombolo-cni/tombolo/ipam"
	"github.com/tombolo-cni/tombolo/netns"
	"github.com/tombolo-cni/tombolo/network"
)

// asked is what ADD was asked for, beside the network.
type asked struct {
	pod  network.Pod
	dns  types.DNS
	prev *current.Result // of the plugins before this one; nil if there are none
}

// add carries out ADD: it gives the written result.
func (c *call) add(ctx context.Context, conf *NetConf) ([]byte, error) {
	a, err := c.asked(conf)
	if err != nil {
		return nil, err
	}
	s := conf.settings()
	var from ipamconf.Allocator
	if a.pod.Lease == nil {
		if from, err = ipamconf.New(c.ipamRequest(conf, true)); err != nil {
			return nil, err
		}
		s.Allocator = from
	}
	if a.pod.NetNS, err = c.openPod(); err != nil {
		return nil, err
	}
	defer a.pod.NetNS.Close()
	node, err := c.open(conf)
	if err != nil {
		return nil, err
	}
	made, err := node.Add(ctx, &s.Network, &a.pod)
	if err != nil {
		return nil, c.explain(err)
	}
	// Not every version can say every result.
	written, err := c.encode(c.asBridge(c.result(a, from, made)))
	if err != nil {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), network.UndoTimeout)
		defer cancel()
		return nil, errors.Join(err, node.Del(ctx, made.Key, nil))
	}
	return written, nil
}

// asked reads what can be wrong before anything is touched.
func (c *call) asked(conf *NetConf) (*asked, error) {
	rc, err := conf.runtimeConfig()
	if err != nil {
		return nil, err
	}
	args, err := ipamconf.ParseArgs(c.args)
	if err != nil {
		return nil, err
	}
	a := &asked{pod: network.Pod{
		ContainerID: c.containerID, IfName: c.ifName, Name: args.Pod(), Path: c.netns, SameNetNS: c.sameNetNS(),
	}}
	if a.pod.MAC, err = conf.podMAC(rc, args); err != nil {
		return nil, err
	}
	// The reference's bridge does not look at what was there before it.
	if a.prev, err = parsePrevResult(conf, c.cniVersion); err != nil && !conf.bridge {
		return nil, err
	}
	if conf.bridge {
		a.prev = nil
	}
	if a.pod.Ports, err = publishedPorts(rc.PortMappings); err != nil {
		return nil, err
	}
	if a.pod.Limits, err = conf.shape(rc); err != nil {
		return nil, err
	}
	a.dns = conf.DNS
	if rc.DNS.Servers != nil || rc.DNS.Searches != nil || rc.DNS.Options != nil {
		a.dns = types.DNS{Nameservers: rc.DNS.Servers, Domain: a.dns.Domain, Search: rc.DNS.Searches, Options: rc.DNS.Options}
	}
	if conf.ipamType() != ipamconf.TypeDHCP {
		return a, nil
	}
	dhcp, err := conf.dhcp()
	if err != nil {
		return nil, err
	}
	id := &ipamconf.Identity{Network: c.network, ContainerID: c.containerID, IfName: c.ifName, Pod: a.pod.Name}
	if a.pod.MAC == nil {
		a.pod.MAC = id.MAC(dhcp.ClientID)
	}
	a.pod.Lease, err = dhcp.Lease(id, a.pod.MAC, args)
	return a, err
}

// open opens the node as the configuration has it.
func (c *call) open(conf *NetConf) (*network.Node, error) {
	s := conf.settings()
	return network.Open(context.Background(), &network.Config{
		StateDir: s.StateDir, LeaseDir: s.LeaseDir, Mark: s.Mark, Log: c.log.slog(), Step: c.step,
		DialBridge: c.DialBridge, DialFirewall: c.DialNFT,
		Allocators: func(name string, origin *network.Origin) (ipam.Allocator, error) {
			req := c.ipamRequest(conf, false)
			switch {
			case origin == nil || *origin == s.Origin:
			case ipamconf.IsThere(origin.Type, c.path) && (origin.Dir == "" || filepath.IsAbs(origin.Dir)):
				req.Stdin = recordedConfig(c.cniVersion, name, origin)
				req.Type, req.DataDir = origin.Type, origin.Dir
			default:
				c.log.warn(fmt.Sprintf("the attachment's record names an IPAM that is not there (type %q, directory %q): the configuration's is asked to give its address back", origin.Type, origin.Dir))
			}
			return ipamconf.New(req)
		},
	})
}

// ipamRequest describes the call to the IPAM.
func (c *call) ipamRequest(conf *NetConf, strictly bool) *ipamconf.Request {
	dataDir := conf.settings().StateDir + "/ipam"
	if conf.bridge {
		dataDir = ipam.DefaultDir
	}
	section := conf.ipam()
	return &ipamconf.Request{
		Type:           section.Type,
		DataDir:        section.DataDir,
		Network:        c.network,
		ContainerID:    c.containerID,
		IfName:         c.ifName,
		NetNS:          c.netns,
		Args:           c.args,
		Path:           c.path,
		Stdin:          c.stdin,
		Environ:        os.Environ(),
		Stderr:         os.Stderr,
		DefaultDataDir: dataDir,
		Strict:         strictly,
		Ranges:         conf.Capabilities["ipRanges"],
		Gateways:       conf.bridge && conf.settings().Gateway,
		ByName:         conf.bridge,
		Warn:           c.log.warn,
	}
}

// allocator gives the network the allocator of its configuration. With a lease, that is for pods of another type.
func (c *call) allocator(conf *NetConf, s *settings) (lease *network.Lease, _ error) {
	if conf.ipamType() == ipamconf.TypeDHCP {
		dhcp, err := conf.dhcp()
		if err != nil {
			return nil, err
		}
		lease = &network.Lease{KeeperOptional: dhcp.KeeperOptional()}
	}
	of, err := ipamconf.New(c.ipamRequest(conf, true))
	if err == nil {
		s.Allocator, s.Subnets = of, ipamconf.Subnets(of)
	}
	return lease, err
}

// explain says in the runtime's words what package network cannot.
func (c *call) explain(err error) error {
	if errors.Is(err, network.ErrHostNamespace) {
		return newError(codeInvalidNetNS, "CNI_NETNS=%s is the namespace that the plugin itself runs in: a pod needs one of its own", c.netns)
	}
	return err
}

// openPod opens the pod's namespace.
func (c *call) openPod() (*netns.NS, error) {
	pod, err := netns.Open(c.netns)
	if err != nil {
		return nil, newError(codeInvalidNetNS, "CNI_NETNS: %v", err)
	}
	return pod, nil
}
