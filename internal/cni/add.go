package cni

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"github.com/containernetworking/cni/pkg/types"
	current "github.com/containernetworking/cni/pkg/types/100"

	"github.com/tombolo-cni/tombolo/internal/ipam/delegate"
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

// add carries out ADD.
func (c *call) add(ctx context.Context, node *network.Node, conf *NetConf) (*current.Result, error) {
	a, err := c.asked(conf)
	if err != nil {
		return nil, err
	}
	s := conf.settings()
	from := &allocator{said: &said{}}
	if a.pod.Lease == nil {
		if from, err = newAllocator(c.ipamRequest(conf, true)); err != nil {
			return nil, err
		}
		s.Allocator = from
	}
	if a.pod.NetNS, err = c.openPod(); err != nil {
		return nil, err
	}
	defer a.pod.NetNS.Close()
	made, err := node.Add(ctx, &s, &a.pod)
	if err != nil {
		return nil, c.explain(err)
	}
	result := c.result(a, from, made)
	if conf.bridge {
		asBridge(result)
	}
	return result, nil
}

// pod is the one that a call is about.
func (c *call) pod() network.Pod {
	return network.Pod{ContainerID: c.containerID, IfName: c.ifName, Path: c.netns, SameNetNS: c.sameNetNS()}
}

// asked reads what can be wrong before anything is touched.
func (c *call) asked(conf *NetConf) (*asked, error) {
	args, err := parseArgs(c.args)
	if err != nil {
		return nil, err
	}
	a := &asked{pod: c.pod(), dns: conf.DNS}
	a.pod.Name = args.Pod()
	if a.pod.MAC, err = conf.podMAC(args); err != nil {
		return nil, err
	}
	if !conf.bridge { // the reference's does not look at what was there before it
		if a.prev, err = conf.prevResult(); err != nil {
			return nil, err
		}
	}
	rc := &conf.RuntimeConfig
	if a.pod.Ports, err = publishedPorts(rc.PortMappings); err != nil {
		return nil, err
	}
	a.pod.Limits = conf.limits(conf.Bandwidth)
	if rc.DNS.Servers != nil || rc.DNS.Searches != nil || rc.DNS.Options != nil {
		a.dns = types.DNS{Nameservers: rc.DNS.Servers, Domain: a.dns.Domain, Search: rc.DNS.Searches, Options: rc.DNS.Options}
	}
	if conf.IPAM.Type != typeDHCP {
		return a, nil
	}
	dhcp, err := conf.dhcp()
	if err != nil {
		return nil, err
	}
	id := &identity{c.key(), a.pod.Name}
	lasting := dhcp.ClientID == clientByMAC && a.pod.MAC != nil
	if a.pod.MAC == nil {
		a.pod.MAC = id.mac(dhcp.ClientID)
	}
	if a.pod.Lease, err = dhcp.Lease(id, a.pod.MAC, args); err == nil && lasting {
		a.pod.Lease.Sticky = true // the pod's next container is asked for the same MAC
	}
	return a, err
}

// open opens the node as the configuration has it; nil allocators are for what gives no addresses.
func (c *call) open(allocators func(string, *network.Origin) (ipam.Allocator, error)) (*network.Node, error) {
	return network.Open(context.Background(), &network.Config{
		StateDir: c.conf.stateDir(), LeaseDir: c.conf.leaseDir(), Mark: c.conf.mark(), Log: c.log.Logger, Step: c.step,
		DialBridge: c.DialBridge, DialFirewall: c.DialNFT, Allocators: allocators,
	})
}

// allocators give an attachment's addresses back by the IPAM that gave them.
func (c *call) allocators(conf *NetConf) func(string, *network.Origin) (ipam.Allocator, error) {
	own := conf.settings().Origin
	return func(name string, origin *network.Origin) (ipam.Allocator, error) {
		req := c.ipamRequest(conf, false)
		switch {
		case origin == nil || *origin == own:
		case isThere(origin.Type, c.path) && (origin.Dir == "" || filepath.IsAbs(origin.Dir)):
			req.Name = origin.Type
			req.Section, req.Stdin = recordedConfig(conf.CNIVersion, name, origin)
		default:
			c.log.warn(fmt.Sprintf("the attachment's record names an IPAM that is not there (type %q, directory %q): the configuration's is asked to give its address back", origin.Type, origin.Dir))
		}
		return newAllocator(req)
	}
}

// ipamRequest describes the call to the IPAM.
func (c *call) ipamRequest(conf *NetConf, strictly bool) *ipamRequest {
	dataDir := conf.stateDir() + "/ipam"
	if conf.bridge {
		dataDir = ipam.DefaultDir
	}
	return &ipamRequest{
		Plugin: delegate.Plugin{
			Name: conf.IPAM.Type, Path: c.path, ContainerID: c.containerID, NetNS: c.netns, IfName: c.ifName,
			Args: c.args, Environ: os.Environ(), Stdin: c.stdin, Stderr: os.Stderr,
		},
		Section:        conf.IPAM,
		Asked:          conf.RuntimeConfig.Asked,
		Network:        conf.Name,
		DefaultDataDir: dataDir,
		Strict:         strictly,
		RangesLater:    conf.Capabilities["ipRanges"],
		Gateways:       conf.bridge && conf.settings().Gateway,
		ByName:         conf.bridge,
		Warn:           c.log.warn,
	}
}

// allocator gives the network the allocator of its configuration. With a lease, that is for pods of another type.
func (c *call) allocator(conf *NetConf, s *network.Network) (lease *network.Lease, _ error) {
	if conf.IPAM.Type == typeDHCP {
		dhcp, err := conf.dhcp()
		if err != nil {
			return nil, err
		}
		lease = &network.Lease{KeeperOptional: dhcp.Keeper == keeperOptional}
	}
	of, err := newAllocator(c.ipamRequest(conf, true))
	if err == nil {
		s.Allocator, s.Subnets = of, of.subnets()
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
