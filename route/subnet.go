package route

import (
	"errors"
	"io/fs"
	"net/netip"
	"slices"

	"github.com/tombolo-cni/tombolo/internal/nl"
	"golang.org/x/sys/unix"
)

// Subnet is the route that the kernel makes with an address, by its link's index, and does not make again after
// somebody has deleted it.
func Subnet(a netip.Prefix, link int) Route {
	const priority6 = 256 // IP6_RT_PRIO_ADDRCONF (include/uapi/linux/ipv6_route.h)
	r := Route{Dst: a.Masked(), Link: link, Protocol: ProtocolKernel}
	if a.Addr().Is4() {
		r.Source = a.Addr()
	} else {
		r.Priority = priority6
	}
	return r
}

// CheckSubnet says what is wrong with the route to the subnet of an address by the link, by its index, which has the
// address, in whatever table: that of a link in a VRF is in the VRF's. It is empty where nothing is. A prefix of a
// single address has no such route.
func (c *Conn) CheckSubnet(a netip.Prefix, link int) (string, error) {
	if a.IsSingleIP() {
		return "", nil
	}
	// The cheap question first: a list is made from all routes that the host has.
	other := a.Addr().Next()
	if !a.Contains(other) {
		other = a.Addr().Prev()
	}
	switch r, err := c.Get(other); {
	case err == nil && r.Link == link:
		return "", nil
	case err != nil && !NoRoute(err):
		return "", err
	}
	wrong := "is missing"
	err := c.Walk(Filter{Family: nl.FamilyOf(a.Addr())}, func(r Route) {
		switch {
		case r.Dst != a.Masked() || wrong == "":
		case r.Link == link:
			wrong = ""
		case r.Table == TableMain:
			wrong = "leads elsewhere: " + r.String()
		}
	})
	return wrong, err
}

// NoRoute says whether an error of Get means that there is no route, or one of a type that refuses packets.
func NoRoute(err error) bool {
	return slices.ContainsFunc([]error{fs.ErrNotExist, unix.ENETUNREACH, unix.EHOSTUNREACH, unix.EACCES, unix.EINVAL},
		func(no error) bool { return errors.Is(err, no) })
}

// FreePriority is the priority for a default route of the main table that is to be added: the one that is asked for,
// unless there is a default route of the family with it; then a larger one than any. 0 is the kernel's own.
func (c *Conn) FreePriority(family uint8, asked uint32) (uint32, error) {
	const (
		step     = 100
		kernels6 = 1024 // of a route of IPv6 without one (IP6_RT_PRIO_USER)
	)
	wanted, taken, largest := asked, false, uint32(0)
	if wanted == 0 && family == unix.AF_INET6 {
		wanted = kernels6
	}
	err := c.Walk(Filter{Family: family, Table: TableMain}, func(r Route) {
		if r.Dst.Bits() > 0 || r.Type != Unicast {
			return
		}
		taken = taken || r.Priority == wanted
		largest = max(largest, r.Priority)
	})
	if err != nil || !taken {
		return asked, err
	}
	return largest + step, nil
}
