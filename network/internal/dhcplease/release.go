// Package dhcplease has what pods lease by DHCP done outside of the calls' one lock: the
// sockets that lease, giving back, and what of a lease is not as it should be.
package dhcplease

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"net"
	"net/netip"
	"slices"
	"time"

	"github.com/tombolo-cni/tombolo"
	"github.com/tombolo-cni/tombolo/bridge"
	"github.com/tombolo-cni/tombolo/dhcpc"
	"github.com/tombolo-cni/tombolo/dhcpc/transport"
	"github.com/tombolo-cni/tombolo/internal/lease"
	"github.com/tombolo-cni/tombolo/internal/lease/giveback"
	"github.com/tombolo-cni/tombolo/internal/state"
	"github.com/tombolo-cni/tombolo/ipam"
	"github.com/tombolo-cni/tombolo/network/internal/fail"
	"github.com/tombolo-cni/tombolo/network/internal/recorded"
	"github.com/tombolo-cni/tombolo/route"
)

// Release gives back what an attachment leased, from the pod's interface as long as that is there, else from the
// bridge, and removes the lease's record. If the message does not reach the server, the address is free when the
// lease ends. The state's lock must not be held.
func Release(ctx context.Context, links *bridge.Conn, path, hash string, warn func(string)) error {
	dir, err := lease.Open(path)
	if err != nil {
		return err
	}
	if _, err := dir.Load(hash); errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	held, err := dir.Lock(ctx, hash)
	if err != nil {
		return fail.Errorf(fail.ErrTryAgain, "%w", err)
	}
	defer held.Close()
	rec, err := held.Load()
	var damaged *lease.RecordError
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil
	case errors.As(err, &damaged):
		warn(err.Error())
		return held.Remove()
	case err != nil:
		return fail.State(err)
	}
	if rec.Lease != nil && rec.State == lease.Bound && rec.Lease.Left(time.Now()) != 0 {
		if err := sendRelease(ctx, links, dir, rec); err != nil {
			// It must not keep a pod from going.
			warn(err.Error())
		}
	}
	if rec.Six != nil {
		if err := end6(ctx, links, rec); err != nil {
			warn(err.Error())
		}
	}
	if rec.Client.Sticky && rec.Lease != nil {
		if err = held.Remember(ctx, rec); err == nil {
			return nil
		}
		warn(err.Error()) // the disk is full, say
	}
	return held.Remove()
}

// sendRelease sends the RELEASE. A pod's lease that is to stay its own is not given
// back: the server keeps the address for it as long as the lease runs. Nor is that of a pod that is gone and whose
// identity another has by now: to the server both are the same client.
func sendRelease(ctx context.Context, links *bridge.Conn, dir *lease.Dir, rec *lease.Record) error {
	if rec.Client.Sticky {
		return nil
	}
	if pod, err := recorded.OpenPod(rec.NetNS, rec.NetNSCookie); err == nil {
		defer pod.Close()
		if index, err := recorded.InterfaceIn(ctx, pod, rec.IfName); err == nil {
			return releaseFromPod(ctx, &transport.Config{NetNS: pod, Link: index, MAC: net.HardwareAddr(rec.Lease.MAC)}, rec.Lease)
		}
	}
	if others, err := dir.Same(rec); err != nil || len(others) > 0 {
		return err
	}
	return giveback.Release(ctx, rec, links, nil, rec.Lease)
}

// releaseFromPod sends it from the pod's interface, by a packet socket: by a UDP
// socket, the packet might still wait for the server's MAC when the link
// goes.
func releaseFromPod(ctx context.Context, sockets *transport.Config, l *dhcpc.Lease) error {
	p, err := dhcpc.Release(l, rand.Uint32())
	if err != nil {
		return err
	}
	raw, err := transport.DialRaw(sockets)
	if err != nil {
		return err
	}
	return errors.Join(raw.Send(ctx, p), raw.Close())
}

// leaseLockWait is more than the keeper has a record locked for.
const leaseLockWait = 5 * time.Second

// Lead changes what the pod is to have of its lease: a default route by an address of
// the host. The record says first that it
// may have both, as the keeper's does.
func Lead(ctx context.Context, a *state.Attachment, routes *route.Conn, link int, own netip.Addr) error {
	dir, err := lease.Open(a.DataDir)
	if err != nil {
		return err
	}
	short, cancel := context.WithTimeout(ctx, leaseLockWait)
	defer cancel()
	held, err := dir.Lock(short, a.Hash())
	if err != nil {
		return err
	}
	defer held.Close()
	rec, err := held.Load()
	if err != nil || !rec.Policy.Gateway.IsValid() {
		return err
	}
	rec.Policy.Gateway = own
	if rec.State != lease.Bound {
		return held.Replace(rec) // its next lease has it
	}
	want := rec.Policy.Apply(rec.Lease)
	stale := lease.Applied{Routes: rec.Applied.Without(want).Routes}
	rec.Applied.Routes = slices.Concat(want.Routes, stale.Routes)
	if err := held.Replace(rec); err != nil {
		return err
	}
	for _, r := range want.Routes {
		if _, err := routes.Ensure(lease.RouteOf(r, link, rec.Policy.Priority)); err != nil {
			return err
		}
	}
	for _, r := range slices.Backward(stale.Routes) {
		if err := routes.Remove(lease.RouteOf(r, link, rec.Policy.Priority)); err != nil {
			return err
		}
	}
	rec.Applied.Routes = want.Routes
	return held.Replace(rec)
}

// Differences compares an attachment with its lease. It need not be kept with keeperOptional. Of a lease
// that a keeper is at work on, whatever is wrong is not for the node to mend.
func Differences(rec *state.Attachment, keeperOptional bool) ([]tombolo.Difference, error) {
	var found []tombolo.Difference
	remedy := tombolo.RemedyConfigure
	add := func(format string, args ...any) {
		found = append(found, tombolo.Difference{Text: fmt.Sprintf(format, args...), Remedy: remedy})
	}
	dir, err := lease.Open(rec.DataDir)
	if err != nil {
		return nil, err
	}
	if !keeperOptional {
		if err := dir.CheckKeeper(); err != nil {
			remedy = tombolo.RemedyKeeper
			add("%v", err)
		}
	}
	r, err := dir.Load(rec.Hash())
	switch {
	case errors.Is(err, fs.ErrNotExist):
		remedy = tombolo.RemedyRecreate
		add("its lease has no record in %s", dir.Path())
	case err != nil:
		remedy = tombolo.RemedyRecreate
		add("%v", err)
	case r.State != lease.Bound:
		add("its lease is %s: %s", r.State, r.Error)
	case len(rec.Addresses) == 0 || r.Lease.Address != rec.Addresses[0].Prefix:
		remedy = tombolo.RemedyRepair
		add("its lease is of %s", r.Lease.Address)
	case r.Lease.Left(time.Now()) == 0:
		add("its lease of %s ended at %s", r.Lease.Address, r.Lease.Expire.Format(time.RFC3339))
	}
	if err == nil && r.Six != nil && !r.Six.Stateless {
		switch own := r.Leased6(); {
		case !own.IsValid():
			add("it has no address by DHCPv6: %s", r.Six.Error)
		case r.Six.Lease.Left(time.Now()) == 0:
			add("its DHCPv6 lease of %s ended at %s", own.Addr(), r.Six.Lease.Expire.Format(time.RFC3339))
		case !slices.ContainsFunc(rec.Addresses, func(a ipam.Address) bool { return a.Prefix == own }):
			add("its DHCPv6 lease is of %s", own.Addr())
		}
	}
	return found, nil
}
