package cni

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/containernetworking/cni/pkg/types"
	current "github.com/containernetworking/cni/pkg/types/100"

	"github.com/tombolo-cni/tombolo/internal/ipam/delegate"
	"github.com/tombolo-cni/tombolo/internal/nl"
	"github.com/tombolo-cni/tombolo/ipam"
	"github.com/tombolo-cni/tombolo/netns"
	"github.com/tombolo-cni/tombolo/network"
	"github.com/tombolo-cni/tombolo/nft"
)

// addRequest holds the pod of an ADD, the DNS settings for its result, and the result of earlier plugins.
type addRequest struct {
	pod  network.Pod
	dns  types.DNS
	prev *current.Result // the result of the plugins earlier in the chain; nil if there are none
}

// add runs the verb ADD. It attaches the pod to the network, and returns the result to print.
func (c *call) add(ctx context.Context, node *network.Node, conf *NetConf) (*current.Result, error) {
	a, err := c.readRequest(conf)
	if err != nil {
		return nil, err
	}

	s := conf.settings()
	from := &allocator{ipamSection: &ipamSection{}}
	if a.pod.Lease == nil {
		if from, err = newAllocator(c.ipamRequest(conf, true)); err != nil {
			return nil, conf.explainAnnotated(err)
		}
		from.resolvers = a.dns.Nameservers
		if from.Allocator != nil {
			s.Allocator = from
		} else if a.pod.Addresses, a.pod.Routes, err = from.given, from.routes, from.noRanges; err != nil {
			return nil, conf.explainAnnotated(err)
		}
		a.pod.Resolvers = from.Resolvers()
	}

	if a.pod.NetNS, err = c.openPod(); err != nil {
		return nil, err
	}
	defer a.pod.NetNS.Close()
	made, err := node.Add(ctx, &s, &a.pod)
	if err != nil {
		return nil, conf.explainAnnotated(c.explain(err))
	}

	result := c.result(a, from, made)
	for _, one := range result.Interfaces {
		if conf.bridge {
			one.Mtu = 0 // results of the reference plugin bridge have no MTUs
		}
	}

	return result, nil
}

// pod returns a network.Pod with the call's container ID, interface and namespace. Its Path stays empty if c.Moves is
// set, since the caller will then move the interface to another namespace.
func (c *call) pod() network.Pod {
	p := network.Pod{ContainerID: c.containerID, IfName: c.ifName, Path: c.netns, SameNetNS: c.sameNetNS()}
	if c.Moves {
		p.Path = ""
	}
	return p
}

// readRequest reads the pod's parameters from the configuration and the environment. add calls it before any change, so
// that an error needs no undo.
func (c *call) readRequest(conf *NetConf) (*addRequest, error) {
	var macErr, prevErr, portsErr error
	args, err := parseArgs(c.args)
	rc, a := &conf.RuntimeConfig, &addRequest{pod: c.pod(), dns: conf.DNS}
	a.pod.Name = args.Pod()
	a.pod.MAC, macErr = conf.podMAC(args)
	if !conf.bridge { // the reference plugin ignores a previous result
		a.prev, prevErr = conf.prevResult()
	}

	a.pod.Ports, portsErr = publishedPorts(rc.PortMappings)
	if err := cmp.Or(err, macErr, prevErr, portsErr); err != nil {
		return nil, err
	}

	a.pod.Limits = conf.limits(conf.Bandwidth)
	a.pod.Egress, a.pod.PublishFrom = nft.Egress(rc.EgressPolicy.policy()), rc.PublishFrom.policy()
	if rc.DNS.Servers != nil || rc.DNS.Searches != nil || rc.DNS.Options != nil {
		a.dns = types.DNS{Nameservers: rc.DNS.Servers, Domain: a.dns.Domain, Search: rc.DNS.Searches,
			Options: rc.DNS.Options}
	}

	if conf.IPAM.Type != typeDHCP {
		return a, nil
	}

	dhcp, err := conf.dhcp()
	if err != nil {
		return nil, err
	}

	id := &identity{c.key(), a.pod.Name}
	if own := conf.annotated.ClientID; own != "" && id.pod != "" {
		id.pod = id.pod[:strings.LastIndexByte(id.pod, '/')+1] + own // keep the pod's Kubernetes namespace
	}

	lasting := dhcp.ClientID == clientByMAC && a.pod.MAC != nil
	if a.pod.MAC == nil {
		a.pod.MAC = id.mac(dhcp.ClientID)
	}

	if a.pod.Lease, err = dhcp.Lease(id, a.pod.MAC, args); err == nil && lasting {
		a.pod.Lease.Sticky = true // the pod's next container will request the same MAC
	}

	return a, err
}

// open opens a network.Node with the settings of the configuration. allocators becomes network.Config.Allocators. It
// may be nil if the call concerns no addresses.
func (c *call) open(allocators func(string, *network.Origin) (ipam.Allocator, error)) (*network.Node, error) {
	return network.Open(nl.WithDialer(context.Background(), c.Dial), &network.Config{
		StateDir: c.conf.stateDir(), LeaseDir: c.conf.leaseDir(), Mark: c.conf.mark(), Log: c.log.Logger, Step: c.step,
		Allocators: allocators,
	})
}

// allocators returns a function for network.Config.Allocators. That function returns the allocator for an attachment's
// recorded IPAM, which can release the attachment's addresses. Without a recorded IPAM, it returns the configuration's
// allocator. If the recorded IPAM is not available, it logs a warning and returns the configuration's allocator. For
// the types static and dhcp, and for no type, it returns nil.
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
			c.log.warn(fmt.Sprintf("the attachment's record names an IPAM that is not there (type %q, directory %q): "+
				"the configuration's is asked to give its address back", origin.Type, origin.Dir))
		}

		a, err := newAllocator(req)
		if err != nil || a.Allocator == nil {
			return nil, err
		}
		return a, nil
	}
}

// ipamRequest returns the parameters of newAllocator for the network's ipam section. strictly becomes
// ipamRequest.Strict.
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
		Section:            conf.IPAM,
		RequestedAddresses: conf.RuntimeConfig.RequestedAddresses,
		Network:            conf.Name,
		DefaultDataDir:     dataDir,
		Strict:             strictly,
		RangesLater:        conf.Capabilities["ipRanges"],
		Gateways:           conf.settings().Gateway,
		ByName:             conf.bridge,
		Warn:               c.log.warn,
	}
}

// allocator sets s.Subnets to the subnets of the ipam section, and s.Allocator to its allocator, if its type has one.
// For type dhcp, it returns a lease with only KeeperOptional (from ipam.keeper) set. For other types, lease is nil.
func (c *call) allocator(conf *NetConf, s *network.Network) (lease *network.Lease, _ error) {
	if conf.IPAM.Type == typeDHCP {
		dhcp, err := conf.dhcp()
		if err != nil {
			return nil, err
		}
		lease = &network.Lease{KeeperOptional: dhcp.Keeper == keeperOptional}
	}

	alloc, err := newAllocator(c.ipamRequest(conf, true))
	if err != nil {
		return nil, err
	}

	s.Subnets = alloc.subnets()
	if alloc.Allocator != nil {
		s.Allocator = alloc
	}
	return lease, nil
}

// explain replaces network.ErrHostNamespace, which means that the pod has no namespace of its own, by an error that
// names CNI_NETNS. It returns other errors unchanged.
func (c *call) explain(err error) error {
	if errors.Is(err, network.ErrHostNamespace) {
		return newError(codeInvalidNetNS,
			"CNI_NETNS=%s is the namespace that the plugin itself runs in: a pod needs one of its own", c.netns)
	}
	return err
}

// openPod opens the network namespace at CNI_NETNS. Its error has the code codeInvalidNetNS.
func (c *call) openPod() (*netns.NS, error) {
	pod, err := netns.Open(c.netns)
	if err != nil {
		return nil, newError(codeInvalidNetNS, "CNI_NETNS: %v", err)
	}
	return pod, nil
}
