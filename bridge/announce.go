package bridge

import (
	"context"
	"fmt"

	"github.com/tombolo-cni/tombolo"
	"github.com/tombolo-cni/tombolo/internal/link"
	"github.com/tombolo-cni/tombolo/internal/nl"
	"github.com/tombolo-cni/tombolo/internal/sysctl"
)

// Announce has the kernel tell a bridge's neighbours, or another link's, the MAC at which its
// addresses are now: by gratuitous ARP (RFC 5227), and unsolicited advertisements of
// neighbours (RFC 4861, section 7.2.6). It does so from then on, too, when the link comes up or gets another MAC
// (arp_notify, ndisc_notify). What the host knows of neighbours there it asks for
// anew. It works on the namespace of the calling thread, and needs CAP_NET_ADMIN.
func (c *Conn) Announce(ctx context.Context, l *Link) error {
	if err := c.usable(ctx); err != nil {
		return err
	}
	if l == nil {
		return &tombolo.OpError{Op: "announce addresses of a link", Err: fmt.Errorf("%w: it is nil", ErrInvalid)}
	}
	if err := checkParameterOf(l.Name); err != nil {
		return &tombolo.OpError{Op: "announce addresses of", Object: l.Name, Err: err}
	}
	for _, path := range []string{sysctl.Link("ipv4", l.Name, "arp_notify"), sysctl.Link("ipv6", l.Name, "ndisc_notify")} {
		if !sysctl.Exists(path) {
			continue // without IPv6
		}
		if _, err := sysctl.Ensure(path, "1"); err != nil {
			return err
		}
	}
	// It announces them when it is told the MAC, though that be the one of before.
	var b nl.Batch
	link.Request{Index: l.Index, MAC: l.MAC}.Set(&b, "announce addresses of", l.Name)
	return c.execute(ctx, &b)
}
