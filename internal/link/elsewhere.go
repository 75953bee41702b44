package link

import (
	"errors"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/nl"
	"github.com/tombolo-cni/tombolo/netns"
)

const sizeofGenMsg = 4 // struct rtgenmsg, and what aligns the attributes

// RestsHere says whether what a pod's link rests on is in the caller's own namespace. The index does not
// tell: a pod can make a link with any index, on one with any index in a third namespace. The connection is
// the one by which the link was read.
func (l *Link) RestsHere(pod *nl.Conn) (is bool, _ error) {
	if !l.Elsewhere || l.Lower == 0 {
		return false, nil
	}
	here, err := netns.Current()
	if err != nil {
		return false, err
	}
	defer here.Close()
	var b nl.Batch
	m, err := nl.Encode(unix.RTM_GETNSID, 0, make([]byte, sizeofGenMsg), func(ae *netlink.AttributeEncoder) {
		ae.Uint32(unix.NETNSA_FD, uint32(here.FD()))
	})
	b.AddGet("get number of network namespace", here, m, err, func(m netlink.Message) error {
		if len(m.Data) < sizeofGenMsg {
			return nl.ErrMalformed
		}
		return nl.Decode(m.Data[sizeofGenMsg:], func(ad *netlink.AttributeDecoder) error {
			if ad.Type() == unix.NETNSA_NSID {
				is = int32(ad.Uint32()) == l.elsewhere && l.elsewhere >= 0 // -1 is that of a namespace without a number
			}
			return nil
		})
	})
	return is, pod.Execute(&b)
}

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
