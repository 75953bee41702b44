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

	"github.com/tombolo-cni/tombolo/network"
	"github.com/tombolo-cni/tombolo/nft"
)

// While Docker sets a container up, its interface is looked for there so often, and so many times.
const (
	lookEvery = 100 * time.Millisecond
	looks     = 600
)

// join tells Docker which link to move into a container, and by which gateways it goes out. Other routes of a lease are
// the keeper's to make.
func (d *Driver) join(_ context.Context, r *request) (*answer, error) {
	var e endpoint
	if err := d.of(r.NetworkID).load(r.EndpointID, &e); err != nil {
		return nil, fmt.Errorf("endpoint %.12s: %w: restart the container", r.EndpointID, err)
	}
	e.Sandbox = r.SandboxKey
	if err := d.of(r.NetworkID).save(r.EndpointID, &e); err != nil {
		return nil, err
	}
	d.work.Go(func() { d.follow(r.key, looks) })
	a := &answer{InterfaceName: &interfaceName{r.srcName(), "eth"}, DisableGatewayService: true}
	for _, route := range e.Made.Routes {
		switch length, _ := route.Dst.Mask.Size(); {
		case length > 0 || route.GW == nil:
		case route.GW.To4() != nil:
			a.Gateway = route.GW.String()
		default:
			a.GatewayIPv6 = route.GW.String()
		}
	}
	return a, nil
}

// follow has the records follow an interface into its container.
func (d *Driver) follow(k key, looks int) {
	err := d.moved(k)
	for ; errors.Is(err, network.ErrTryAgain) && looks > 0; looks-- {
		select {
		case <-d.ctx.Done():
			return
		case <-time.After(lookEvery):
		}
		err = d.moved(k)
	}
	if err != nil && d.ctx.Err() == nil {
		d.Log.Warn("cannot find an endpoint in its container: its lease is not renewed", "endpoint", k.EndpointID, "err", err)
	}
}

// moved is done, too, where the endpoint has been deleted.
func (d *Driver) moved(k key) error {
	var e endpoint
	if d.of(k.NetworkID).load(k.EndpointID, &e) != nil {
		return nil
	}
	change, err := d.change(k)
	if err != nil {
		return err
	}
	return change.Moved(d.ctx, e.Sandbox)
}

// change gives access to an endpoint that is there.
func (d *Driver) change(k key) (network.Change, error) {
	n, err := d.network(k.NetworkID)
	if err != nil {
		return network.Change{}, err
	}
	return d.Node.Change(network.Key{Network: n.Name, ContainerID: k.EndpointID, IfName: k.ifName()}), nil
}

// portBinding is a port of the host that is to lead to a container.
type portBinding struct {
	Proto                       uint8
	Port, HostPort, HostPortEnd uint16
	HostIP                      string
}

// publish has the ports of a container lead to this endpoint, by which Docker has it reach the world.
func (d *Driver) publish(ctx context.Context, r *request) (*answer, error) {
	var e endpoint
	var list []portBinding
	if err := optional(r.Options, withPorts, &list); err != nil || len(list) == 0 {
		return &answer{}, err
	}
	err := d.of(r.NetworkID).load(r.EndpointID, &e)
	if err != nil {
		return nil, err
	}
	var what network.Publication
	for _, b := range list {
		p, err := b.port()
		if err != nil {
			return nil, err
		}
		// Docker names 0.0.0.0 and ::, whatever the container has.
		isOf := func(ip *current.IPConfig) bool { return (ip.Address.IP.To4() != nil) == p.HostAddr.Is4() }
		if !p.HostAddr.IsValid() || slices.ContainsFunc(e.Made.IPs, isOf) {
			what.Ports = append(what.Ports, p)
		}
	}
	change, err := d.change(r.key)
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
	change, err := d.change(r.key)
	if err == nil {
		err = change.Publish(ctx, network.Publication{})
	}
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, network.ErrNotAttached) {
		err = nil
	}
	return &answer{}, err
}
