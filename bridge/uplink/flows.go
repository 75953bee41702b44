package uplink

import (
	"context"
	"errors"
	"fmt"
	"net/netip"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/conntrack"
)

// freed are flows that are no longer bound to a link, by what tells them apart.
type freed map[string]bool

// freeFlows sees to connections that are masqueraded to addresses of a link. The
// kernel has noted the link in each: it would drop their packets when they go out by
// another, and forget them when the link loses the address.
//
// What cannot be kept is noted in the record, and no reason to give up.
func (r *run) freeFlows(ctx context.Context, s *Snapshot, link int) {
	var addrs []netip.Addr
	for _, a := range s.Addresses {
		if a.Link == link && !a.Prefix.Addr().IsLinkLocalUnicast() {
			addrs = append(addrs, a.Prefix.Addr())
		}
	}
	if len(addrs) == 0 {
		return
	}
	conn, err := conntrack.Dial(&conntrack.Config{NetNS: r.ns})
	if err == nil {
		defer conn.Close()
		var flows []conntrack.Flow
		flows, err = conn.Unbind(ctx, addrs, func(f conntrack.Flow) bool { return r.freed[f.String()] })
		for _, f := range flows {
			r.freed[f.String()] = true
		}
	}
	if err != nil && !errors.Is(err, unix.EPROTONOSUPPORT) {
		r.rec.Notes = append(r.rec.Notes, fmt.Sprintf("masqueraded connections may have been cut: %v", err))
	}
}
