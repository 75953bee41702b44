package docker

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"path/filepath"
	"time"

	current "github.com/containernetworking/cni/pkg/types/100"
	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/file"
	"github.com/tombolo-cni/tombolo/internal/link"
	"github.com/tombolo-cni/tombolo/internal/nl"
	"github.com/tombolo-cni/tombolo/internal/runtimes"
	"github.com/tombolo-cni/tombolo/netns"
)

// withName is the option of an endpoint that names the container.
const withName = "tombolo.name"

// key is what Docker calls an endpoint.
type key struct{ NetworkID, EndpointID string }

// ifName is the name by which an endpoint's interface is always found, and srcName the one that it has when Docker takes
// it.
func (k key) ifName() string  { return "tb-" + k.EndpointID[:shortest-1] }
func (k key) srcName() string { return "ts-" + k.EndpointID[:shortest-1] }

// endpoint is what is kept of one, until the next boot.
type endpoint struct {
	Created time.Time
	Made    current.Result // by the ADD
	Sandbox string         `json:",omitempty"` // the path of the container's namespace, once it has joined
}

// of is where the endpoints of a network are.
func (d *Driver) of(networkID string) store {
	return store(filepath.Join(d.StateDir, "docker", networkID))
}

// endpoints are all that can be read.
func (d *Driver) endpoints() map[key]*endpoint {
	all := map[key]*endpoint{}
	for _, networkID := range d.networks.list() {
		for _, id := range d.of(networkID).list() {
			e := new(endpoint)
			if d.of(networkID).load(id, e) == nil {
				all[key{networkID, id}] = e
			}
		}
	}
	return all
}

func (d *Driver) createEndpoint(ctx context.Context, r *request) (*answer, error) {
	n, err := d.network(r.NetworkID)
	if err != nil {
		return nil, err
	}
	c, err := containerOf(r)
	if err != nil {
		return nil, err
	}
	d.sweep() // of ports that the container is to have
	e := &endpoint{Created: time.Now()}
	if d.of(r.NetworkID).load(r.EndpointID, new(endpoint)) == nil { // Docker asks again, after tombolod was killed
		err = d.takeDown(r.key)
	}
	if err == nil {
		err = d.of(r.NetworkID).save(r.EndpointID, e)
	}
	if err != nil {
		return nil, err
	}
	made, err := attach(n, c, r.srcName())
	if err == nil {
		e.Made = *made
		err = d.of(r.NetworkID).save(r.EndpointID, e)
	}
	if err == nil {
		err = ctx.Err() // dockerd was killed, and will not know of it
	}
	if err != nil {
		return nil, errors.Join(err, d.takeDown(r.key))
	}
	return &answer{Interface: lacking(c, made)}, nil
}

// containerOf reads what Docker tells of an endpoint.
func containerOf(r *request) (*runtimes.Container, error) {
	c := &runtimes.Container{ID: r.EndpointID, IfName: r.ifName(), MAC: r.Interface.MacAddress}
	if err := optional(r.Options, withName, &c.Name); err != nil {
		return nil, err
	}
	c.Lasting = c.Name != ""
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
	return c, nil
}

// attach has the plugin attach a container to a namespace of its own, and hands its interface to Docker.
func attach(n *runtimes.Network, c *runtimes.Container, as string) (*current.Result, error) {
	pod, err := netns.New()
	if err != nil {
		return nil, err
	}
	defer pod.Close()
	c.NetNS = fmt.Sprintf("/proc/%d/fd/%d", os.Getpid(), pod.FD())
	made, err := n.Call("ADD", c)
	if err != nil {
		return nil, err
	}
	return made, handOver(pod, c.IfName, as)
}

// handOver moves an interface into the host's namespace. The name that it was made by stays with it.
func handOver(pod *netns.NS, name, as string) error {
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
	index, err := link.IndexOf(within, name)
	if err != nil {
		return err
	}
	var b nl.Batch
	link.Request{Index: index, Change: unix.IFF_UP}.Set(&b, "set link down", name) // for the kernel to rename it
	link.Request{Index: index, Name: as}.Set(&b, "rename link", name)
	link.AddName(&b, index, name)
	link.Request{Index: index, Name: as, NetNS: new(host.FD())}.Set(&b, "move link to the host's namespace", name)
	return within.Execute(&b)
}

// lacking is what an endpoint has and Docker has not given it: its MAC, and the one address of a lease.
func lacking(c *runtimes.Container, made *current.Result) *addresses {
	lacks := &addresses{}
	if c.MAC == "" {
		lacks.MacAddress = runtimes.MACOf(made)
	}
	if len(c.Addresses) == 0 && len(made.IPs) > 0 {
		lacks.Address = made.IPs[0].Address.String()
	}
	return lacks
}

// deleteEndpoint takes an endpoint down, whatever is known of it.
func (d *Driver) deleteEndpoint(_ context.Context, r *request) (*answer, error) {
	return &answer{}, d.takeDown(r.key)
}

// takeDown needs no more than the names, which follow from the identifiers: after a boot no endpoint is known.
func (d *Driver) takeDown(k key) error {
	n, err := d.network(k.NetworkID)
	if err == nil {
		_, err = n.Call("DEL", &runtimes.Container{ID: k.EndpointID, IfName: k.ifName()})
	}
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return file.Remove(d.of(k.NetworkID).path(k.EndpointID))
}

// joins is how long an interface may be in no container.
const joins = 5 * time.Minute

// sweep takes down what is in no container, but for what may be on its way into one. A dockerd that was killed does not
// delete endpoints: the next one has not heard of them, or deletes what it knows of them without a call of ours, and
// brings their interfaces back to the host's namespace. Those that go with a container's namespace are dead pods, which
// the keeper reclaims.
func (d *Driver) sweep() {
	conn, err := nl.Dial(unix.NETLINK_ROUTE, nil)
	if err != nil {
		return // the next one may
	}
	defer conn.Close()
	for k, e := range d.endpoints() {
		_, err := link.IndexOf(conn, k.srcName())
		ofThis := e.Created.UnixNano() > d.begun.Load() && time.Since(e.Created) < joins
		if err != nil || ofThis {
			continue
		}
		err = d.takeDown(k)
		d.Log.Warn("took an endpoint down that dockerd has left in no container", "endpoint", k.EndpointID, "err", err)
	}
}
