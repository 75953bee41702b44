package docker

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"

	"github.com/tombolo-cni/tombolo/internal/file"
	"github.com/tombolo-cni/tombolo/internal/runtimes"
	"github.com/tombolo-cni/tombolo/internal/state"
	"github.com/tombolo-cni/tombolo/network"
)

// shortest is the length of Docker's short identifiers, which are also parts of link names.
const shortest = 12

// withRouters is the option for IPv6 addresses from router advertisements and DHCPv6.
const withRouters = "ipv6"

// These are the names of Docker's own options in its requests.
const (
	withOptions  = "com.docker.network.generic" // the options from --opt
	withInternal = "com.docker.network.internal"
	withIPv6     = "com.docker.network.enable_ipv6"
	withPorts    = "com.docker.network.portmap"
)

// createNetwork checks a network and stores its description in a file. The ADD of the network's first endpoint makes
// the bridge and the rules.
func (d *Driver) createNetwork(ctx context.Context, r *request) (*answer, error) {
	n, err := networkOf(r)
	if err == nil {
		err = d.refuseName(ctx, r.NetworkID, n.Name)
	}

	if err == nil {
		_, err = d.own(n).Call("STATUS", nil)
	}

	data, _ := json.Marshal(n) // cannot fail: every value in a network has a JSON form
	if err == nil {
		err = os.MkdirAll(d.networks, 0o700)
	}

	if err == nil {
		err = file.ReplaceDurably(d.path(r.NetworkID)+".new", d.path(r.NetworkID), data)
	}

	return &answer{}, err
}

// path returns the path of the file with a network's description. id is Docker's identifier of the network.
func (d *Driver) path(id string) string { return filepath.Join(d.networks, id+".json") }

// networkIDs returns Docker's identifiers of all networks that have a description.
func (d *Driver) networkIDs() []string {
	ids, _, _ := state.RecordNames(d.networks, func(string) bool { return true })
	return ids
}

// networkOf converts Docker's description of a network into a runtimes.Network. It returns an error for an invalid
// description.
func networkOf(r *request) (*runtimes.Network, error) {
	n := &runtimes.Network{Name: "docker-" + r.NetworkID[:shortest]}
	var six bool
	if err := errors.Join(optional(r.Options, withOptions, &n.Options), optional(r.Options, withInternal, &n.Internal),
		optional(r.Options, withIPv6, &six)); err != nil {
		return nil, err
	}

	for option, into := range map[string]*string{"name": &n.Name, runtimes.IfPrefix: &n.IfPrefix} {
		if value, ok := n.Options[option]; ok {
			*into = value
			delete(n.Options, option)
		}
	}

	if n.Mode() == "gateway" {
		n.Bridge = "tb-" + r.NetworkID[:shortest]
	}

	for _, data := range slices.Concat(r.IPv4Data, r.IPv6Data) {
		if data.Pool.Bits() > 0 { // --ipam-driver null has no subnet
			n.Subnets = append(n.Subnets, runtimes.Subnet{Prefix: data.Pool, Gateway: data.Gateway.Addr()})
		}
	}

	return n, refuse(n, six)
}

// optional decodes an option that Docker may leave out, and stores the value in *into. If the option is missing,
// *into stays unchanged.
func optional(options map[string]json.RawMessage, name string, into any) error {
	if options[name] == nil {
		return nil
	}
	return state.WithOperation(json.Unmarshal(options[name], into), "option %s", name)
}

// refuse returns an error for a network that Tombolo cannot serve, with advice in terms of Docker's options. six is set
// if the user requested --ipv6.
func refuse(n *runtimes.Network, six bool) error {
	switch {
	case n.Options["stateDir"]+n.Options["leaseDir"] != "":
		return errors.New(
			"options stateDir and leaseDir: they are tombolod's own, by --state and --leases: leave them out")
	case n.Options[withRouters] != "" && len(n.Subnets) > 0:
		return errors.New(
			"option ipv6 is for mode=lan with --ipam-driver null, where containers lease their addresses: with " +
				"subnets, name one of IPv6 by --ipv6 --subnet")
	case six && !slices.ContainsFunc(n.Subnets, func(s runtimes.Subnet) bool { return s.Prefix.Addr().Is6() }):
		return errors.New(
			"--ipv6 needs a --subnet of IPv6, and Docker's own IPAM driver; containers that lease their addresses " +
				"have IPv6 by -o ipv6=slaac or -o ipv6=dhcp")
	}

	for _, s := range n.Subnets {
		// Without a subnet from the user, Docker chooses one that is not the LAN's.
		if n.Mode() == "lan" && n.Options["defaultRoute"] != "router" && !isHosts(s.Prefix) {
			return fmt.Errorf(
				"mode=lan with the subnet %s, in which the host has no address: name --ipam-driver null, for "+
					"containers to lease addresses; or the LAN's --subnet, for Docker to give them", s.Prefix)
		}
	}

	return nil
}

// isHosts reports whether the host has an address in a subnet.
func isHosts(subnet netip.Prefix) bool {
	have, _ := net.InterfaceAddrs()
	return slices.ContainsFunc(have, func(a net.Addr) bool {
		own, err := netip.ParsePrefix(a.String())
		return err == nil && subnet.Contains(own.Addr())
	})
}

// refuseName returns an error if another network, of Docker or not, has the name. id is Docker's identifier of the
// network that is to have the name.
func (d *Driver) refuseName(ctx context.Context, id, name string) error {
	names, err := d.Node.Networks(ctx)
	for _, other := range d.networkIDs() {
		switch n, err := d.network(other); {
		case err != nil || n.Name != name:
		case other == id:
			return nil // the network itself has the name: Docker repeats the request
		default:
			return fmt.Errorf(
				"option name=%s: Docker's network %.12s has that name: take another; or, if `docker network ls` does "+
					"not show it, since it was removed while tombolod was stopped, delete %s and, if it has had a "+
					"container, run `tombolo remove %s`", name, other, d.path(other), name)
		}
	}

	if slices.Contains(names, name) {
		return fmt.Errorf(
			"option name=%s: there is such a network, which is not Docker's: take another name, or remove it by "+
				"`tombolo remove %s`", name, name)
	}

	return err
}

// network reads the description of a network that Docker has created. If there is none, the error matches
// fs.ErrNotExist.
func (d *Driver) network(id string) (*runtimes.Network, error) {
	n := new(runtimes.Network)
	data, err := file.Read(d.path(id), file.MaxRecord)
	if err == nil {
		err = json.Unmarshal(data, n)
	}
	if err != nil {
		return nil,
			fmt.Errorf("network %.12s of Docker's: %w; remove it by `docker network rm`, and create it anew", id, err)
	}
	return d.own(n), nil
}

// own sets the options stateDir and leaseDir of a network to tombolod's directories, and returns the network.
func (d *Driver) own(n *runtimes.Network) *runtimes.Network {
	if n.Options == nil {
		n.Options = map[string]string{}
	}
	n.Options["stateDir"], n.Options["leaseDir"] = d.StateDir, d.LeaseDir
	return n
}

// deleteNetwork removes a network and its description. Docker calls it when the network has no endpoint that Docker
// knows. So deleteNetwork first removes the attachments that Docker has forgotten. An unknown network is no error.
func (d *Driver) deleteNetwork(ctx context.Context, r *request) (*answer, error) {
	n, err := d.network(r.NetworkID)
	if errors.Is(err, fs.ErrNotExist) {
		return &answer{}, nil
	}

	if err == nil {
		_, err = n.Call("GC", nil)
	}

	if err == nil {
		// A dockerd that is killed now does not repeat the request, so finish even if ctx is done.
		err = d.Node.Remove(context.WithoutCancel(ctx), n.Name)
	}

	if err == nil || errors.Is(err, network.ErrAttached) { // Docker forgets the network in any case
		err = errors.Join(err, file.Remove(d.path(r.NetworkID)))
	}

	return &answer{}, err
}
