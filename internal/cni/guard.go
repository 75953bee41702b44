package cni

import (
	"context"
	"crypto/rand"
	"errors"
	"io/fs"
	"net"

	"github.com/tombolo-cni/tombolo/bridge"
	"github.com/tombolo-cni/tombolo/internal/state"
	"github.com/tombolo-cni/tombolo/nft"
)

// A guarded pod is held to its MAC and its addresses for as long as its port is there: the
// elements say so before the port is made, and go after it. A process may wait in the
// pod's namespace for its interface, and bring it up before anybody else does; and it goes
// on sending until the interface is gone.

// guard enters what holds the pod to its MAC and its addresses, before its port is there.
// A pod that gets its addresses later has its host ports then, too.
func (a *adding) guard(ctx context.Context, n *network, p *bridge.Port) error {
	if !a.rec.Guarded {
		return nil
	}
	if p.PeerMAC == nil {
		p.PeerMAC = randomMAC()
	}
	a.rec.MAC = p.PeerMAC.String()
	ep := endpointOf(a.rec)
	if a.getsMore() {
		ep.Ports, ep.Masquerade = nil, false
	}
	a.undo.push(func(ctx context.Context) error {
		if a.attached {
			return nil // it could not be deleted, and stays guarded
		}
		if a.guarded == nil {
			// The kernel's answer may have been lost, and the elements be there. But what a
			// killed ADD left may have a port yet, whose guard these are.
			if _, err := a.br.Link(ctx, a.rec.HostIf); !errors.Is(err, fs.ErrNotExist) {
				return err
			}
		}
		return a.fw.Remove(ctx, ep, endpointOf(a.rec))
	})
	if err := a.enlist(ctx, n, func() error { return a.fw.Add(ctx, ep) }); err != nil {
		return err
	}
	a.guarded = &ep
	return nil
}

// getsMore says whether the pod gets addresses after it got its port.
func (a *adding) getsMore() bool { return a.leasing != nil || a.settings.SLAAC }

// randomMAC gives a unicast MAC of the locally administered kind.
func randomMAC() net.HardwareAddr {
	mac := make(net.HardwareAddr, 6)
	_, _ = rand.Read(mac) // which never fails
	mac[0] = mac[0]&^1 | 2
	return mac
}

// admit enters the pod into the firewall's sets, as far as it is not there yet.
func (a *adding) admit(ctx context.Context, n *network) error {
	ep := endpointOf(a.rec)
	if a.guarded == nil {
		a.undo.push(func(ctx context.Context) error { return a.fw.Remove(ctx, ep) })
		return a.enlist(ctx, n, func() error { return a.fw.Add(ctx, ep) })
	}
	if !a.getsMore() {
		// All of it is there, unless somebody has flushed it meanwhile.
		if same, err := a.fw.Untouched(ctx); err != nil || same {
			return err
		}
	}
	return a.enlist(ctx, n, func() error { return a.fw.Update(ctx, *a.guarded, ep) })
}

// enlist enters an endpoint, in the place of what a pod that is gone left.
func (a *adding) enlist(ctx context.Context, n *network, enter func() error) error {
	err := enter()
	if errors.Is(err, fs.ErrNotExist) {
		// A set went missing since we looked.
		if _, err := a.ready(ctx, n); err != nil {
			return err
		}
		err = enter()
	}
	var conflict *nft.ConflictError
	for errors.As(err, &conflict) {
		stale, lookErr := a.isStale(ctx, conflict)
		if lookErr != nil {
			return errors.Join(err, lookErr)
		}
		if !stale {
			return a.explainConflict(conflict)
		}
		if string(conflict.Owner) == a.call.hash() && !a.attached {
			// What a killed ADD left may have a port yet, whose guard this is.
			if err := a.br.Detach(ctx, a.rec.HostIf, aliasOwner(a.call.hash())); err != nil {
				return err
			}
		}
		// Whatever else it left, nobody will miss.
		if err := a.fw.RemoveOwners(ctx, conflict.Owner); err != nil {
			return err
		}
		err = enter()
	}
	return err
}

// isStale says whether the owner of an element is gone: it has no port, and no record
// of an ADD that may be about to make one. The attachment itself is its own
// predecessor, of which a killed ADD left something.
func (a *adding) isStale(ctx context.Context, conflict *nft.ConflictError) (bool, error) {
	switch string(conflict.Owner) {
	case "":
		return false, nil
	case a.call.hash():
		return true, nil
	}
	rec, err := a.dir.Load(conflict.Network, string(conflict.Owner))
	if err == nil && rec.State != state.Ready {
		return false, nil
	}
	l, err := a.br.Link(ctx, "veth"+string(conflict.Owner))
	if errors.Is(err, fs.ErrNotExist) {
		return true, nil
	}
	if err != nil {
		return false, err
	}
	owner, ours := parseAlias(l.Alias)
	return !ours || owner.hash != string(conflict.Owner), nil
}
