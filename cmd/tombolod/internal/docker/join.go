package docker

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"slices"
	"time"

	"github.com/tombolo-cni/tombolo/network"
	"github.com/tombolo-cni/tombolo/nft"
)

// While Docker sets a container up, its interface is looked for there so often, and so many times.
const (
	lookEvery = 100 * time.Millisecond
	looks     = 600
)

// join tells Docker which link to move into a container, and of its routes.
func (d *Driver) join(_ context.Context, r *request) (*answer, error) {
	defer d.lock(r.EndpointID)()
	var e endpoint
	if err := d.endpoints.load(r.EndpointID, &e); err != nil {
		return nil, fmt.Errorf("endpoint %.12s: %w: restart the container", r.EndpointID, err)
	}
	e.Sandbox, e.Moved = r.SandboxKey, false
	if err := d.endpoints.save(r.EndpointID, &e); err != nil {
		return nil, err
	}
	d.after(lookEvery, func() { d.follow(r.EndpointID, looks) })
	e.Join.InterfaceName = &interfaceName{srcName(r.EndpointID), "eth"}
	return &e.Join, nil
}

// follow has the records follow an interface into its container.
func (d *Driver) follow(id string, looks int) {
	defer d.lock(id)()
	var e endpoint
	if err := d.endpoints.load(id, &e); err != nil || e.Moved {
		return
	}
	change, err := d.change(id, e.NetworkID)
	if err == nil {
		err = change.Moved(d.ctx, e.Sandbox)
	}
	switch {
	case err == nil:
		e.Moved = true
		err = d.endpoints.save(id, &e)
	case errors.Is(err, network.ErrTryAgain) && looks > 0:
		d.after(lookEvery, func() { d.follow(id, looks-1) })
		return
	}
	if err != nil && d.ctx.Err() == nil {
		d.Log.Warn("cannot find an endpoint in its container: its lease is not renewed", "endpoint", id, "namespace", e.Sandbox, "err", err)
	}
}

// change gives access to an endpoint that is there.
func (d *Driver) change(id, networkID string) (network.Change, error) {
	n, err := d.network(networkID)
	if err != nil {
		return network.Change{}, err
	}
	return d.Node.Change(network.Key{Network: n.Name, ContainerID: id, IfName: ifName(id)}), nil
}

// portBinding is a port of the host that is to lead to a container.
type portBinding struct {
	Proto                       uint8
	Port, HostPort, HostPortEnd uint16
	HostIP                      string
}

// publish has the ports of a container lead to this endpoint, by which Docker has it reach the world.
func (d *Driver) publish(ctx context.Context, r *request) (*answer, error) {
	defer d.lock(r.EndpointID)()
	var e endpoint
	var list []portBinding
	if err := optional(r.Options, withPorts, &list); err != nil || len(list) == 0 {
		return &answer{}, err
	}
	err := d.endpoints.load(r.EndpointID, &e)
	if err != nil {
		return nil, err
	}
	var what network.Publication
	for _, b := range list {
		p, err := b.port()
		if err != nil {
			return nil, err
		}
		isOf := func(a netip.Prefix) bool { return !p.HostAddr.IsValid() || a.Addr().Is4() == p.HostAddr.Is4() }
		// Docker names 0.0.0.0 and ::, whatever the container has.
		if slices.ContainsFunc(e.Container.Addresses, isOf) {
			what.Ports = append(what.Ports, p)
		}
	}
	change, err := d.change(r.EndpointID, r.NetworkID)
	if err == nil {
		err = change.Publish(ctx, what)
	}
	return &answer{}, err
}

func (b *portBinding) port() (network.HostPort, error) {
	p := network.HostPort{Protocol: nft.Protocol(b.Proto), HostPort: b.HostPort, PodPort: b.Port}
	if b.HostPort == 0 || b.HostPortEnd > b.HostPort {
		return p, fmt.Errorf("--publish %d: name the one port of the host that is to lead there, as in --publish 8080:%d", b.Port, b.Port)
	}
	var err error
	if b.HostIP != "" {
		p.HostAddr, err = netip.ParseAddr(b.HostIP)
	}
	return p, err
}

// revoke has no port lead to an endpoint any more.
func (d *Driver) revoke(ctx context.Context, r *request) (*answer, error) {
	defer d.lock(r.EndpointID)()
	change, err := d.change(r.EndpointID, r.NetworkID)
	if err == nil {
		err = change.Publish(ctx, network.Publication{})
	}
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, network.ErrNotAttached) {
		err = nil
	}
	return &answer{}, err
}
