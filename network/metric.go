package network

import (
	"errors"
	"io/fs"

	"github.com/tombolo-cni/tombolo"
	"github.com/tombolo-cni/tombolo/network/internal/reroute"
	"github.com/tombolo-cni/tombolo/route"
)

// secondRoute says that the pod has such a default route by another interface already.
type secondRoute struct{ error }

// makeWay finds larger metrics where an Attach failed since the pod has a default route by another
// interface, and says so by a secondRoute.
func (a *adding) makeWay(err error, asked []route.Route) error {
	var op *tombolo.OpError
	if !errors.Is(err, fs.ErrExist) || !errors.As(err, &op) || op.Op != "add route" {
		return err
	}
	before := a.metrics
	for i := range asked {
		if r := &asked[i]; reroute.IsDefault(r) {
			metric, lookErr := reroute.FreeMetric(a.pod.NetNS, r.Dst.Addr().Is6(), r.Priority)
			if lookErr != nil {
				return errors.Join(reroute.ExplainRoute(err), lookErr)
			}
			a.metrics[reroute.FamilyIndex(r.Dst.Addr())] = metric
		}
	}
	if a.metrics == before {
		return reroute.ExplainRoute(err)
	}
	return secondRoute{reroute.ExplainRoute(err)}
}
