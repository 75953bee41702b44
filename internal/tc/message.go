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

// Handle is the handle of our token bucket filters (tbf), and Priority the priority of our filters. They contain "to"
// in ASCII, a number that other programs are unlikely to choose.
const (
	minor    = 0x746f
	Handle   = minor << 16
	Priority = minor
)

// These are the parents of qdiscs and filters at a link, for the field tcm_parent (include/uapi/linux/pkt_sched.h).
const (
	Root    = 0xffffffff // TC_H_ROOT
	Clsact  = 0xfffffff1 // TC_H_CLSACT, equal to TC_H_INGRESS
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

// SetTBF appends a request that makes a token bucket filter the root qdisc of a link. If the root qdisc is already our
// token bucket filter, the request changes its parameters. The qdisc keeps its queue, and gets a full bucket of tokens.
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

// filter returns the header of a request about filters with our priority at a place, Ingress or Egress.
func (l Device) filter(place, handle uint32, protocol uint16) []byte {
	return l.header(handle, place, uint32(Priority)<<16|uint32(htons(protocol)))
}

func htons(v uint16) uint16 {
	return binary.NativeEndian.Uint16(binary.BigEndian.AppendUint16(nil, v))
}

// AddRedirect appends a request that adds a filter to a link. The filter redirects all packets that the link receives
// to the egress of the link with the index to. The filter is a u32 with a single key that matches everything, since
// not every kernel has matchall.
func (l Device) AddRedirect(b *nl.Batch, to int) {
	l.add(b, "add filter to", unix.RTM_NEWTFILTER, netlink.Create|netlink.Excl, l.filter(Ingress, 0, unix.ETH_P_ALL),
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
	l.add(b, "delete filter of", unix.RTM_DELTFILTER, 0, l.filter(Ingress, 0, protocol), nil)
}

// SetProgram appends a request that adds a filter with a classic BPF program at the ingress. The program is an array
// of struct sock_filter, and its result is the verdict on the packet. The filter replaces an existing one with the
// same handle.
func (l Device) SetProgram(b *nl.Batch, handle uint32, program []byte) {
	l.add(b, "set filter of", unix.RTM_NEWTFILTER, netlink.Create, l.filter(Ingress, handle, unix.ETH_P_ALL),
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
	l.add(b, "set filter of", unix.RTM_NEWTFILTER, netlink.Create, l.filter(Egress, handle, unix.ETH_P_ALL),
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
	l.add(b, "delete filter of", unix.RTM_DELTFILTER, 0, l.filter(Ingress, handle, unix.ETH_P_ALL),
		func(ae *netlink.AttributeEncoder) { ae.String(unix.TCA_KIND, "bpf") })
}

// ErrNotSupported is wrapped by errors about a kernel feature that is missing and could not be loaded.
var ErrNotSupported = errors.New("the kernel lacks it")

// Unsupported adds ErrNotSupported and the names of modules to an error that means a missing kernel module. These
// errors are ENOENT and EOPNOTSUPP, which also have other meanings, so use Unsupported only for a refused creation. It
// returns other errors unchanged.
func Unsupported(err error, modules string) error {
	if !errors.Is(err, unix.ENOENT) && !errors.Is(err, unix.EOPNOTSUPP) {
		return err
	}
	return fmt.Errorf("%w: %w: load %s (modprobe, or modules-load.d for good)", ErrNotSupported, err, modules)
}

// Look executes a batch of GetQdisc and other get requests. It ignores errors about missing objects, and about qdiscs
// of a link that was never up. Batch.Err returns the error of each request.
func Look(ctx context.Context, c *nl.Conn, b *nl.Batch) error {
	if err := c.Do(ctx, b); err == nil || ctx.Err() != nil {
		return err
	}

	// A missing answer and EINVAL mean that the link was never up, so that its qdisc is only a placeholder.
	return b.FirstErr(fs.ErrNotExist, nl.ErrNoAnswer, unix.EINVAL)
}

// Filters lists the filters of a link at the given places, Ingress and Egress. own contains the filters with our
// priority at places[0], with the entries that u32 lists for itself and its hash table. others is the number of all
// other filters. The kernel lists only this link's filters, so the time does not depend on the number of links.
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

// Qdisc describes a queueing discipline in the kernel. An empty Kind means that it does not exist.
type Qdisc struct {
	Link   int // the index of its link
	Kind   string
	Handle uint32
	// The following fields are only set for a tbf. Rate is in bytes per second. Ticks is the time in which Rate sends
	// the burst, in units of tick. Limit is the length of the queue in bytes.
	Rate   uint64
	Ticks  uint32
	Limit  uint32
	Peaked bool // the qdisc also has a peak rate, which ours never has
}

// tick is the unit of time in messages about qdiscs, in nanoseconds. It is fixed since Linux 2.6.31 (PSCHED_SHIFT in
// include/net/pkt_sched.h, and the second number in /proc/net/psched).
const tick = 64

// decode parses the body of a message about a qdisc or filter, which begins with a struct tcmsg. It returns the kind,
// and a function that finds an option. Each kind numbers its options differently.
func decode(b []byte) (option func(path ...uint16) []byte, kind string, _ error) {
	if len(b) < sizeofTCMsg {
		return nil, "", fmt.Errorf("%w: a qdisc or filter of %d bytes", nl.ErrMalformed, len(b))
	}
	b = b[sizeofTCMsg:]
	option = func(path ...uint16) []byte { return nl.Find(nl.Find(b, unix.TCA_OPTIONS), path...) }
	return option, nl.Text(nl.Find(b, unix.TCA_KIND)), nl.Decode(b, func(*netlink.AttributeDecoder) {})
}

// Decode parses the body of an RTM_NEWQDISC message.
func (q *Qdisc) Decode(b []byte) error {
	option, kind, err := decode(b)
	if err != nil {
		return err
	}

	number := binary.NativeEndian.Uint32
	*q = Qdisc{Link: int(int32(number(b[4:]))), Handle: number(b[8:]), Kind: kind}
	if kind != "tbf" {
		return nil
	}

	parms, rate := option(tbfParms), option(tbfRate64)
	if len(parms) < sizeofTBFQopt || len(rate) != 0 && len(rate) != 8 {
		return fmt.Errorf("%w: parameters of tbf in %d bytes, rate in %d", nl.ErrMalformed, len(parms), len(rate))
	}

	q.Rate, q.Peaked = uint64(number(parms[8:])), number(parms[20:]) != 0
	q.Limit, q.Ticks = number(parms[24:]), number(parms[28:])
	if len(rate) > 0 {
		q.Rate = binary.NativeEndian.Uint64(rate)
	}
	return nil
}

// Ours reports whether the qdisc has the kind and the handle of a qdisc of SetTBF.
func (q Qdisc) Ours() bool { return q.Kind == "tbf" && q.Handle == Handle }

// Burst returns the burst in bytes, at most math.MaxUint32. The result is as exact as a tick permits.
func (q Qdisc) Burst() uint32 {
	return uint32(min(math.Round(float64(q.Rate)*float64(q.Ticks)*tick/1e9), math.MaxUint32))
}

// Is reports whether the qdisc has the parameters of the bucket w, as SetTBF sets them.
func (q Qdisc) Is(w Bucket) bool {
	if !q.Ours() || q.Peaked || q.Rate != w.Rate || q.Limit != w.Limit || w.Rate == 0 {
		return false
	}

	// Compare times, with a tolerance, since the kernel stores the burst as a time. Its conversion is exact to some
	// nine digits at common rates, and to four digits at the highest rates.
	ns := uint64(w.Burst) * 1e9 / w.Rate
	want, have := uint64(uint32(ns/tick)), uint64(q.Ticks) // the kernel reports 32 bits, which is 274 s
	off := max(want, have) - min(want, have)
	return off <= 1+want/1000
}

// Filter describes a filter at a link's ingress or egress.
type Filter struct {
	Priority uint16
	Protocol uint16
	Handle   uint32
	Kind     string
	MatchAll bool   // a u32 filter with a single key of no bits
	Redirect int    // index of the link that its only action redirects to, else 0
	Program  []byte // program of a classic bpf filter
	Name     string // name of an extended bpf filter, chosen by its creator
	Direct   bool   // a bpf filter whose program returns the verdict on the packet
}

// Decode parses the body of an RTM_NEWTFILTER message.
func (f *Filter) Decode(b []byte) error {
	option, kind, err := decode(b)
	if err != nil {
		return err
	}

	info := binary.NativeEndian.Uint32(b[16:])
	*f = Filter{
		Handle:   binary.NativeEndian.Uint32(b[8:]),
		Priority: uint16(info >> 16),
		Protocol: htons(uint16(info)),
		Kind:     kind,
	}
	switch kind {
	case "u32":
		f.MatchAll, f.Redirect = isMatchAll(option(u32Sel)), redirectOf(option(u32Act))
	case "bpf":
		f.Program, f.Name = option(bpfOps), nl.Text(option(bpfName))
		flags := option(bpfFlags)
		f.Direct = len(flags) == 4 && binary.NativeEndian.Uint32(flags)&bpfActDirect != 0
	}
	return nil
}

// isMatchAll reports whether a struct tc_u32_sel matches every packet. Such a struct is terminal, and has exactly one
// key, whose mask is 0.
func isMatchAll(sel []byte) bool {
	return len(sel) == sizeofU32Sel+sizeofU32Key && sel[0]&u32Terminal != 0 && sel[2] == 1 &&
		binary.NativeEndian.Uint32(sel[sizeofU32Sel:]) == 0
}

// redirectOf returns the index of the link that the only action in a list redirects to, or 0. For several actions it
// returns 0, since such a filter is not ours.
func redirectOf(actions []byte) int {
	count := 0
	_ = nl.Decode(actions, func(*netlink.AttributeDecoder) { count++ })
	parms := nl.Find(actions, 1, actOptions, mirredParms)
	if count != 1 || nl.Text(nl.Find(actions, 1, actKind)) != "mirred" || len(parms) < sizeofTCMirred ||
		binary.NativeEndian.Uint32(parms[20:]) != mirredRedirect {
		return 0
	}
	return int(int32(binary.NativeEndian.Uint32(parms[24:])))
}
