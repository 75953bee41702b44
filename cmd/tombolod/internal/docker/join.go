package docker

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"time"

	current "github.com/containernetworking/cni/pkg/types/100"

	"github.com/tombolo-cni/tombolo/ipam"
	"github.com/tombolo-cni/tombolo/network"
	"github.com/tombolo-cni/tombolo/nft"
)

// These are the interval and the number of attempts to find an interface in its container, while Docker sets the
// container up.
const (
	lookEvery = 100 * time.Millisecond
	looks     = 600

	looksForMAC = 50 // attempts to find that no other container has a container's MAC
)

// join returns the name of the link that Docker must move into a container, and the routes that Docker must add there.
// It records the container's namespace, and starts to look for the link there in the background.
func (d *Driver) join(ctx context.Context, r *request) (*answer, error) {
	e, a := d.lock(r.EndpointID), d.attached()[r.key]
	defer e.Unlock()
	if e.join == nil || a == nil {
		return nil, fmt.Errorf("endpoint %.12s is not known to this tombolod: restart the container", r.EndpointID)
	}

	// Record the namespace's path now, so that a restarted tombolod also knows it.
	if err := d.Node.Change(a.Key).Moved(ctx, r.SandboxKey); err != nil && !errors.Is(err, network.ErrTryAgain) {
		return nil, err
	}

	d.work.Go(func() { d.follow(e, a.Key, r.SandboxKey) })
	return e.join, nil
}

// joinOf returns the link and the routes that Docker must add in a container. If the gateway of a default route is
// outside the container's subnets, joinOf adds a route to the gateway. It leaves out other routes with such a gateway,
// since Docker could not start the container with them. If hearsRouters is set, it leaves out the IPv6 default route,
// which routers will announce to the interface.
func joinOf(made *current.Result, srcName string, hearsRouters bool) *answer {
	a := &answer{InterfaceName: &interfaceName{srcName, "eth"}, DisableGatewayService: true}
	for _, route := range made.Routes {
		onLink := slices.ContainsFunc(made.IPs,
			func(ip *current.IPConfig) bool { return ip.Address.Contains(route.GW) })
		length, bits := route.Dst.Mask.Size()
		switch {
		case length == 0 && bits == 128 && hearsRouters:
			continue
		case length > 0 && route.GW == nil:
			a.StaticRoutes = append(a.StaticRoutes, staticRoute{route.Dst.String(), 1, ""})
		case length > 0 && onLink:
			a.StaticRoutes = append(a.StaticRoutes, staticRoute{route.Dst.String(), 0, route.GW.String()})
		case length > 0 || route.GW == nil:
		case route.GW.To4() != nil:
			a.Gateway = route.GW.String()
		default:
			a.GatewayIPv6 = route.GW.String()
		}

		if length == 0 && route.GW != nil && !onLink {
			a.StaticRoutes = append(a.StaticRoutes, staticRoute{fmt.Sprintf("%s/%d", route.GW, bits), 1, ""})
		}
	}

	return a
}

// follow looks for an interface in its container until it is there, and records its namespace. It logs a warning if it
// does not find the interface in time.
func (d *Driver) follow(e *endpoint, attachment network.Key, path string) {
	err := d.look(e, attachment, path)
	for i := 0; i < looks && errors.Is(err, network.ErrTryAgain) && d.sleep(lookEvery); i++ {
		err = d.look(e, attachment, path)
	}
	if err != nil && !errors.Is(err, network.ErrNotAttached) && d.ctx.Err() == nil {
		d.Log.Warn("cannot find an endpoint in its container: its lease is not renewed",
			"endpoint", attachment.ContainerID,
			"namespace", path, "err", err)
	}
}

func (d *Driver) look(e *endpoint, attachment network.Key, path string) error {
	e.Lock()
	defer e.Unlock()
	err := d.Node.Change(attachment).Moved(d.ctx, path)
	e.moved = err == nil
	return err
}

// portBinding is a port of the host that must lead to a container.
type portBinding struct {
	Proto                       uint8
	Port, HostPort, HostPortEnd uint16
	HostIP                      netip.Addr
}

// publish makes the requested host ports lead to this endpoint. Docker requests this for one endpoint of each
// container, the one for traffic to the outside. A request without ports removes all ports of the endpoint. A port
// without exactly one port of the host is an error.
func (d *Driver) publish(ctx context.Context, r *request) (*answer, error) {
	defer d.lock(r.EndpointID).Unlock()
	var list []portBinding
	if err := optional(r.Options, withPorts, &list); err != nil {
		return nil, err
	}

	a := d.attached()[r.key]
	if a == nil {
		return &answer{}, nil // the endpoint is gone, and so are its ports
	}

	has := func(b portBinding) bool {
		isOf := func(has ipam.Address) bool { return has.Prefix.Addr().Is4() == b.HostIP.Is4() }
		return !b.HostIP.IsValid() || slices.ContainsFunc(a.Addresses, isOf)
	}
	var what network.Publication
	for _, b := range list {
		if b.HostPort == 0 || b.HostPortEnd > b.HostPort {
			return nil,
				fmt.Errorf("--publish %d: name the one port of the host that is to lead there, as in --publish 8080:%d",
					b.Port, b.Port)
		}

		// Some versions of Docker name both 0.0.0.0 and ::, even for a container with one family. Skip the one whose
		// family the container lacks. For any other address of a missing family, Publish returns an error.
		isTwin := func(o portBinding) bool {
			isAll := b.HostIP.IsUnspecified() && o.HostIP.IsUnspecified()
			return isAll && o.Proto == b.Proto && o.Port == b.Port && o.HostPort == b.HostPort && has(o)
		}
		if has(b) || !slices.ContainsFunc(list, isTwin) {
			p := nft.Port{Protocol: nft.Protocol(b.Proto), HostAddr: b.HostIP, HostPort: b.HostPort, PodPort: b.Port}
			what.Ports = append(what.Ports, p)
		}
	}

	return &answer{}, d.Node.Change(a.Key).Publish(ctx, what)
}
