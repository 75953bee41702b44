package docker

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"time"

	"github.com/containernetworking/cni/pkg/types"
	current "github.com/containernetworking/cni/pkg/types/100"
	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/link"
	"github.com/tombolo-cni/tombolo/internal/nl"
	"github.com/tombolo-cni/tombolo/internal/runtimes"
	"github.com/tombolo-cni/tombolo/netns"
)

// withName is the option of an endpoint that names the container.
const withName = "tombolo.name"

// endpoint is what is kept of one, until the next boot.
type endpoint struct {
	NetworkID string
	Container runtimes.Container
	Created   time.Time
	Made      bool // the request that created it came to its end
	Join      answer
	Sandbox   string `json:",omitempty"` // the path of the container's namespace
	Moved     bool   // it is in the container, by its records
}

// ifName is the name by which an endpoint's interface is always found, and srcName the one that it has when Docker takes
// it.
func ifName(id string) string  { return "tb-" + id[:shortest-1] }
func srcName(id string) string { return "ts-" + id[:shortest-1] }

func (d *Driver) createEndpoint(ctx context.Context, r *request) (*answer, error) {
	n, err := d.network(r.NetworkID)
	if err != nil {
		return nil, err
	}
	e, err := endpointOf(r)
	if err != nil {
		return nil, err
	}
	d.sweep(nil) // of ports that the container is to have
	defer d.lock(r.EndpointID)()
	if d.endpoints.load(r.EndpointID, new(endpoint)) == nil { // Docker asks again, after tombolod was killed
		if err := d.takeDown(r.EndpointID, r.NetworkID); err != nil {
			return nil, err
		}
	}
	if err := d.endpoints.save(r.EndpointID, e); err != nil {
		return nil, err
	}
	result, err := attach(n, e.Container)
	if err == nil {
		e.Made, e.Join, e.Container.Addresses = true, joinOf(result), addressesOf(result)
		err = d.endpoints.save(r.EndpointID, e)
	}
	if err == nil {
		err = ctx.Err() // dockerd was killed, and will not know of it
	}
	if err != nil {
		return nil, errors.Join(err, d.takeDown(r.EndpointID, r.NetworkID))
	}
	return &answer{Interface: lacking(r.Interface, result)}, nil
}

// endpointOf reads what Docker tells of an endpoint.
func endpointOf(r *request) (*endpoint, error) {
	e := &endpoint{NetworkID: r.NetworkID, Created: time.Now(), Container: runtimes.Container{ID: r.EndpointID, IfName: ifName(r.EndpointID)}}
	c := &e.Container
	if err := optional(r.Options, withName, &c.Name); err != nil {
		return nil, err
	}
	c.Lasting = c.Name != ""
	if r.Interface == nil {
		return e, nil
	}
	c.MAC = r.Interface.MacAddress
	for _, text := range []string{r.Interface.Address, r.Interface.AddressIPv6} {
		if text == "" {
			continue
		}
		address, err := netip.ParsePrefix(text)
		if err != nil {
			return nil, err
		}
		c.Addresses = append(c.Addresses, address)
	}
	return e, nil
}

// attach has the plugin attach a container to a namespace of its own, and hands its interface to Docker.
func attach(n *runtimes.Network, c runtimes.Container) (*current.Result, error) {
	pod, err := netns.New()
	if err != nil {
		return nil, err
	}
	defer pod.Close()
	c.NetNS = fmt.Sprintf("/proc/%d/fd/%d", os.Getpid(), pod.FD())
	result, err := n.Call("ADD", &c)
	if err != nil {
		return nil, err
	}
	return result, handOver(pod, c)
}

// handOver moves an interface into the host's namespace. The name that it was made by stays with it.
func handOver(pod *netns.NS, c runtimes.Container) error {
	host, err := netns.Current()
	if err != nil {
		return err
	}
	defer host.Close()
	within, err := nl.Dial(unix.NETLINK_ROUTE, pod)
	if err != nil {
		return err
	}
	defer within.Close()
	index, err := link.IndexOf(within, c.IfName)
	if err != nil {
		return err
	}
	var b nl.Batch
	link.Request{Index: index, Change: unix.IFF_UP}.Set(&b, "set link down", c.IfName) // for the kernel to rename it
	link.Request{Index: index, Name: srcName(c.ID)}.Set(&b, "rename link", c.IfName)
	link.AddName(&b, index, c.IfName)
	link.Request{Index: index, Name: srcName(c.ID), NetNS: new(host.FD())}.Set(&b, "move link to the host's namespace", c.IfName)
	return within.Execute(&b)
}

func addressesOf(result *current.Result) (list []netip.Prefix) {
	for _, ip := range result.IPs {
		if a, err := netip.ParsePrefix(ip.Address.String()); err == nil {
			list = append(list, a)
		}
	}
	return list
}

// lacking is what an endpoint has and Docker has not given it.
func lacking(has *addresses, result *current.Result) *addresses {
	if has == nil {
		has = &addresses{}
	}
	lacks := &addresses{}
	for _, ip := range result.IPs {
		switch four := ip.Address.IP.To4() != nil; {
		case four && has.Address == "" && lacks.Address == "":
			lacks.Address = ip.Address.String()
		case !four && has.AddressIPv6 == "" && lacks.AddressIPv6 == "":
			lacks.AddressIPv6 = ip.Address.String()
		}
	}
	for _, i := range result.Interfaces {
		if i.Sandbox != "" && has.MacAddress == "" {
			lacks.MacAddress = i.Mac
		}
	}
	return lacks
}

// joinOf is what Docker is to be told of an endpoint's routes when a container gets it.
func joinOf(result *current.Result) answer {
	a := answer{DisableGatewayService: true}
	for _, r := range result.Routes {
		length, _ := r.Dst.Mask.Size()
		switch {
		case length == 0 && r.GW.To4() != nil && a.Gateway == "":
			a.Gateway = r.GW.String()
		case length == 0 && r.GW != nil && r.GW.To4() == nil && a.GatewayIPv6 == "":
			a.GatewayIPv6 = r.GW.String()
		default:
			a.StaticRoutes = append(a.StaticRoutes, staticRouteOf(r))
		}
	}
	return a
}

func staticRouteOf(r *types.Route) staticRoute {
	one := staticRoute{Destination: r.Dst.String()}
	if r.GW != nil {
		one.NextHop = r.GW.String()
	} else {
		one.RouteType = 1
	}
	return one
}

// deleteEndpoint takes an endpoint down, whatever is known of it.
func (d *Driver) deleteEndpoint(_ context.Context, r *request) (*answer, error) {
	defer d.lock(r.EndpointID)()
	defer d.busy.Delete(r.EndpointID)
	return &answer{}, d.takeDown(r.EndpointID, r.NetworkID)
}

// takeDown needs no more than the names, which follow from the identifiers: after a boot no endpoint is known.
func (d *Driver) takeDown(id, networkID string) error {
	n, err := d.network(networkID)
	if err == nil {
		_, err = n.Call("DEL", &runtimes.Container{ID: id, IfName: ifName(id)})
	}
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return d.endpoints.remove(id)
}
