package link

import (
	"errors"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/nl"
)

const sizeofGenMsg = 4 // struct rtgenmsg, and what aligns the attributes

// LosesOtherEnd says whether the namespace of a link's other end is about to go: nothing refers to it any more,
// and the kernel takes some 50 ms until it deletes what is in it.
func LosesOtherEnd(c *nl.Conn, name string) (bool, error) {
	var l Link
	var b nl.Batch
	Get(&b, name, 0, &l, unix.IFLA_LINK_NETNSID)
	if err := c.Execute(&b); err != nil || !l.Elsewhere || l.elsewhere < 0 {
		return err == nil && l.Elsewhere, err
	}
	b.Reset()
	m, err := nl.Encode(unix.RTM_GETNSID, 0, make([]byte, sizeofGenMsg), func(ae *netlink.AttributeEncoder) {
		ae.Uint32(unix.NETNSA_NSID, uint32(l.elsewhere))
	})
	b.AddGet("get network namespace of the other end of", nl.Name(name), m, err, func(netlink.Message) error { return nil })
	err = c.Execute(&b)
	if errors.Is(err, unix.ENOENT) {
		return true, nil
	}
	return false, err
}
