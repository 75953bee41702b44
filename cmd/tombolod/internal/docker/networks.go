package docker

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"net/netip"
	"slices"

	"github.com/tombolo-cni/tombolo/internal/runtimes"
)

// shortest is how much of an identifier Docker itself shows, and how much names links.
const shortest = 12

// The options of Docker's own.
const (
	withOptions  = "com.docker.network.generic" // those of --opt
	withInternal = "com.docker.network.internal"
	withIPv6     = "com.docker.network.enable_ipv6"
	withPorts    = "com.docker.network.portmap"
)

// createNetwork keeps a network. It is made when its first endpoint is.
func (d *Driver) createNetwork(ctx context.Context, r *request) (*answer, error) {
	n, err := networkOf(r)
	if err == nil {
		err = d.refuse(ctx, r, n)
	}
	if err == nil {
		_, err = d.with(n).Call("STATUS", nil)
	}
	if err == nil {
		err = d.networks.save(r.NetworkID, n)
	}
	return &answer{}, err
}

// networkOf reads what Docker tells of a network.
func networkOf(r *request) (*runtimes.Network, error) {
	n := &runtimes.Network{Name: "docker-" + r.NetworkID[:shortest], Bridge: "tb-" + r.NetworkID[:shortest]}
	if err := optional(r.Options, withOptions, &n.Options); err != nil {
		return nil, err
	}
	if err := optional(r.Options, withInternal, &n.Internal); err != nil {
		return nil, err
	}
	if name, ok := n.Options["name"]; ok {
		n.Name = name
		delete(n.Options, "name")
	}
	for _, data := range slices.Concat(r.IPv4Data, r.IPv6Data) {
		pool, err := netip.ParsePrefix(data.Pool)
		if err != nil {
			return nil, fmt.Errorf("subnet %.50q: %w", data.Pool, err)
		}
		if pool.Bits() == 0 {
			continue // --ipam-driver null
		}
		gateway, _ := netip.ParsePrefix(data.Gateway) // there may be none
		n.Subnets = append(n.Subnets, runtimes.Subnet{Prefix: pool, Gateway: gateway.Addr()})
	}
	return n, nil
}

// optional reads an option that Docker may leave out.
func optional(options map[string]json.RawMessage, name string, into any) error {
	if options[name] == nil {
		return nil
	}
	if err := json.Unmarshal(options[name], into); err != nil {
		return fmt.Errorf("option %s: %w", name, err)
	}
	return nil
}

// refuse says what cannot be of a network, in Docker's terms.
func (d *Driver) refuse(ctx context.Context, r *request, n *runtimes.Network) error {
	var six bool
	if err := optional(r.Options, withIPv6, &six); err != nil {
		return err
	}
	for option, why := range map[string]string{
		"stateDir": "it is tombolod's own, by --state: leave it out",
		"leaseDir": "it is tombolod's own, by --leases: leave it out",
		"ipv6":     "Docker gives a container one address of IPv6 alone, that of a subnet: name that by --ipv6 --subnet, or leave the option out",
	} {
		if n.Options[option] != "" {
			return fmt.Errorf("option %s: %s", option, why)
		}
	}
	if six && !slices.ContainsFunc(n.Subnets, func(s runtimes.Subnet) bool { return s.Prefix.Addr().Is6() }) {
		return errors.New("--ipv6 needs a --subnet of IPv6, and Docker's own IPAM driver: by DHCP, containers of Docker have IPv4 alone")
	}
	for _, id := range d.networks.list() {
		if other, err := d.network(id); err == nil && id != r.NetworkID && other.Name == n.Name {
			return fmt.Errorf("option name=%s: Docker's network %.12s has that name: take another; or, if `docker network ls` does not show it, delete %s", n.Name, id, d.networks.path(id))
		}
	}
	names, err := d.Node.Networks(ctx)
	if _, statErr := d.network(r.NetworkID); statErr != nil && slices.Contains(names, n.Name) {
		return fmt.Errorf("option name=%s: there is such a network, which is not Docker's: take another name, or remove it by `tombolo remove %s`", n.Name, n.Name)
	}
	return err
}

// network gives one that Docker has created. The error matches fs.ErrNotExist where it has not.
func (d *Driver) network(id string) (*runtimes.Network, error) {
	n := new(runtimes.Network)
	if err := d.networks.load(id, n); err != nil {
		return nil, fmt.Errorf("network %.12s of Docker's: %w; remove it by `docker network rm`, and create it anew", id, err)
	}
	return d.with(n), nil
}

// with gives a network for calls of the plugin.
func (d *Driver) with(n *runtimes.Network) *runtimes.Network {
	own := *n
	own.Options = map[string]string{"stateDir": d.StateDir, "leaseDir": d.LeaseDir}
	maps.Copy(own.Options, n.Options)
	return &own
}

// deleteNetwork is asked for when no endpoint is left. What is left of some all the same goes with it.
func (d *Driver) deleteNetwork(_ context.Context, r *request) (*answer, error) {
	n, err := d.network(r.NetworkID)
	if errors.Is(err, fs.ErrNotExist) {
		return &answer{}, nil
	}
	if err == nil {
		_, err = n.Call("GC", nil)
	}
	if err == nil {
		err = d.Node.Remove(d.ctx, n.Name) // a dockerd that was killed meanwhile does not ask again
	}
	if err != nil {
		return nil, err
	}
	for _, id := range d.endpoints.list() {
		// A dockerd that was killed says nothing of the endpoints that it had.
		var e endpoint
		if d.endpoints.load(id, &e) == nil && e.NetworkID == r.NetworkID {
			err = errors.Join(err, d.endpoints.remove(id))
		}
	}
	return &answer{}, errors.Join(err, d.networks.remove(r.NetworkID))
}
