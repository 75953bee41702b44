package keeper

import (
	"context"
	"time"
)

// reclaimEvery is how often the keeper looks for pods that died without a DEL. An ADD that
// lacks what they hold looks for itself.
const reclaimEvery = time.Minute

// keepReclaiming has what dead pods hold reclaimed, at once and then every minute.
func (k *Keeper) keepReclaiming(ctx context.Context) {
	ticker := time.NewTicker(reclaimEvery)
	defer ticker.Stop()
	said := ""
	for ctx.Err() == nil {
		n, err := k.reclaim(ctx)
		k.metrics.reclaimed(n)
		text := ""
		if err != nil && ctx.Err() == nil {
			text = err.Error()
		}
		if text != "" && text != said { // what cannot be helped is said once
			k.failed("cannot reclaim all that dead pods hold", "err", text)
		}
		said = text
		select {
		case <-ctx.Done():
		case <-ticker.C:
		}
	}
}

func (m *metrics) reclaimed(n int) {
	m.mu.Lock()
	m.looks++
	m.reclaims += uint64(n)
	m.mu.Unlock()
}

// collectReclaims is part of Collect.
func (m *metrics) collectReclaims(to sink) {
	to.counter("tombolo_dead_looks_total", "Looks for pods that died without a DEL.", m.looks)
	to.counter("tombolo_dead_reclaimed_total", "Attachments of such pods that were taken down.", m.reclaims)
}
