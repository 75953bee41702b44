package keeper

import (
	"context"
	"errors"
	"log/slog"
	"testing"
	"testing/synctest"
	"time"
)

func TestDeadPodsAreLookedForAtOnceAndThenEveryMinute(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		looks := 0
		k := &Keeper{log: slog.New(slog.DiscardHandler), reclaim: func(context.Context) (int, error) {
			looks++
			if looks < 3 {
				return 0, errors.New("cannot")
			}
			return 2, nil
		}}
		ctx, cancel := context.WithTimeout(t.Context(), 2*reclaimEvery+time.Second)
		defer cancel()
		k.keepReclaiming(ctx)
		if looks != 3 || k.metrics.looks != 3 || k.metrics.reclaims != 2 {
			t.Errorf("%d looks; counted %d, and %d reclaimed", looks, k.metrics.looks, k.metrics.reclaims)
		}
		if k.metrics.errors != 1 {
			t.Errorf("the same failure was reported %d times, want once", k.metrics.errors)
		}
	})
}
