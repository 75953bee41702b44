package route

import (
	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"
)

// CopyMessage gives a request that adds a route as List gave it, for callers that move
// routes: one without a Protocol (0) gets none. With beside, it
// goes behind those that Add would find in its way (`ip route append`); the kernel takes
// the first of them, or for IPv6 makes one route with several next hops of those that
// have a gateway; and the error matches fs.ErrExist where there is the very same
// already. Else it goes in the place of the first of them, like Replace.
func (r Route) CopyMessage(beside bool) (netlink.Message, error) {
	flags := netlink.Create | netlink.Replace
	if beside {
		flags = netlink.Create | netlink.Append
	}
	n := r.normal()
	n.Protocol = r.Protocol
	return n.message(unix.RTM_NEWROUTE, flags, n.attributes)
}

// CopyMessage is AddMessage for a rule as Rules gave it.
func (r Rule) CopyMessage() (netlink.Message, error) {
	return r.message(unix.RTM_NEWRULE, netlink.Create|netlink.Excl)
}
