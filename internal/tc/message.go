package tc

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"math"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/nl"
)

// Handle is the handle of our qdiscs, and Priority the priority of our filters. They contain "to" in ASCII, a number
// that other programs are unlikely to choose.
const (
	minor    = 0x746f
	Handle   = minor << 16
	Priority = minor
)

// The places for qdiscs and filters at a link. They are values for the field tcm_parent
// (include/uapi/linux/pkt_sched.h).
const (
	Root    = 0xffffffff // TC_H_ROOT
	Clsact  = 0xfffffff1 // TC_H_CLSACT, which is TC_H_INGRESS
	Ingress = 0xfffffff2 // TC_H_CLSACT and TC_H_MIN_INGRESS
	Egress  = 0xfffffff3 // TC_H_CLSACT and TC_H_MIN_EGRESS
)

// Attributes of include/uapi/linux/{pkt_sched,pkt_cls}.h and tc_act/tc_mirred.h.
const (
	tbfParms  = 1 // TCA_TBF_PARMS
	tbfRate64 = 4 // TCA_TBF_RATE64
	tbfBurst  = 6 // TCA_TBF_BURST, Linux 3.14

	u32Sel = 5 // TCA_U32_SEL
	u32Act = 7 // TCA_U32_ACT

	bpfOpsLen = 4 // TCA_BPF_OPS_LEN
	bpfOps    = 5 // TCA_BPF_OPS
	bpfFD     = 6 // TCA_BPF_FD
	bpfName   = 7 // TCA_BPF_NAME
	bpfFlags  = 8 // TCA_BPF_FLAGS

	actKind    = 1 // TCA_ACT_KIND
	actOptions = 2 // TCA_ACT_OPTIONS

	mirredParms = 2 // TCA_MIRRED_PARMS
)

const (
	sizeofTCMsg      = 20 // struct tcmsg, include/uapi/linux/rtnetlink.h
	sizeofTBFQopt    = 36 // struct tc_tbf_qopt, include/uapi/linux/pkt_sched.h
	sizeofU32Sel     = 16 // struct tc_u32_sel without its keys, include/uapi/linux/pkt_cls.h
	sizeofU32Key     = 16 // struct tc_u32_key
	sizeofTCMirred   = 28 // struct tc_mirred, include/uapi/linux/tc_act/tc_mirred.h
	sizeofSockFilter = 8  // struct sock_filter, include/uapi/linux/filter.h
	handleClsact     = 0xffff0000
	linkEthernet     = 1 // TC_LINKLAYER_ETHERNET
	u32Terminal      = 1 // TC_U32_TERMINAL
	actStolen        = 4 // TC_ACT_STOLEN
	bpfActDirect     = 1 // TCA_BPF_FLAG_ACT_DIRECT
	mirredRedirect   = 1 // TCA_EGRESS_REDIR
)

// Device is the link whose qdiscs and filters a request is about, by its index. The name is for errors.
type Device struct {
	Name  string
	Index int
}

// String returns the name.
func (l Device) String() string { return l.Name }

// header returns a struct tcmsg.
func (l Device) header(handle, parent, info uint32) []byte {
	b := make([]byte, sizeofTCMsg, 64)
	binary.NativeEndian.PutUint32(b[4:], nl.Index(l.Index))
	binary.NativeEndian.PutUint32(b[8:], handle)
	binary.NativeEndian.PutUint32(b[12:], parent)
	binary.NativeEndian.PutUint32(b[16:], info)
	return b
}

// add appends a request about the link.
func (l Device) add(b *nl.Batch, op string, typ netlink.HeaderType, flags netlink.HeaderFlags, head []byte,
	attrs func(*netlink.AttributeEncoder)) {
	m, err := nl.Encode(typ, flags, head, attrs)
	b.Add(op, l, m, err)
}

// Bucket holds the parameters of a token bucket filter (tbf), in bytes.
type Bucket struct {
	Rate  uint64 // bytes per second
	Burst uint32
	Limit uint32 // length of the queue, in bytes
}

// SetTBF appends a request that makes a token bucket filter the root qdisc of a link. If the root qdisc is already
// our token bucket filter, the request changes its parameters. Its queue and tokens stay.
func (l Device) SetTBF(b *nl.Batch, w Bucket) {
	l.add(b, "set qdisc tbf of", unix.RTM_NEWQDISC, netlink.Create|netlink.Replace, l.header(Handle, Root, 0), w.encode)
}

func (w Bucket) encode(ae *netlink.AttributeEncoder) {
	var q [sizeofTBFQopt]byte
	q[1] = linkEthernet // without it the kernel requires a table of transmission times
	binary.NativeEndian.PutUint32(q[8:], uint32(min(w.Rate, math.MaxUint32)))
	binary.NativeEndian.PutUint32(q[24:], w.Limit)
	options(ae, "tbf", func(ae *netlink.AttributeEncoder) {
		ae.Bytes(tbfParms, q[:])

		// Set the burst in bytes, so that the kernel does not round it to ticks.
		ae.Uint32(tbfBurst, w.Burst)
		if w.Rate > math.MaxUint32 {
			ae.Uint64(tbfRate64, w.Rate)
		}
	})
}

// options writes the kind of a qdisc or filter, and the attributes of that kind.
func options(ae *netlink.AttributeEncoder, kind string, fn func(*netlink.AttributeEncoder)) {
	ae.String(unix.TCA_KIND, kind)
	nl.Nested(ae, unix.TCA_OPTIONS, fn)
}

// DelQdisc appends a request that deletes the qdisc at a place, which is Root or Clsact.
func (l Device) DelQdisc(b *nl.Batch, place uint32) {
	l.add(b, "delete qdisc of", unix.RTM_DELQDISC, 0, l.header(0, place, 0), nil)
}

// GetQdisc appends a request that stores the qdisc at a place, which is Root or Clsact, in *into. It requests an
// echo. The kernel multicasts the answer, and without an echo does not send it to the requesting socket (Linux 6.1 to
// 6.18). See Look.
func (l Device) GetQdisc(b *nl.Batch, place uint32, into *Qdisc) {
	m, err := nl.Encode(unix.RTM_GETQDISC, netlink.Echo, l.header(0, place, 0), nil)
	b.AddGet("get qdisc of", l, m, err, func(m netlink.Message) error { return into.Decode(m.Data) })
}

// AddClsact appends a request that adds a clsact qdisc to a link, to which filters can be attached.
func (l Device) AddClsact(b *nl.Batch) {
	l.add(b, "add qdisc clsact to", unix.RTM_NEWQDISC, netlink.Create|netlink.Excl, l.header(handleClsact, Clsact, 0),
		func(ae *netlink.AttributeEncoder) { ae.String(unix.TCA_KIND, "clsact") })
}

// filter returns the header of a request about filters with our priority at the ingress.
func (l Device) filter(handle uint32, protocol uint16) []byte {
	return l.filterAt(Ingress, handle, protocol)
}

func (l Device) filterAt(place, handle uint32, protocol uint16) []byte {
	return l.header(handle, place, uint32(Priority)<<16|uint32(htons(protocol)))
}

func htons(v uint16) uint16 {
	return binary.NativeEndian.Uint16(binary.BigEndian.AppendUint16(nil, v))
}

// AddRedirect appends a request that adds a filter to a link. The filter redirects all packets that the link receives
// to the egress of the link with the index to. The filter is a u32 with a single key that matches everything, since
// not every kernel has matchall.
func (l Device) AddRedirect(b *nl.Batch, to int) {
	l.add(b, "add filter to", unix.RTM_NEWTFILTER, netlink.Create|netlink.Excl, l.filter(0, unix.ETH_P_ALL),
		func(ae *netlink.AttributeEncoder) {
			options(ae, "u32", func(ae *netlink.AttributeEncoder) {
				var sel [sizeofU32Sel + sizeofU32Key]byte
				sel[0] = u32Terminal
				sel[2] = 1 // a single key, all zero
				ae.Bytes(u32Sel, sel[:])
				nl.Nested(ae, u32Act, func(ae *netlink.AttributeEncoder) {
					nl.Nested(ae, 1, func(ae *netlink.AttributeEncoder) {
						ae.String(actKind, "mirred")
						nl.Nested(ae, actOptions,
							func(ae *netlink.AttributeEncoder) { ae.Bytes(mirredParms, redirect(to)) })
					})
				})
			})
		})
}

func redirect(to int) []byte {
	p := make([]byte, sizeofTCMirred)
	binary.NativeEndian.PutUint32(p[8:], actStolen)
	binary.NativeEndian.PutUint32(p[20:], mirredRedirect)
	binary.NativeEndian.PutUint32(p[24:], uint32(to))
	return p
}

// DelFilters appends a request that deletes all filters with our priority at the ingress. All of them must have the
// given protocol.
func (l Device) DelFilters(b *nl.Batch, protocol uint16) {
	l.add(b, "delete filter of", unix.RTM_DELTFILTER, 0, l.filter(0, protocol), nil)
}

// SetProgram appends a request that adds a filter with a classic BPF program at the ingress. The program is an array
// of struct sock_filter, and its result is the verdict on the packet. The filter replaces an existing one with the
// same handle.
func (l Device) SetProgram(b *nl.Batch, handle uint32, program []byte) {
	l.add(b, "set filter of", unix.RTM_NEWTFILTER, netlink.Create, l.filter(handle, unix.ETH_P_ALL),
		func(ae *netlink.AttributeEncoder) {
			options(ae, "bpf", func(ae *netlink.AttributeEncoder) {
				ae.Uint16(bpfOpsLen, uint16(len(program)/sizeofSockFilter))
				ae.Bytes(bpfOps, program)
				ae.Uint32(bpfFlags, bpfActDirect)
			})
		})
}

// SetObject appends a request that adds a filter with an extended BPF program at the egress. fd is the program's file
// descriptor. The program's result is the verdict on the packet. The filter replaces an existing one with the same
// handle. The kernel stores name, of at most 255 bytes, and lists it with the filter.
func (l Device) SetObject(b *nl.Batch, handle uint32, fd int, name string) {
	l.add(b, "set filter of", unix.RTM_NEWTFILTER, netlink.Create, l.filterAt(Egress, handle, unix.ETH_P_ALL),
		func(ae *netlink.AttributeEncoder) {
			options(ae, "bpf", func(ae *netlink.AttributeEncoder) {
				ae.Uint32(bpfFD, uint32(fd))
				ae.String(bpfName, name)
				ae.Uint32(bpfFlags, bpfActDirect)
			})
		})
}

// DelProgram appends a request that deletes the filter that SetProgram has added with this handle.
func (l Device) DelProgram(b *nl.Batch, handle uint32) {
	l.add(b, "delete filter of", unix.RTM_DELTFILTER, 0, l.filter(handle, unix.ETH_P_ALL),
		func(ae *netlink.AttributeEncoder) { ae.String(unix.TCA_KIND, "bpf") })
}

// ErrNotSupported is wrapped by errors about a kernel feature that is missing and could not be loaded.
var ErrNotSupported = errors.New("the kernel lacks it")

// Unsupported adds ErrNotSupported and the names of modules to an error that means a missing kernel module. The errno
// for this also has other meanings, so use Unsupported only for a refused creation. It returns other errors
// unchanged.
func Unsupported(err error, modules string) error {
	if !errors.Is(err, unix.ENOENT) && !errors.Is(err, unix.EOPNOTSUPP) {
		return err
	}
	return fmt.Errorf("%w: %w: load %s (modprobe, or modules-load.d for good)", ErrNotSupported, err, modules)
}

// Look executes a batch of GetQdisc requests. It ignores errors about missing objects. Batch.Err returns the error of
// each request.
func Look(ctx context.Context, c *nl.Conn, b *nl.Batch) error {
	if err := c.Do(ctx, b); err == nil || ctx.Err() != nil {
		return err
	}

	var errs []error
	for i := range b.Len() {
		// Ignore a missing answer and EINVAL too. They mean that the link was never up, so that its qdisc is only a
		// placeholder.
		if err := b.Err(i); !errors.Is(err, fs.ErrNotExist) && !errors.Is(err, nl.ErrNoAnswer) &&
			!errors.Is(err, unix.EINVAL) {
			errs = append(errs, err)
		}
	}

	return errors.Join(errs...)
}

// Filters lists the filters of a link at the given places, Ingress and Egress. own contains the filters with our
// priority at the first place, including entries for their classifiers. others is the number of all other filters.
// The kernel lists only this link's filters, so the time does not depend on the number of links.
func (l Device) Filters(ctx context.Context, c *nl.Conn, places ...uint32) (own []Filter, others int, _ error) {
	for _, place := range places {
		m, err := nl.Encode(unix.RTM_GETTFILTER, 0, l.header(0, place, 0), nil)
		err = c.List(ctx, "list filters", m, err, func(m netlink.Message) error {
			var f Filter
			if err := f.Decode(m.Data); err != nil {
				return err
			}
			if place == places[0] && f.Priority == Priority {
				own = append(own, f)
			} else {
				others++
			}
			return nil
		})
		if err != nil {
			return nil, 0, err
		}
	}

	return own, others, nil
}
