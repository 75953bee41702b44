package keeper

import (
	"context"
	"errors"
	"fmt"
	"time"
)

// newReclaim has what dead pods hold reclaimed, at once and then every minute. An ADD that lacks what they hold looks
// for itself.
func (k *Keeper) newReclaim(ctx context.Context) *source {
	s := &source{Keeper: k, ctx: ctx, kind: "dead", every: time.Minute}
	said := ""
	s.look = func(ctx context.Context) {
		err := k.reclaim(ctx)
		text := ""
		if err != nil {
			text = err.Error()
		}
		if text != "" && text != said { // what cannot be helped is said once
			s.trouble("cannot reclaim all that dead pods hold", err)
		}
		said = text
	}
	return s
}

// reclaim takes down what pods hold that died without a DEL.
func (k *Keeper) reclaim(ctx context.Context) error {
	dead, err := k.network.CollectDead(ctx, "", false)
	errs := []error{err}
	for _, d := range dead {
		if d.Kept != nil {
			errs = append(errs, fmt.Errorf("%s of container %s in network %s: %w", d.IfName, d.ContainerID, d.Network, d.Kept))
			continue
		}
		k.metrics.reclaims.Inc()
		k.log.Info("reclaimed what a pod held that died without a DEL",
			"network", d.Network, "pod", d.Pod, "container", d.ContainerID, "interface", d.IfName, "why", d.Why)
	}
	k.metrics.deadLooks.Inc()
	return errors.Join(errs...)
}
