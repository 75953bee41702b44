package firewall

import (
	"context"
	"errors"
	"net/netip"

	"github.com/containernetworking/cni/pkg/types"
	current "github.com/containernetworking/cni/pkg/types/100"
	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo"
	"github.com/tombolo-cni/tombolo/internal/cni/reference"
	"github.com/tombolo-cni/tombolo/internal/ident"
	"github.com/tombolo-cni/tombolo/internal/nftnl"
	"github.com/tombolo-cni/tombolo/internal/nl"
	"github.com/tombolo-cni/tombolo/internal/sources"
	"github.com/tombolo-cni/tombolo/internal/state"
)

// zone is a zone of firewalld of which the pod's addresses are to be sources.
type zone struct {
	dir  *sources.Dir
	hash string
	name string
	text string // empty where the backend is not firewalld
}

// zone says what is to be of the addresses that prev, which may be nil, names. As in the reference, the
// backend is firewalld where none is named and firewalld runs.
func (f *conf) zone(c *reference.Call, prev *current.Result) (*zone, error) {
	d, err := state.Open(c.StateDir)
	if err != nil {
		return nil, err
	}
	z := &zone{dir: sources.Of(d), hash: ident.Hash(c.Network, c.ContainerID, c.IfName), name: f.FirewalldZone}
	if z.name == "" {
		z.name = "trusted"
	}
	wanted := f.Backend == "firewalld"
	if !wanted && f.Backend != "iptables" {
		if wanted, err = runs(z.dir); err != nil {
			return nil, err
		}
	}
	if !wanted || prev == nil {
		return z, nil
	}
	if !sources.IsZone(z.name) && c.Verb != "DEL" {
		return nil, reference.Errorf(types.ErrInvalidNetworkConfig, "firewalldZone %q cannot name a zone", z.name)
	}
	var addresses []netip.Addr
	for _, ip := range prev.IPs {
		if a, ok := netip.AddrFromSlice(ip.Address.IP); ok {
			addresses = append(addresses, a.Unmap())
		}
	}
	z.text = sources.Text(c.Network, z.name, addresses)
	return z, nil
}

// runs says whether firewalld works here: a tombolod says so, or its table is there.
func runs(dir *sources.Dir) (bool, error) {
	if dir.Attended() {
		return true, nil
	}
	conn, err := nl.Dial(unix.NETLINK_NETFILTER, nil)
	if err != nil {
		return false, err
	}
	defer conn.Close()
	is := false
	var b nl.Batch
	nftnl.Get(&b, nl.Name("table inet firewalld"), unix.NFPROTO_INET, unix.NFT_MSG_GETTABLE, func([]byte) error {
		is = true
		return nil
	}, nftnl.String(unix.NFTA_TABLE_NAME, "firewalld"))
	if err := nftnl.Look(conn, &b); err != nil && !nftnl.IsMissing(err) {
		return false, err
	}
	return is, nil
}

const codeObstructed = 117

// ask puts the addresses into the zone.
func (z *zone) ask(ctx context.Context) error {
	if z.text == "" {
		return nil
	}
	err := sources.ErrUnattended
	if z.dir.Attended() {
		err = z.dir.Ask(ctx, z.hash, z.text)
	}
	const start = `start firewalld and tombolod (systemctl start firewalld tombolod), or set "backend" to "iptables"`
	remedy := "see the log of tombolod"
	switch {
	case err == nil:
		return nil
	case errors.Is(err, sources.ErrUnattended):
		remedy = start
	case errors.Is(err, sources.ErrRefused):
		remedy = "see firewall-cmd --list-all-zones, or name another firewalldZone"
	}
	return reference.Errorf(codeObstructed, "put the pod's addresses into zone %s of firewalld: %v: %s", z.name, err, remedy)
}

func (z *zone) leave(ctx context.Context) error { return z.dir.Leave(ctx, z.hash, z.text) }

// check compares with what ADD did.
func (z *zone) check() []tombolo.Difference {
	if z.text == "" {
		return nil
	}
	attended := z.dir.Attended()
	is, why, err := z.dir.Has(z.hash, z.text)
	switch {
	case err != nil:
		why = err.Error()
	case !attended:
		why = sources.ErrUnattended.Error()
	case is:
		return nil
	}
	return []tombolo.Difference{{Text: "the pod's addresses are not kept in zone " + z.name + " of firewalld: " + why}}
}
