package keeper

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/tombolo-cni/tombolo/internal/firewalld"
	"github.com/tombolo-cni/tombolo/internal/state"
)

// newReclaim returns the source that takes down attachments of pods that died without a DEL, when the keeper starts and
// then every minute. An ADD that lacks resources, such as addresses, takes them down too.
func (k *Keeper) newReclaim(ctx context.Context) *source {
	s := &source{Keeper: k, ctx: ctx, kind: "dead", every: time.Minute}
	s.look = func(ctx context.Context) { s.reportResult("cannot delete all remains of dead pods", k.reclaim(ctx)) }
	return s
}

// newZones returns the source that puts links into firewalld's zone trusted. These are the links through which the host
// forwards packets of pods, except links that an operator has put into another zone.
func (k *Keeper) newZones(ctx context.Context) *source {
	host := k.Node.Upkeep().Host
	zones := firewalld.New(ctx, &firewalld.Config{State: k.State, Address: k.Bus, Tell: host, Log: k.Log})
	s := &source{Keeper: k, ctx: ctx, kind: "firewalld", every: time.Minute,
		listen: func() (feed, error) { return zones, nil }}
	s.look = func(ctx context.Context) {
		err := zones.Look(ctx)
		if err != nil {
			s.wake = now().Add(again / 2)
		}
		s.reportResult("cannot set firewalld's zones as pods need them: trying again",
			state.Ignore(err, firewalld.ErrNoBus))
	}

	return s
}

// reclaim takes down and logs the attachments of pods that died without a DEL. It returns an error about those that it
// could not take down.
func (k *Keeper) reclaim(ctx context.Context) error {
	dead, err := k.Node.CollectDead(ctx, "", false)
	errs := []error{err}
	for _, d := range dead {
		if d.Kept != nil {
			errs = append(errs,
				fmt.Errorf("%s of container %s in network %s: %w", d.IfName, d.ContainerID, d.Network, d.Kept))
			continue
		}
		k.metrics.reclaims.Inc()
		k.Log.Info("deleted the remains of a pod that died without a DEL",
			"network", d.Network, "pod", d.Pod, "container", d.ContainerID, "interface", d.IfName, "why", d.Why)
	}

	k.metrics.deadLooks.Inc()
	return errors.Join(errs...)
}
