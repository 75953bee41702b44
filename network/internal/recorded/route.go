package recorded

import (
	"errors"
	"io/fs"
	"net/netip"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/route"
)

// Disconnected says what is wrong with the route to the subnet of an address by the link which
// has the address, in whatever table: that of a link in a VRF is in the VRF's. It is empty where
// nothing is. A prefix of a single address has no such route.
func Disconnected(routes *route.Conn, a netip.Prefix, link int) (string, error) {
	if a.IsSingleIP() {
		return "", nil
	}
	// The cheap question first: a list is made from all routes that the host has.
	other := a.Addr().Next()
	if !a.Contains(other) {
		other = a.Addr().Prev()
	}
	switch r, err := routes.Get(other); {
	case err == nil && r.Link == link:
		return "", nil
	case err != nil && !IsNoRoute(err):
		return "", err
	}
	wrong := "is missing"
	err := routes.Walk(route.Filter{Family: FamilyOf(a.Addr())}, func(r route.Route) {
		switch {
		case r.Dst != a.Masked() || wrong == "":
		case r.Link == link:
			wrong = ""
		case r.Table == route.TableMain:
			wrong = "leads elsewhere: " + r.String()
		}
	})
	return wrong, err
}

// Subnet is the route that the kernel makes with an address, and does not make again after
// somebody has deleted it.
func Subnet(a netip.Prefix, link int) route.Route {
	r := route.Route{Dst: a.Masked(), Link: link, Protocol: route.ProtocolKernel}
	if a.Addr().Is4() {
		r.Source = a.Addr()
	} else {
		r.Priority = subnetMetric6
	}
	return r
}

// subnetMetric6 is IP6_RT_PRIO_ADDRCONF (include/uapi/linux/ipv6_route.h).
const subnetMetric6 = 256

// Subnets are those routes of a pod's addresses, one for each subnet.
func Subnets(addresses []netip.Prefix) []route.Route {
	var list []route.Route
	for _, a := range addresses {
		has := slices.ContainsFunc(list, func(r route.Route) bool { return r.Dst == a.Masked() })
		if !has && !a.IsSingleIP() {
			list = append(list, Subnet(a, 0))
		}
	}
	return list
}

// FamilyOf is the family of an address.
func FamilyOf(a netip.Addr) uint8 {
	if a.Is4() {
		return unix.AF_INET
	}
	return unix.AF_INET6
}

// IsNoRoute says that the kernel has no route, or one of a type that refuses packets.
func IsNoRoute(err error) bool {
	return slices.ContainsFunc([]error{fs.ErrNotExist, unix.ENETUNREACH, unix.EHOSTUNREACH, unix.EACCES, unix.EINVAL},
		func(no error) bool { return errors.Is(err, no) })
}
