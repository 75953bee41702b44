package route

import (
	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/nl"
)

// AppendCopy appends a request to a batch that adds a route as List gave it, for
// packages of this module that move routes: one that nobody has put his name to
// (Protocol 0) gets no name. With beside, it goes behind those that Add would find in
// its way (`ip route append`); the kernel takes the first of them, or for IPv6 makes
// one route with several next hops of those that have a gateway; and the error
// matches fs.ErrExist where there is the very same already. Else it goes in the place
// of the first of them, like Replace.
func (r Route) AppendCopy(b *nl.Batch, beside bool) {
	op, flags := "replace route", uint16(unix.NLM_F_CREATE|unix.NLM_F_REPLACE)
	if beside {
		op, flags = "append route", unix.NLM_F_CREATE|unix.NLM_F_APPEND
	}
	b.Request(op, &r, unix.RTM_NEWROUTE, flags, func(e *nl.Encoder) {
		n := r.normal()
		n.Protocol = r.Protocol
		n.encodeAll(e)
	})
}

// AppendCopy is AppendAdd for a rule as Rules gave it.
func (r Rule) AppendCopy(b *nl.Batch) {
	b.Request("add rule", &r, unix.RTM_NEWRULE, unix.NLM_F_CREATE|unix.NLM_F_EXCL, r.encode)
}

// AppendCopy is AppendReplace for an object as NexthopObjects gave it.
func (n NexthopObject) AppendCopy(b *nl.Batch) {
	b.Request("replace nexthop object", &n, unix.RTM_NEWNEXTHOP, unix.NLM_F_CREATE|unix.NLM_F_REPLACE, n.encode)
}
