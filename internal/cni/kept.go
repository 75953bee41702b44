package cni

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/cni/ipamconf"
	"github.com/tombolo-cni/tombolo/internal/ident"
	"github.com/tombolo-cni/tombolo/internal/ipam/delegate"
	"github.com/tombolo-cni/tombolo/internal/lockorder"
	"github.com/tombolo-cni/tombolo/internal/nftnl"
	"github.com/tombolo-cni/tombolo/internal/nl"
	"github.com/tombolo-cni/tombolo/internal/state"
)

// A pod that another program made is that program's, and the reference's: where no record tells of the
// attachment, the program that had the name before carries the call out. It also takes down what it gave
// to pods before the names changed over.

// self is this program, as the kernel knows it.
const self = "/proc/self/exe"

// carriers say by which programs a call is to be carried out.
type carriers struct{ ours, kept bool }

// carriers are the kept program's alone where no record tells of the attachment. A damaged record is ours.
func (c *call) carriers(conf *NetConf) (carriers, error) {
	if c.verb == "GC" || c.verb == "STATUS" { // about no pod
		return carriers{kept: true}, nil
	}
	dir, err := state.Open(conf.settings().StateDir)
	if err != nil {
		return carriers{}, err
	}
	hash := ident.Hash(c.network, c.containerID, c.ifName)
	if c.verb == "DEL" {
		return c.carriersOfDEL(conf, dir, hash), nil
	}
	_, err = dir.Load(c.network, hash)
	ours := !errors.Is(err, fs.ErrNotExist) // a damaged record is ours
	return carriers{ours: ours, kept: !ours}, nil
}

// carriersOfDEL leave nothing of either: the names may have changed over since the ADD, one by one and back. What
// goes after a reboot is told by the ADD's result.
func (c *call) carriersOfDEL(conf *NetConf, dir *state.Dir, hash string) carriers {
	rec, err := dir.Load(c.network, hash)
	ours, others := c.madeBy(conf, "veth"+hash)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return carriers{ours: ours, kept: !ours}
	case err != nil || rec.State != state.Ready:
		return carriers{ours: true}
	}
	return carriers{ours: true, kept: others || c.mayHaveGiven(conf, rec)}
}

// madeBy says whose the port is that the ADD's result names, as far as it tells. A bridge of another program's comes
// with a port; plugins like ptp have no bridge.
func (c *call) madeBy(conf *NetConf, port string) (ours, others bool) {
	prev, err := parsePrevResult(conf, c.cniVersion)
	if err != nil || prev == nil {
		return false, false
	}
	host := 0
	for _, in := range prev.Interfaces {
		ours = ours || in.Name == port
		if in.Sandbox == "" {
			host++
		}
	}
	return ours, !ours && host > 1
}

// mayHaveGiven says whether a pod of ours may have by the kept program what the configuration asks for, since it has
// nothing of it by ours. What no ADD takes gave it nothing.
func (c *call) mayHaveGiven(conf *NetConf, rec *state.Attachment) bool {
	asked, err := conf.runtimeConfig()
	if err != nil {
		return false
	}
	may := false
	switch c.Name {
	case "bandwidth":
		limits, err := conf.shape(asked)
		may = err == nil && !limits.IsZero() && rec.Bandwidth.IsZero()
	case "firewall":
		may = isReferencesChainHere()
	case "portmap":
		ports, err := publishedPorts(asked.PortMappings)
		may = err == nil && len(ports) > 0 && len(rec.Published) == 0
	}
	if !may {
		return false
	}
	code, wrong := firstCode(c.named().examine(c))
	return !wrong || code == codeUnsupportedField // by ours alone
}

// isReferencesChainHere says whether the reference's firewall has its chain in iptables, where that works over nf_tables.
func isReferencesChainHere() (is bool) {
	conn, err := nl.Dial(unix.NETLINK_NETFILTER, nil)
	if err != nil {
		return false
	}
	defer conn.Close()
	for _, family := range []uint8{unix.NFPROTO_IPV4, unix.NFPROTO_IPV6} {
		var b nl.Batch
		nftnl.Get(&b, nl.Name("chain CNI-FORWARD"), family, unix.NFT_MSG_GETCHAIN, func([]byte) error {
			is = true
			return nil
		}, nftnl.String(unix.NFTA_CHAIN_TABLE, "filter"), nftnl.String(unix.NFTA_CHAIN_NAME, "CNI-FORWARD"))
		_ = nftnl.Look(conn, &b)
	}
	return is
}

// handOver has the program carry the call out that had the name before, and gives what that said.
func (c *call) handOver(ctx context.Context) ([]byte, error) {
	if c.verb == "STATUS" && c.isBridgeOurs() {
		return nil, nil // an ADD for pods of ours needs no other program
	}
	lockorder.Slow("a plugin")
	said, err := delegate.Forward(ctx, c.Kept, self, os.Environ(), c.stdin, os.Stderr)
	_, coded := firstCode(err)
	switch {
	case err == nil, coded, ctx.Err() != nil:
		return said, err
	case errors.Is(err, delegate.ErrNotFound), c.verb == "DEL" && errors.Is(err, delegate.ErrSelf):
		return nil, c.noneKept()
	case errors.Is(err, delegate.ErrSelf):
		return nil, newError(codeInvalidConfig, "%s is Tombolo itself: put the %s there that other programs' pods are for", c.Kept, c.Name)
	}
	return nil, newError(ipamconf.CodePluginFailed, "%v", err)
}

// isBridgeOurs says whether lists of this directory whose pods are ours need no more than our names.
func (c *call) isBridgeOurs() bool {
	ours, err := delegate.IsSame(self, filepath.Join(filepath.Dir(c.Kept), nameBridge))
	return err == nil && ours
}

// noneKept is the end of a call for a pod of another program's where there is no program to carry it out. None
// gave the pod anything either, so there is nothing to take down.
func (c *call) noneKept() error {
	if c.verb == "DEL" || c.verb == "GC" {
		return nil
	}
	code, what := ipamconf.CodePluginMissing, "interface "+c.ifName+" of container "+c.containerID+" is another program's"
	if c.verb == "STATUS" {
		code, what = codeNotAvailable, "pods may be another program's"
	}
	dir, name := filepath.Split(strings.TrimSuffix(c.Kept, filepath.Ext(c.Kept)))
	return newError(code, "%s, and no %s was kept as %s, which would work on it: install the reference's in %s, and then run tombolo install --names %s %[4]s", what, name, c.Kept, dir, name)
}
