package recorded

import (
	"errors"
	"io/fs"
	"net/netip"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/route"
)

// Connected says whether there is a route to the subnet of an address by the link which
// has the address, in whatever table: that of a link in a VRF is in the VRF's. A prefix of
// a single address has none.
func Connected(routes *route.Conn, a netip.Prefix, link int) (bool, error) {
	if a.IsSingleIP() {
		return true, nil
	}
	// The cheap question first: a list is made from all routes that the host has.
	other := a.Addr().Next()
	if !a.Contains(other) {
		other = a.Addr().Prev()
	}
	switch r, err := routes.Get(other); {
	case err == nil && r.Link == link:
		return true, nil
	case err != nil && !isNoRoute(err):
		return false, err
	}
	family := uint8(unix.AF_INET)
	if a.Addr().Is6() {
		family = unix.AF_INET6
	}
	list, err := routes.List(route.Filter{Family: family, Link: link})
	for _, r := range list {
		if r.Dst == a.Masked() {
			return true, err
		}
	}
	return false, err
}

// isNoRoute says that the kernel has no route, or one of a type that refuses packets.
func isNoRoute(err error) bool {
	return slices.ContainsFunc([]error{fs.ErrNotExist, unix.ENETUNREACH, unix.EHOSTUNREACH, unix.EACCES, unix.EINVAL},
		func(no error) bool { return errors.Is(err, no) })
}
