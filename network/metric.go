package network

import (
	"errors"
	"io/fs"
	"net/netip"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo"
	"github.com/tombolo-cni/tombolo/netns"
	"github.com/tombolo-cni/tombolo/route"
)

// A pod may have default routes by several networks, of which the kernel takes that with the
// smallest metric: the first network's.
const (
	metricStep = 100
	ipv6Metric = 1024 // that the kernel gives a route of IPv6 without one (IP6_RT_PRIO_USER)
)

// metrics are those of a pod's default routes by this network, IPv4's first. 0 leaves a route as
// it was asked for.
type metrics [2]uint32

// apply gives default routes their metrics. The list stays the caller's.
func (m metrics) apply(routes []route.Route) []route.Route {
	if m == (metrics{}) {
		return routes
	}
	list := append([]route.Route(nil), routes...)
	for i := range list {
		if metric := m[familyIndex(list[i].Dst.Addr())]; metric != 0 && isDefault(&list[i]) {
			list[i].Priority = metric
		}
	}
	return list
}

func familyIndex(a netip.Addr) int {
	if a.Is6() {
		return 1
	}
	return 0
}

func isDefault(r *route.Route) bool {
	return r.Dst.Bits() == 0 && (r.Table == 0 || r.Table == route.TableMain)
}

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
		if r := &asked[i]; isDefault(r) {
			metric, lookErr := freeMetric(a.pod.NetNS, r.Dst.Addr().Is6(), r.Priority)
			if lookErr != nil {
				return errors.Join(explainRoute(err), lookErr)
			}
			a.metrics[familyIndex(r.Dst.Addr())] = metric
		}
	}
	if a.metrics == before {
		return explainRoute(err)
	}
	return secondRoute{explainRoute(err)}
}

// freeMetric is the metric for a default route: the one that is asked for, unless the pod has a
// default route with it; then a larger one than any. 0 is the kernel's own.
func freeMetric(pod *netns.NS, ipv6 bool, asked uint32) (uint32, error) {
	conn, err := route.Dial(&route.Config{NetNS: pod})
	if err != nil {
		return 0, err
	}
	defer conn.Close()
	family, kernels := uint8(unix.AF_INET), uint32(0)
	if ipv6 {
		family, kernels = unix.AF_INET6, ipv6Metric
	}
	have, err := conn.List(route.Filter{Family: family, Table: route.TableMain})
	if err != nil {
		return 0, err
	}
	wanted, taken, largest := asked, false, uint32(0)
	if wanted == 0 {
		wanted = kernels
	}
	for _, r := range have {
		if r.Dst.Bits() > 0 || r.Type != route.Unicast {
			continue
		}
		taken = taken || r.Priority == wanted
		largest = max(largest, r.Priority)
	}
	if !taken {
		return asked, nil
	}
	return largest + metricStep, nil
}
