package addr

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"time"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/nl"
)

const (
	ifaRTPriority = 9  // IFA_RT_PRIORITY, Linux 4.18
	ifaProto      = 11 // IFA_PROTO, Linux 5.18
)

const forever = 0xffffffff // INFINITY_LIFE_TIME, in seconds

var errPrefix = errors.New("address and prefix length do not fit together")

// AppendAdd appends the request of Conn.Add to a batch, for packages of this
// module that put several requests into one message.
func (a Address) AppendAdd(b *nl.Batch) {
	b.Request("add address", &a, unix.RTM_NEWADDR, unix.NLM_F_CREATE|unix.NLM_F_EXCL, a.encode)
}

// AppendReplace appends the request of Conn.Replace to a batch, for packages of
// this module.
func (a Address) AppendReplace(b *nl.Batch) {
	b.Request("replace address", &a, unix.RTM_NEWADDR, unix.NLM_F_CREATE|unix.NLM_F_REPLACE, a.encode)
}

// AppendDel appends the request of Conn.Del to a batch, for packages of this
// module.
func (a Address) AppendDel(b *nl.Batch) {
	b.Request("delete address", &a, unix.RTM_DELADDR, 0, a.encodeIdentity)
}

// encodeIdentity writes what tells the address from others on the link.
func (a *Address) encodeIdentity(e *nl.Encoder) {
	if !a.Prefix.IsValid() {
		e.Fail(errPrefix)
		return
	}
	header(e, a.family(), uint8(a.Prefix.Bits()), a.Scope, a.Link)
	if a.is4() || a.Peer.IsValid() {
		// For IPv6 the pair of the two means that there is a peer.
		e.Addr(unix.IFA_LOCAL, a.Prefix.Addr())
	}
	e.Addr(unix.IFA_ADDRESS, a.peer())
}

// header writes struct ifaddrmsg (include/uapi/linux/if_addr.h).
func header(e *nl.Encoder, family, bits uint8, scope Scope, link int) {
	h := [unix.SizeofIfAddrmsg]byte{family, bits, 0, uint8(scope)}
	binary.NativeEndian.PutUint32(h[4:], uint32(link))
	e.Raw(h[:])
}

func (a *Address) encode(e *nl.Encoder) {
	a.encodeIdentity(e)
	if a.is4() {
		if a.Broadcast.IsValid() {
			e.Addr(unix.IFA_BROADCAST, a.Broadcast)
		}
		if a.Label != "" {
			e.String(unix.IFA_LABEL, a.Label)
		}
	}
	if f := a.askedFlags(); f != 0 {
		// The header has room for eight of them only.
		e.Uint32(unix.IFA_FLAGS, uint32(f))
	}
	if a.Valid != nil || a.Preferred != nil {
		var ci [unix.SizeofIfaCacheinfo]byte
		binary.NativeEndian.PutUint32(ci[0:], seconds(a.Preferred, a.Valid))
		binary.NativeEndian.PutUint32(ci[4:], seconds(a.Valid, nil))
		e.Bytes(unix.IFA_CACHEINFO, ci[:])
	}
	if a.Protocol != 0 {
		e.Uint8(ifaProto, a.Protocol)
	}
	if a.Metric != 0 {
		e.Uint32(ifaRTPriority, a.Metric)
	}
}

// seconds gives a lifetime as the kernel counts it. One that is over is 0. A
// limit, if there is one, holds for d too: the kernel refuses an address that is
// preferred for longer than it is valid.
func seconds(d, limit *time.Duration) uint32 {
	if limit != nil && (d == nil || *d > *limit) {
		d = limit
	}
	if d == nil {
		return forever
	}
	s := *d / time.Second
	if *d%time.Second > 0 {
		s++
	}
	return uint32(min(max(s, 0), forever))
}

func lifetime(s uint32) *time.Duration {
	if s == forever {
		return nil
	}
	d := time.Duration(s) * time.Second
	return &d
}

// decode reads the data of an RTM_NEWADDR.
func decode(data []byte) (Address, error) {
	if len(data) < unix.SizeofIfAddrmsg {
		return Address{}, fmt.Errorf("%w: an address of %d bytes", nl.ErrMalformed, len(data))
	}
	a := Address{
		Flags: Flags(data[2]),
		Scope: Scope(data[3]),
		Link:  int(int32(binary.NativeEndian.Uint32(data[4:]))),
	}
	var local, address netip.Addr
	attrs := nl.ParseAttrs(data[unix.SizeofIfAddrmsg:])
	for attrs.Next() {
		switch attrs.Type {
		case unix.IFA_LOCAL:
			local = attrs.Addr()
		case unix.IFA_ADDRESS:
			address = attrs.Addr()
		case unix.IFA_BROADCAST:
			a.Broadcast = attrs.Addr()
		case unix.IFA_LABEL:
			a.Label = attrs.String()
		case unix.IFA_FLAGS:
			a.Flags = Flags(attrs.Uint32())
		case unix.IFA_CACHEINFO:
			if len(attrs.Data) < unix.SizeofIfaCacheinfo {
				return Address{}, fmt.Errorf("%w: lifetimes of %d bytes", nl.ErrMalformed, len(attrs.Data))
			}
			a.Preferred = lifetime(binary.NativeEndian.Uint32(attrs.Data[0:]))
			a.Valid = lifetime(binary.NativeEndian.Uint32(attrs.Data[4:]))
		case ifaProto:
			a.Protocol = attrs.Uint8()
		case ifaRTPriority:
			a.Metric = attrs.Uint32()
		}
	}
	if err := attrs.Err(); err != nil {
		return Address{}, err
	}
	if a.Flags&Deprecated != 0 && a.Preferred == nil {
		// IPv4 gives no lifetimes for an address that is valid for ever.
		a.Preferred = new(time.Duration)
	}
	if !local.IsValid() {
		local = address
	} else if address != local {
		a.Peer = address
	}
	a.Prefix = netip.PrefixFrom(local, int(data[1]))
	if !a.Prefix.IsValid() || (data[0] == unix.AF_INET) != local.Is4() || a.Peer.IsValid() && a.Peer.Is4() != local.Is4() {
		return Address{}, fmt.Errorf("%w: family %d, address %s/%d", nl.ErrMalformed, data[0], local, data[1])
	}
	return a, nil
}
