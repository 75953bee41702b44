package docker

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"slices"
	"time"

	current "github.com/containernetworking/cni/pkg/types/100"

	"github.com/tombolo-cni/tombolo/internal/runtimes"
	"github.com/tombolo-cni/tombolo/ipam"
	"github.com/tombolo-cni/tombolo/network"
	"github.com/tombolo-cni/tombolo/nft"
)

// While Docker sets a container up, its interface is looked for there so often, and so many times.
const (
	lookEvery = 100 * time.Millisecond
	looks     = 600
)

// join tells Docker which link to move into a container.
func (d *Driver) join(ctx context.Context, r *request) (*answer, error) {
	n, err := d.network(r.NetworkID)
	if err != nil {
		return nil, err
	}
	e := d.lock(r.EndpointID)
	defer e.Unlock()
	if e.join == nil {
		return nil, fmt.Errorf("endpoint %.12s: tombolod was started after it was created: restart the container", r.EndpointID)
	}
	// The record has the path now, for a tombolod that is started meanwhile.
	if err := d.change(n, r.key).Moved(ctx, r.SandboxKey); err != nil && !errors.Is(err, network.ErrTryAgain) {
		return nil, err
	}
	d.work.Go(func() { d.follow(e, r.key, r.SandboxKey, looks) })
	return e.join, nil
}

// joinOf names the gateways by which a container goes out. Other routes of a lease are the keeper's to make.
func joinOf(made *current.Result, srcName string) *answer {
	a := &answer{InterfaceName: &interfaceName{srcName, "eth"}, DisableGatewayService: true}
	for _, route := range made.Routes {
		switch length, _ := route.Dst.Mask.Size(); {
		case length > 0 || route.GW == nil:
		case route.GW.To4() != nil:
			a.Gateway = route.GW.String()
		default:
			a.GatewayIPv6 = route.GW.String()
		}
	}
	return a
}

// follow has the records follow an interface into its container.
func (d *Driver) follow(e *endpoint, k key, path string, looks int) {
	err := d.look(e, k, path)
	for ; errors.Is(err, network.ErrTryAgain) && looks > 0 && d.rest(lookEvery); looks-- {
		err = d.look(e, k, path)
	}
	if err != nil && !errors.Is(err, network.ErrNotAttached) && d.ctx.Err() == nil {
		d.Log.Warn("cannot find an endpoint in its container: its lease is not renewed", "endpoint", k.EndpointID, "namespace", path, "err", err)
	}
}

func (d *Driver) look(e *endpoint, k key, path string) error {
	e.Lock()
	defer e.Unlock()
	n, err := d.network(k.NetworkID)
	if err == nil {
		err = d.change(n, k).Moved(d.ctx, path)
	}
	e.moved = err == nil
	return err
}

// change gives access to an endpoint that is there.
func (d *Driver) change(n *runtimes.Network, k key) network.Change {
	return d.Node.Change(network.Key{Network: n.Name, ContainerID: k.EndpointID, IfName: k.ifName()})
}

// portBinding is a port of the host that is to lead to a container.
type portBinding struct {
	Proto                       uint8
	Port, HostPort, HostPortEnd uint16
	HostIP                      string
}

// publish has the ports of a container lead to this endpoint, by which Docker has it reach the world.
func (d *Driver) publish(ctx context.Context, r *request) (*answer, error) {
	defer d.lock(r.EndpointID).Unlock()
	var list []portBinding
	if err := optional(r.Options, withPorts, &list); err != nil || len(list) == 0 {
		return &answer{}, err
	}
	n, err := d.network(r.NetworkID)
	if err != nil {
		return nil, err
	}
	a := d.attached()[r.key]
	if a == nil {
		return nil, fmt.Errorf("endpoint %.12s is not on record: restart the container", r.EndpointID)
	}
	var what network.Publication
	for _, b := range list {
		p, err := b.port()
		if err != nil {
			return nil, err
		}
		// Docker names 0.0.0.0 and ::, whatever the container has.
		isOf := func(has ipam.Address) bool { return has.Prefix.Addr().Is4() == p.HostAddr.Is4() }
		if !p.HostAddr.IsValid() || slices.ContainsFunc(a.Addresses, isOf) {
			what.Ports = append(what.Ports, p)
		}
	}
	return &answer{}, d.change(n, r.key).Publish(ctx, what)
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
	defer d.lock(r.EndpointID).Unlock()
	n, err := d.network(r.NetworkID)
	if err == nil {
		err = d.change(n, r.key).Publish(ctx, network.Publication{})
	}
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, network.ErrNotAttached) {
		err = nil
	}
	return &answer{}, err
}
