package docker

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/netip"
	"os"
	"slices"
	"strings"
	"sync"
	"time"

	current "github.com/containernetworking/cni/pkg/types/100"
	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/addr"
	"github.com/tombolo-cni/tombolo/internal/ident"
	"github.com/tombolo-cni/tombolo/internal/link"
	"github.com/tombolo-cni/tombolo/internal/nl"
	"github.com/tombolo-cni/tombolo/internal/runtimes"
	"github.com/tombolo-cni/tombolo/internal/state"
	"github.com/tombolo-cni/tombolo/netns"
	"github.com/tombolo-cni/tombolo/network"
)

// ofOurs is the prefix of endpoint options that Tombolo defines. The option withName sets the container's name. The MAC
// and the DHCP identity are derived from it, so that the next container with this name gets the same address.
const (
	ofOurs      = "tombolo."
	withName    = ofOurs + "name"
	longestName = 63 // the longest name of a host
)

// key identifies an endpoint by Docker's identifiers of the network and the endpoint.
type key struct{ NetworkID, EndpointID string }

// ifName returns the name that an endpoint's interface has in the attachment's record, and as an alternative name.
// srcName returns the interface's name in the host's namespace, from where Docker takes it.
func (k key) ifName() string  { return "tb-" + k.EndpointID[:shortest-1] }
func (k key) srcName() string { return "ts-" + k.EndpointID[:shortest-1] }

// endpoint holds the facts about an endpoint that are not in its record. A request locks it while it works on the
// endpoint.
type endpoint struct {
	sync.Mutex
	created time.Time
	join    *answer
	moved   bool // its interface is in the container
}

// lock locks the endpoint with the identifier id, so that only one request at a time works on it. With any other text
// as id, it locks that text. The caller must unlock the result.
func (d *Driver) lock(id string) *endpoint {
	one, _ := d.endpoints.LoadOrStore(id, new(endpoint))
	e := one.(*endpoint)
	e.Lock()
	return e
}

// attached returns the attachments of all endpoints that have a record. It skips networks and records that cannot be
// read.
func (d *Driver) attached() map[key]*network.Attachment {
	all := map[key]*network.Attachment{}
	for _, id := range d.networkIDs() {
		n, err := d.network(id)
		if err != nil {
			continue
		}

		list, _ := d.Node.Attachments(d.ctx, n.Name) // `tombolo check` reports unreadable records
		for _, a := range list {
			k := key{id, a.ContainerID}
			if len(a.ContainerID) >= shortest && a.IfName == k.ifName() {
				all[k] = a
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

	d.sweep() // an abandoned endpoint may still have the container's ports and name
	if mac := n.MAC(c); mac != "" {
		defer d.lock(n.Name + mac).Unlock() // Docker may create two endpoints with one MAC at the same time
		if err := d.waitForMAC(ctx, n, r.key, mac); err != nil {
			return nil, err
		}
	}

	e := d.lock(r.EndpointID)
	defer e.Unlock()
	if err := d.takeDown(r.key); err != nil { // Docker repeats the request after tombolod was killed
		return nil, err
	}

	e.created, e.moved = time.Now(), false
	made, err := attach(n, c, r.srcName())
	if err == nil {
		err = d.Node.Change(network.Key{Network: n.Name, ContainerID: c.ID, IfName: c.IfName}).Moved(ctx, "")
	}

	if err == nil {
		err = ctx.Err() // dockerd was killed, and will not know this endpoint
	}

	if err != nil {
		return nil, errors.Join(err, d.takeDown(r.key))
	}

	e.join = joinOf(made, r.srcName(), n.Options[withRouters] != "")
	e.join.InterfaceName.DstPrefix = cmp.Or(n.IfPrefix, e.join.InterfaceName.DstPrefix)
	return &answer{Interface: missingAddresses(n, c, made)}, nil
}

// waitForMAC waits until no other container of the network has the MAC. After dockerd was killed, it may start a
// container again while the kernel still deletes the namespace of the previous one. If another container has the MAC
// for longer, waitForMAC returns an error.
func (d *Driver) waitForMAC(ctx context.Context, n *runtimes.Network, own key, mac string) error {
	for range looksForMAC {
		if d.refuseTwo(ctx, n, own, mac) == nil || ctx.Err() != nil || !d.sleep(lookEvery) {
			break
		}
	}
	return d.refuseTwo(ctx, n, own, mac)
}

// refuseTwo returns an error if another container of the network has the MAC. A DHCP server and a router would take the
// two containers for one machine. Before this check, refuseTwo takes down attachments of dead containers.
func (d *Driver) refuseTwo(ctx context.Context, n *runtimes.Network, own key, mac string) error {
	_, _ = d.Node.CollectDead(ctx, n.Name, false) // ignore the error: the network may not exist yet
	for k, a := range d.attached() {
		if k.NetworkID == own.NetworkID && k != own && strings.EqualFold(a.MAC.String(), mac) {
			return fmt.Errorf(
				"--mac-address or tombolo.name: endpoint %.12s, whose container `docker network inspect %.12s` "+
					"names, has %s (%s): stop it, or give this container another",
				k.EndpointID, own.NetworkID, mac, cmp.Or(a.Pod, "no name"))
		}
	}

	return nil
}

// containerOf converts Docker's description of an endpoint into a runtimes.Container. It returns an error for unknown
// or invalid options.
func containerOf(r *request) (*runtimes.Container, error) {
	c := &runtimes.Container{ID: r.EndpointID, IfName: r.ifName(), MAC: r.Interface.MacAddress,
		Options: map[string]string{}}
	for name := range r.Options {
		option, isOurs := strings.CutPrefix(name, ofOurs)

		// Ignore case, since the docker command converts NAME in --network name=N,driver-opt=NAME=VALUE to small
		// letters.
		is := slices.IndexFunc(runtimes.ContainerOptions(),
			func(known string) bool { return strings.EqualFold(known, option) })
		switch {
		case name == withName || !isOurs && strings.Contains(name, "."): // Docker's own options contain dots
		case isOurs && is >= 0:
			var value string
			if err := optional(r.Options, name, &value); err != nil {
				return nil, err
			}
			c.Options[runtimes.ContainerOptions()[is]] = value
		default:
			return nil, fmt.Errorf("--driver-opt %s is not known: %s is, and with %[3]s before it: %[4]s",
				name, withName, ofOurs, strings.Join(runtimes.ContainerOptions(), ", "))
		}
	}

	if err := optional(r.Options, withName, &c.Name); err != nil {
		return nil, err
	}

	c.Lasting = r.Options[withName] != nil
	if c.Lasting && (!ident.IsIdentifier(c.Name) || len(c.Name) > longestName) {
		return nil, fmt.Errorf("%s=%.70q: it takes up to %d letters, digits, '-', '.' and '_', as a host name",
			withName, c.Name, longestName)
	}

	c.Addresses = slices.DeleteFunc([]netip.Prefix{r.Interface.Address, r.Interface.AddressIPv6},
		func(address netip.Prefix) bool { return !address.IsValid() })
	return c, nil
}

// attach calls the plugin's ADD for a container in a temporary network namespace. It then moves the interface to the
// host's namespace, where Docker takes it. name is the interface's name there.
func attach(n *runtimes.Network, c *runtimes.Container, name string) (*current.Result, error) {
	pod, err := netns.New()
	if err != nil {
		return nil, err
	}
	defer pod.Close()
	c.NetNS, c.Moves = fmt.Sprintf("/proc/%d/fd/%d", os.Getpid(), pod.FD()), true
	made, err := n.Call("ADD", c)
	if err != nil {
		return nil, err
	}
	return made, moveToHost(pod, c.IfName, name)
}

// moveToHost moves an interface from the namespace pod into the host's namespace, and renames it to newName. Its
// previous name stays as an alternative name.
func moveToHost(pod *netns.NS, name, newName string) error {
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

	// Linux before 6.2 renames a link only while it is down.
	link.Request{Index: index, Change: unix.IFF_UP}.Set(&b, "set link down", name)
	link.Request{Index: index, Name: newName}.Set(&b, "rename link", name)
	link.AddName(&b, index, name)
	link.Request{Index: index, Name: newName, NetNS: new(host.FD())}.Set(&b, "move link to the host's namespace", name)
	return within.Execute(&b)
}

// missingAddresses returns an endpoint's MAC and address, without those that Docker chose itself. If a container gets
// its IPv6 addresses later, from routers and DHCPv6, missingAddresses also returns its link-local address. Docker
// disables IPv6 in a container without an IPv6 address.
func missingAddresses(n *runtimes.Network, c *runtimes.Container, made *current.Result) *addresses {
	lacks := &addresses{}
	if mac, err := net.ParseMAC(runtimes.MACOf(made)); err == nil && n.Options[withRouters] != "" {
		lacks.AddressIPv6 = netip.PrefixFrom(addr.LinkLocal(mac), 64)
	}

	if c.MAC == "" {
		lacks.MacAddress = runtimes.MACOf(made)
	}

	if len(c.Addresses) == 0 && len(made.IPs) > 0 {
		lacks.Address, _ = netip.ParsePrefix(made.IPs[0].Address.String())
	}
	return lacks
}

// deleteEndpoint takes an endpoint down, even if it has no record.
func (d *Driver) deleteEndpoint(_ context.Context, r *request) (*answer, error) {
	defer d.lock(r.EndpointID).Unlock()
	defer d.endpoints.Delete(r.EndpointID)
	return &answer{}, d.takeDown(r.key)
}

// takeDown takes an endpoint down by a DEL. It needs only Docker's identifiers, since no endpoint has a record after a
// boot. An unknown network is no error.
func (d *Driver) takeDown(k key) error {
	n, err := d.network(k.NetworkID)
	if err == nil {
		_, err = n.Call("DEL", &runtimes.Container{ID: k.EndpointID, IfName: k.ifName()})
	}
	return state.Ignore(err, fs.ErrNotExist)
}

// joinsWithin is the time that Docker has to move a new endpoint's interface into a container. It is also the interval
// between the regular calls of sweep.
const joinsWithin = 5 * time.Minute

// sweep takes down the endpoints that dockerd abandoned: their interface is in the host's namespace, and Docker is not
// moving it into a container.
//
// A killed dockerd does not delete its endpoints. The next dockerd does not know them, or deletes its own records of
// them without calling this driver. It moves their interfaces back to the host's namespace, before its first request
// or later. If a container's namespace disappears, so do the interfaces in it. The keeper then takes their endpoints
// down as dead pods.
func (d *Driver) sweep() {
	conn, err := nl.Dial(unix.NETLINK_ROUTE, nil)
	if err != nil {
		return // the next attempt may succeed
	}
	defer conn.Close()
	isHere := func(k key) bool {
		_, err := link.IndexOf(conn, k.srcName())
		return err == nil
	}
	for k := range d.attached() {
		if !isHere(k) {
			continue // avoid waiting for the lock: a call may hold it until a DHCP server answers
		}

		e := d.lock(k.EndpointID)
		joins := !e.moved && e.created.UnixNano() > d.begun.Load() && time.Since(e.created) < joinsWithin
		if !joins && isHere(k) {
			err := d.takeDown(k)
			d.Log.Warn("took an endpoint down that dockerd has left in no container", "endpoint", k.EndpointID, "err",
				err)
		}
		e.Unlock()
	}
}
