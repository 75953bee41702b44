package keeper

import (
	"context"
	"errors"
	"fmt"
	"time"
)

// newReclaim returns the source that reclaims the resources of dead pods, at once and then every minute. An ADD that
// lacks resources reclaims them itself.
func (k *Keeper) newReclaim(ctx context.Context) *source {
	s := &source{Keeper: k, ctx: ctx, kind: "dead", every: time.Minute}
	logged := ""
	s.look = func(ctx context.Context) {
		err := k.reclaim(ctx)
		text := ""
		if err != nil {
			text = err.Error()
		}
		if text != "" && text != logged { // log an error that repeats only once
			s.trouble("cannot reclaim all that dead pods hold", err)
		}
		logged = text
	}

	return s
}

// reclaim frees the resources of pods that died without a DEL.
func (k *Keeper) reclaim(ctx context.Context) error {
	dead, err := k.network.CollectDead(ctx, "", false)
	errs := []error{err}
	for _, d := range dead {
		if d.Kept != nil {
			errs = append(errs,
				fmt.Errorf("%s of container %s in network %s: %w", d.IfName, d.ContainerID, d.Network, d.Kept))
			continue
		}
		k.metrics.reclaims.Inc()
		k.log.Info("reclaimed what a pod held that died without a DEL",
			"network", d.Network, "pod", d.Pod, "container", d.ContainerID, "interface", d.IfName, "why", d.Why)
	}

	k.metrics.deadLooks.Inc()
	return errors.Join(errs...)
}
