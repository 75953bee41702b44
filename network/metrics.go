package network

import (
	"errors"
	"io/fs"
	"net/netip"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo"
	"github.com/tombolo-cni/tombolo/addr"
	"github.com/tombolo-cni/tombolo/bridge"
	"github.com/tombolo-cni/tombolo/netns"
	"github.com/tombolo-cni/tombolo/network/internal/fail"
	"github.com/tombolo-cni/tombolo/network/internal/recorded"
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

// familyIndex is the place in metrics of an address' family.
func familyIndex(a netip.Addr) int {
	if a.Is6() {
		return 1
	}
	return 0
}

// makeWay finds larger metrics for the default routes of a port whose Attach failed since the pod has such routes
// by another interface.
func (a *adding) makeWay(p *plan, port *bridge.Port, failed error) error {
	before := a.metrics
	for i := range port.Routes {
		if r := &port.Routes[i]; isDefault(r) {
			metric, err := freeMetric(a.pod.NetNS, r.Dst.Addr().Is6(), r.Priority)
			if err != nil {
				return errors.Join(failed, err)
			}
			a.metrics[familyIndex(r.Dst.Addr())] = metric
		}
	}
	if a.metrics == before {
		return failed
	}
	port.Routes = a.metrics.apply(port.Routes)
	p.port.Routes, p.rec.Routes = port.Routes, recorded.Routed(&p.rec, port.Routes)
	return nil
}

// isDefault says that a route is a default route of the main table.
func isDefault(r *route.Route) bool {
	return r.Dst.Bits() == 0 && (r.Table == 0 || r.Table == route.TableMain)
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
	wanted, taken, largest := asked, false, uint32(0)
	if wanted == 0 {
		wanted = kernels
	}
	err = conn.Walk(route.Filter{Family: family, Table: route.TableMain}, func(r route.Route) {
		if r.Dst.Bits() > 0 || r.Type != route.Unicast {
			return
		}
		taken = taken || r.Priority == wanted
		largest = max(largest, r.Priority)
	})
	if err != nil || !taken {
		return asked, err
	}
	return largest + metricStep, nil
}

// explainRoute tells what to do where the pod has a route by another interface.
func explainRoute(err error) error {
	if isSecondRoute(err) {
		return fail.Errorf(fail.ErrConflict, "%w: the pod has such a route by another of its interfaces: give this one another priority, or leave it out", err)
	}
	return err
}

func isSecondRoute(err error) bool {
	var op *tombolo.OpError
	return errors.Is(err, fs.ErrExist) && errors.As(err, &op) && op.Op == "add route"
}

// gateway6 is where the pod's default route leads: to the LAN's router, of which the
// pod's own kernel has learnt it, or to the host, to which it is added here. A link-local
// address of the host's stays when the LAN gets another prefix.
func gateway6(links *bridge.Conn, l *bridge.Link, pod *netns.NS, link *bridge.Attachment, got *bridge.Autoconfigured, router bool) (_ netip.Addr, metric uint32, _ error) {
	if router {
		if len(got.Gateways) == 0 {
			return netip.Addr{}, 0, nil
		}
		return got.Gateways[0], 0, nil
	}
	list, err := links.Addresses().List(addr.Filter{Link: l.Index, Family: unix.AF_INET6})
	if err != nil {
		return netip.Addr{}, 0, err
	}
	for _, one := range list {
		if ip := one.Prefix.Addr(); ip.IsLinkLocalUnicast() && one.Flags&(addr.Tentative|addr.DADFailed) == 0 {
			metric, err := routeIPv6(pod, link, ip)
			return ip, metric, err
		}
	}
	return netip.Addr{}, 0, fail.Errorf(fail.ErrNoGateway, `defaultRoute "host": bridge %s has no link-local IPv6 address to which the pod could send: give it one, or set defaultRoute to "router"`, l.Name)
}

// routeIPv6 adds the default route to the host, and gives its metric.
func routeIPv6(pod *netns.NS, link *bridge.Attachment, gateway netip.Addr) (metric uint32, _ error) {
	metric, err := freeMetric(pod, true, 0)
	if err != nil {
		return 0, err
	}
	routes, err := route.Dial(&route.Config{NetNS: pod})
	if err != nil {
		return 0, err
	}
	defer routes.Close()
	_, err = routes.Ensure(route.Route{Gateway: gateway, Link: link.PeerIndex, Priority: metric, Protocol: route.ProtocolTombolo})
	return metric, explainRoute(err)
}
