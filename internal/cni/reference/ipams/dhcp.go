package ipams

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"slices"
	"time"

	"github.com/containernetworking/cni/pkg/types"
	current "github.com/containernetworking/cni/pkg/types/100"

	"github.com/tombolo-cni/tombolo"
	"github.com/tombolo-cni/tombolo/dhcpc"
	"github.com/tombolo-cni/tombolo/internal/cni/cniargs"
	"github.com/tombolo-cni/tombolo/internal/cni/ipamconf"
	"github.com/tombolo-cni/tombolo/internal/cni/reference"
	"github.com/tombolo-cni/tombolo/internal/cni/reference/podlink"
	"github.com/tombolo-cni/tombolo/internal/lease"
	"github.com/tombolo-cni/tombolo/internal/link"
	"github.com/tombolo-cni/tombolo/internal/nl"
	"github.com/tombolo-cni/tombolo/netns"
	"github.com/tombolo-cni/tombolo/network"
)

// codeNotReady is the specification's, for STATUS: ADD cannot succeed.
const codeNotReady = 50

// DHCP is the plugin dhcp. The address is leased on the interface that the calling plugin has made,
// without a daemon on a socket, and tombolod renews it.
func DHCP(ctx context.Context, c *reference.Call) (*current.Result, error) {
	switch c.Verb {
	case "ADD":
		return lease4(ctx, c)
	case "CHECK":
		return nil, checkLease(c)
	case "STATUS":
		conf, err := readDHCP(c)
		if err != nil || conf.KeeperOptional() {
			return nil, err
		}
		dir, err := lease.Open(c.LeaseDir)
		if err == nil {
			err = dir.CheckKeeper()
		}
		if err != nil {
			err = reference.Errorf(codeNotReady, "%v", err)
		}
		return nil, err
	}
	keys, err := ending(c)
	if err != nil || len(keys) == 0 {
		return nil, err
	}
	node, err := c.Open()
	if err != nil {
		return nil, err
	}
	var errs []error
	for _, key := range keys {
		errs = append(errs, node.Unlease(ctx, key))
	}
	return nil, errors.Join(errs...)
}

// ending are the attachments whose leases DEL or GC ends.
func ending(c *reference.Call) ([]network.Key, error) {
	if c.Verb == "DEL" {
		return []network.Key{c.Key()}, nil
	}
	keep, told, err := c.Valid()
	if err != nil || !told {
		return nil, err
	}
	dir, err := lease.Open(c.LeaseDir)
	if err != nil {
		return nil, err
	}
	all, _, err := dir.List()
	var keys []network.Key
	for _, r := range all {
		key := network.Key{Network: r.Network, ContainerID: r.ContainerID, IfName: r.IfName}
		if r.Apart && r.State != lease.Sticky && r.Network == c.Network && !slices.Contains(keep, key) {
			keys = append(keys, key)
		}
	}
	return keys, err
}

func readDHCP(c *reference.Call) (*ipamconf.DHCP, error) {
	var f struct {
		IPAM json.RawMessage `json:"ipam"`
	}
	if err := c.Unmarshal(&f); err != nil {
		return nil, err
	}
	if reference.IsEmpty(f.IPAM) {
		return nil, reference.Errorf(types.ErrInvalidNetworkConfig, `the configuration has no section "ipam"`)
	}
	return ipamconf.ReadDHCP(f.IPAM, true)
}

// lease4 gets the lease, and says what the reference's plugin says of it.
func lease4(ctx context.Context, c *reference.Call) (*current.Result, error) {
	conf, err := readDHCP(c)
	if err != nil {
		return nil, err
	}
	args, _ := cniargs.Parse(c.Args) // of which the reference's plugin refuses nothing
	pod := &network.Pod{ContainerID: c.ContainerID, IfName: c.IfName, Path: c.NetNS, Name: args.Pod()}
	mac, err := macOf(c)
	if err != nil {
		return nil, err
	}
	id := &ipamconf.Identity{Network: c.Network, ContainerID: c.ContainerID, IfName: c.IfName, Pod: pod.Name}
	if pod.Lease, err = conf.Lease(id, mac, args); err != nil {
		return nil, err
	}
	node, err := c.Open()
	if err != nil {
		return nil, err
	}
	l, err := node.Lease(ctx, c.Network, pod)
	if err != nil {
		return nil, err
	}
	return resultOf(l, conf.Priority), nil
}

func macOf(c *reference.Call) (net.HardwareAddr, error) {
	var l link.Link
	err := podlink.Within(c.NetNS, func(conn *nl.Conn, _ *netns.NS) error {
		var b nl.Batch
		link.Get(&b, c.IfName, 0, &l)
		return conn.Execute(&b)
	})
	if errors.Is(err, fs.ErrNotExist) {
		err = fmt.Errorf("%w: dhcp leases on an interface that the plugin which calls it made before (ptp does that after)", err)
	}
	return l.MAC, err
}

// resultOf has all of a lease's routes: what the interface needs of them is for its plugin to say. One
// on the link has a gateway that is none, or plugins would put that of the address in its place.
func resultOf(l *dhcpc.Lease, priority int) *current.Result {
	ip := &current.IPConfig{Address: reference.IPNet(l.Address)}
	if len(l.Routers) > 0 {
		ip.Gateway = l.Routers[0].AsSlice()
	}
	result := &current.Result{CNIVersion: current.ImplementedSpecVersion, IPs: []*current.IPConfig{ip}}
	for _, r := range l.Routes {
		one := &types.Route{Dst: reference.IPNet(r.Dst), GW: r.Via.AsSlice(), Priority: priority}
		if !r.Via.IsValid() {
			onLink := 253 // RT_SCOPE_LINK
			one.GW, one.Scope = net.IPv4zero.To4(), &onLink
		}
		result.Routes = append(result.Routes, one)
	}
	return result
}

// checkLease compares with what is on record: the interface is for the calling plugin to check.
func checkLease(c *reference.Call) error {
	conf, err := readDHCP(c)
	if err != nil {
		return err
	}
	dir, err := lease.Open(c.LeaseDir)
	if err != nil {
		return err
	}
	var found []tombolo.Difference
	add := func(text string) { found = append(found, tombolo.Difference{Text: text}) }
	if err := dir.CheckKeeper(); err != nil && !conf.KeeperOptional() {
		add(err.Error())
	}
	r, err := dir.Load(lease.Hash(c.Network, c.ContainerID, c.IfName))
	switch {
	case errors.Is(err, fs.ErrNotExist):
		add("its lease has no record in " + dir.Path())
	case err != nil:
		add(err.Error())
	case r.State != lease.Bound:
		add(fmt.Sprintf("its lease is %s: %s", r.State, r.Error))
	case r.Lease.Left(time.Now()) == 0:
		add("its lease of " + r.Lease.Address.String() + " ended at " + r.Lease.Expire.Format(time.RFC3339))
	}
	return reference.Differ(found, nil)
}
