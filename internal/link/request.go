package link

import (
	"context"
	"errors"
	"io/fs"
	"net"
	"net/netip"
	"strconv"
	"strings"

	"github.com/jsimonetti/rtnetlink/v2"
	"github.com/jsimonetti/rtnetlink/v2/driver"
	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo"
	"github.com/tombolo-cni/tombolo/internal/nl"
)

// Request describes a request about one link, or about all links of a group. Fields that are zero add no attributes to
// the message. Exception: if Index, Name and Group are all unset, Message adds an empty name.
type Request struct {
	// Index selects the link. If it is 0, Name selects the link. If Name is empty too, Group selects all links of a
	// group. A Name or Group that is not needed for this selection is a new value for the link.
	Index         int
	Name          string
	Flags, Change uint32 // IFF_*; Change is the mask of the flags to change
	Alias         *string
	MAC           net.HardwareAddr
	MTU           *int
	Master        *int    // 0: none
	TxQLen        *uint32 // in packets
	Lower         int     // the link below a new one; 0 for none
	Group         *uint32
	NetNS         *int                 // file descriptor of the namespace to create the link in
	Kind          string               // the kind of the link; ignored if Data is set
	Data          rtnetlink.LinkDriver // the kind of the link, with its settings
	// Peer describes the other end of a new veth. It replaces Kind and Data, and gives each end a single transmit
	// queue.
	Peer        *Request
	Port        *driver.BridgePort // settings of a bridge port; nil for none
	IPv4        []Parameter        // parameters of the link, numbered by IPV4_DEVCONF_*
	NoLinkLocal bool               // addrgenmode none: no link-local IPv6 address
	Token       netip.Addr         // interface identifier of IPv6 addresses

	mask     *uint32 // RTEXT_FILTER_*: which attributes the answer contains
	oneQueue bool
}

// Parameter is an IPv4 sysctl of a link (IPV4_DEVCONF_*) with its value.
type Parameter struct {
	ID    uint16
	Value uint32
}

// Create appends a request that creates a link. The kernel silently ignores Alias, Port and the settings of IPv4 and
// IPv6 in this request.
func (r Request) Create(b *nl.Batch, op, object string) {
	r.oneQueue = r.Peer != nil
	m, err := r.Message(unix.RTM_NEWLINK, netlink.Create|netlink.Excl)
	b.Add(op, nl.Name(object), m, err)
}

// Set appends a request that changes a link.
func (r Request) Set(b *nl.Batch, op, object string) {
	m, err := r.Message(unix.RTM_NEWLINK, 0)
	b.Add(op, nl.Name(object), m, err)
}

// Apply sends one request that changes a link.
func (r Request) Apply(ctx context.Context, c *nl.Conn, op, object string) error {
	var b nl.Batch
	r.Set(&b, op, object)

	return c.Do(ctx, &b)
}

// AddName appends a request that adds an alternative name to a link. The link keeps this name when it is renamed or
// moved to another network namespace.
func AddName(b *nl.Batch, index int, name string) {
	r := Request{Index: index}
	m, err := nl.Marshal(unix.RTM_NEWLINKPROP, 0, r.body().MarshalBinary, func(ae *netlink.AttributeEncoder) {
		nl.Nested(ae, unix.IFLA_PROP_LIST, func(ae *netlink.AttributeEncoder) {
			ae.String(unix.IFLA_ALT_IFNAME, name)
		})
	})
	b.Add("name link", nl.Name(name), m, err)
}

// Delete appends a request that deletes a link, or all links of a group. The request must set nothing except Index,
// Name or Group.
func (r Request) Delete(b *nl.Batch, object string) {
	m, err := r.Message(unix.RTM_DELLINK, 0)
	b.Add("delete link", nl.Name(object), m, err)
}

// Delete deletes a link by its index. object is its name for errors. It is no error if the link does not exist.
func Delete(ctx context.Context, c *nl.Conn, index int, object string) error {
	var b nl.Batch
	Request{Index: index}.Delete(&b, object)

	return nl.PassAbsent(c.Do(ctx, &b))
}

// Get appends a request for one link, by index or, if index is 0, by name. Executing the batch stores the link in
// *into. only selects the attributes to decode, as in Info.Decode.
func Get(b *nl.Batch, name string, index int, into *Info, only ...uint16) {
	r := Request{Index: index, mask: skipStats()}
	object := strconv.Itoa(index)
	if index == 0 {
		r.Name, object = name, name
	}
	m, err := r.Message(unix.RTM_GETLINK, 0)
	b.AddGet("get link", nl.Name(object), m, err, func(m netlink.Message) error { return into.Decode(m.Data, only...) })
}

// List calls the callback each with every link that has the given kind and the given master. An empty kind, and a
// master of 0, match all links. The kernel selects the links (Linux 4.6).
func List(c *nl.Conn, op, kind string, master int, each func(*Info)) error {
	r := Request{Kind: kind, mask: skipStats()}
	if master != 0 {
		r.Master = &master
	}
	return r.list(c, op, each)
}

// Count calls the callback each with every link of a kind. Of the attributes, it decodes only the name and the
// counters.
func Count(c *nl.Conn, kind string, each func(*Info)) error {
	r := Request{Kind: kind}
	return r.list(c, "count packets", each, unix.IFLA_IFNAME, unix.IFLA_STATS64)
}

func (r *Request) list(c *nl.Conn, op string, each func(*Info), only ...uint16) error {
	m, err := nl.Marshal(unix.RTM_GETLINK, 0, r.body().MarshalBinary, nil)
	return c.List(context.Background(), op, m, err, func(m netlink.Message) error {
		if m.Header.Type != unix.RTM_NEWLINK {
			return nil
		}
		var l Info
		err := l.Decode(m.Data, only...)
		if err == nil {
			each(&l)
		}
		return err
	})
}

// Find returns one link, by index or, if index is 0, by name. only selects the attributes to decode, as in Info.Decode.
// The returned pointer is never nil.
func Find(ctx context.Context, c *nl.Conn, name string, index int, only ...uint16) (*Info, error) {
	var l Info
	var b nl.Batch
	Get(&b, name, index, &l, only...)

	return &l, c.Do(ctx, &b)
}

// Peer returns the veth link with the given index in the network namespace of c. port is the index of its other end.
// Peer does not use the name, since the pod may rename its link. If the link no longer exists or has moved to another
// namespace, the error matches fs.ErrNotExist.
func Peer(c *nl.Conn, index, port int) (*Info, error) {
	l, err := Find(context.Background(), c, "", max(index, 1))
	if err == nil && (l.Kind != "veth" || l.Lower != port) {
		err = &tombolo.OpError{Op: "get link", Object: strconv.Itoa(index), Err: fs.ErrNotExist}
	}

	return l, err
}

// IndexOf returns the index of a link. It uses an ioctl, or a slower netlink request if the connection is a fake
// kernel.
func IndexOf(c *nl.Conn, name string) (int, error) {
	if index, known, err := c.LinkIndex(name); known {
		return index, err
	}
	l, err := Find(context.Background(), c, name, 0, unix.IFLA_IFNAME)
	return l.Index, err
}

// Probe returns an error if the kernel does not support links of a kind. It creates no link. It requests a link with
// a multicast MAC. The kernel looks up the kind first (EOPNOTSUPP), and then refuses the MAC (EADDRNOTAVAIL).
func Probe(c *nl.Conn, kind string) error {
	var b nl.Batch
	Request{MAC: net.HardwareAddr{1, 0, 0, 0, 0, 0}, Kind: kind}.Create(&b, "make links of kind", kind)
	if err := c.Execute(&b); !errors.Is(err, unix.EADDRNOTAVAIL) {
		return err
	}
	return nil
}

// skipStats returns a mask that requests an answer without counters, which is half as long.
func skipStats() *uint32 { return new(uint32(1 << 3)) } // RTEXT_FILTER_SKIP_STATS

// Message returns the request as a netlink message.
func (r *Request) Message(typ netlink.HeaderType, flags netlink.HeaderFlags) (netlink.Message, error) {
	switch {
	case len(r.Name) >= unix.IFNAMSIZ:
		return netlink.Message{}, nl.Invalid("the name is longer than 15 bytes")
	case strings.ContainsRune(r.Name, 0) || r.Alias != nil && strings.ContainsRune(*r.Alias, 0):
		return netlink.Message{}, nl.Invalid("a name or alias has a NUL in it")
	}
	more := r.more
	if r.isWhole() {
		more = nil
	}
	return nl.Marshal(typ, flags, r.body().MarshalBinary, more)
}

// body returns the part of the message that package rtnetlink supports.
func (r *Request) body() *rtnetlink.LinkMessage {
	m := &rtnetlink.LinkMessage{Index: nl.Index(r.Index), Flags: r.Flags, Change: r.Change}
	if r.Name == "" && r.Alias == nil && r.MAC == nil && r.MTU == nil && r.Master == nil && r.Lower == 0 &&
		r.Kind == "" && r.Data == nil && r.mask == nil {
		return m
	}

	m.Attributes = &rtnetlink.LinkAttributes{Name: r.Name, Alias: r.Alias, Address: r.MAC, ExtMask: r.mask,
		Type: uint32(r.Lower)}
	if r.hasPlainMTU() {
		m.Attributes.MTU = uint32(*r.MTU)
	}

	if r.Master != nil {
		m.Attributes.Master = new(nl.Index(*r.Master))
	}

	if r.NetNS != nil {
		m.Attributes.NetNS = rtnetlink.NetNSForFD(uint32(*r.NetNS))
	}

	switch {
	case r.Peer != nil:
		m.Attributes.Info = &rtnetlink.LinkInfo{Kind: "veth", Data: &veth{peer: r.Peer}}
	case r.Data != nil:
		m.Attributes.Info = &rtnetlink.LinkInfo{Kind: r.Data.Kind(), Data: r.Data}
	case r.Kind != "":
		m.Attributes.Info = &rtnetlink.LinkInfo{Kind: r.Kind}
	}

	return m
}

// hasPlainMTU reports whether rtnetlink writes r.MTU unchanged. rtnetlink omits an MTU of 0, and returns its own error
// for some MTUs of a veth. The kernel's error is more precise, so Request.more writes such MTUs.
func (r *Request) hasPlainMTU() bool {
	const least, most = 68, 65535
	return r.MTU != nil && *r.MTU >= least && *r.MTU <= most
}

// isNameless reports whether Index, Name and Group are all unset. Request.more then writes an empty name, which
// rtnetlink would omit. To a get without any name, the kernel would answer EINVAL, and not ENODEV for a missing link.
func (r *Request) isNameless() bool { return r.Index == 0 && r.Name == "" && r.Group == nil }

// isWhole reports whether rtnetlink supports every part of the request.
func (r *Request) isWhole() bool {
	return !r.isNameless() && !r.oneQueue && (r.MTU == nil || r.hasPlainMTU()) && r.Group == nil && r.TxQLen == nil &&
		r.Port == nil && r.IPv4 == nil && !r.NoLinkLocal && !r.Token.IsValid()
}

// more writes the attributes that rtnetlink does not support.
func (r *Request) more(ae *netlink.AttributeEncoder) {
	if r.isNameless() {
		ae.String(unix.IFLA_IFNAME, "")
	}

	if r.MTU != nil && !r.hasPlainMTU() {
		ae.Uint32(unix.IFLA_MTU, nl.Index(*r.MTU))
	}

	if r.Group != nil {
		ae.Uint32(unix.IFLA_GROUP, *r.Group)
	}

	if r.oneQueue {
		ae.Uint32(unix.IFLA_NUM_TX_QUEUES, 1)
	}

	if r.TxQLen != nil {
		ae.Uint32(unix.IFLA_TXQLEN, *r.TxQLen)
	}

	if r.IPv4 != nil || r.NoLinkLocal || r.Token.IsValid() {
		nl.Nested(ae, unix.IFLA_AF_SPEC, r.families)
	}

	if r.Port != nil {
		// Package rtnetlink would also write an empty IFLA_INFO_KIND. Linux 6.13 and later would then start modprobe
		// (rtnl_newlink()).
		nl.Nested(ae, unix.IFLA_LINKINFO, func(ae *netlink.AttributeEncoder) {
			ae.String(unix.IFLA_INFO_SLAVE_KIND, r.Port.Kind())
			ae.Nested(unix.IFLA_INFO_SLAVE_DATA, r.Port.Encode)
		})
	}
}

func (r *Request) families(ae *netlink.AttributeEncoder) {
	if r.IPv4 != nil {
		nl.Nested(ae, unix.AF_INET, func(ae *netlink.AttributeEncoder) {
			nl.Nested(ae, unix.IFLA_INET_CONF, func(ae *netlink.AttributeEncoder) {
				for _, p := range r.IPv4 {
					ae.Uint32(p.ID, p.Value)
				}
			})
		})
	}

	if r.NoLinkLocal || r.Token.IsValid() {
		nl.Nested(ae, unix.AF_INET6, func(ae *netlink.AttributeEncoder) {
			if r.NoLinkLocal {
				ae.Uint8(unix.IFLA_INET6_ADDR_GEN_MODE, 1) // IN6_ADDR_GEN_MODE_NONE
			}
			if r.Token.IsValid() {
				nl.PutAddr(ae, inet6Token, r.Token)
			}
		})
	}
}

const vethInfoPeer = 1 // VETH_INFO_PEER of include/uapi/linux/veth.h

// veth is a veth pair whose ends have one transmit queue each. Without IFLA_NUM_TX_QUEUES, the kernel creates one queue
// for each CPU and uses only one of them. It also waits for an RCU grace period for each end (veth_init_queues()).
type veth struct {
	driver.Veth
	peer *Request
}

// Encode writes the peer with its number of queues, which rtnetlink's Encode does not support.
func (v *veth) Encode(ae *netlink.AttributeEncoder) error {
	v.peer.oneQueue = true
	m, err := v.peer.Message(0, 0)
	ae.Bytes(vethInfoPeer, m.Data)
	return err
}

const sizeofGenMsg = 4 // struct rtgenmsg, padded for the attributes

// LosesOtherEnd reports whether the network namespace of a veth's other end is being deleted. After the last reference
// to a namespace is gone, the kernel takes some 50 ms to delete its content. During this time, the namespace has no ID,
// or the kernel does not find it by its ID.
func LosesOtherEnd(c *nl.Conn, name string) (bool, error) {
	l, err := Find(context.Background(), c, name, 0, unix.IFLA_LINK_NETNSID)
	if err != nil || !l.Elsewhere || l.elsewhere < 0 {
		return err == nil && l.Elsewhere, err
	}

	m, err := nl.Encode(unix.RTM_GETNSID, 0, make([]byte, sizeofGenMsg), func(ae *netlink.AttributeEncoder) {
		ae.Uint32(unix.NETNSA_NSID, uint32(l.elsewhere))
	})
	err = c.Get(context.Background(), "get network namespace of the other end of", nl.Name(name), m, err,
		func(netlink.Message) error { return nil })
	if errors.Is(err, unix.ENOENT) {
		return true, nil
	}

	return false, err
}
