package tc

import (
	"encoding/binary"
	"fmt"
	"math/bits"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/nl"
)

// Qdisc describes a queueing discipline in the kernel. An empty Kind means that it does not exist.
type Qdisc struct {
	Link   int // the index of its link
	Kind   string
	Handle uint32
	// The following fields are only set for a tbf. Rate is in bytes per second. Ticks is the time in ticks in which
	// Rate sends the burst. Limit is the length of the queue in bytes.
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
	if rate != nil {
		q.Rate = binary.NativeEndian.Uint64(rate)
	}
	return nil
}

// Ours reports whether the qdisc has the kind and the handle of Tombolo's qdiscs.
func (q Qdisc) Ours() bool { return q.Kind == "tbf" && q.Handle == Handle }

// Burst returns the burst in bytes. It is as exact as a tick permits.
func (q Qdisc) Burst() uint64 {
	const second = 1e9
	high, low := bits.Mul64(q.Rate, uint64(q.Ticks)*tick)
	low, carry := bits.Add64(low, second/2, 0)
	high += carry
	if high >= second {
		return 0 // larger than any limit: 274 s at 2⁶³ bytes per second
	}
	bytes, _ := bits.Div64(high, low, second)
	return bytes
}

// Is reports whether the qdisc has the parameters of the bucket w, as SetTBF sets them.
func (q Qdisc) Is(w Bucket) bool {
	if !q.Ours() || q.Peaked || q.Rate != w.Rate || q.Limit != w.Limit {
		return false
	}

	// Compare times, with a tolerance, since the kernel stores the burst as a time. Its conversion is exact to some
	// nine digits at common rates, and to four digits at the highest rates.
	high, low := bits.Mul64(uint64(w.Burst), 1e9)
	if high >= w.Rate {
		return false
	}

	ns, _ := bits.Div64(high, low, w.Rate)
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

// isMatchAll reports whether a struct tc_u32_sel matches every packet. It has exactly one key, whose first field, the
// mask, is 0.
func isMatchAll(sel []byte) bool {
	return len(sel) == sizeofU32Sel+sizeofU32Key && sel[0]&u32Terminal != 0 && sel[2] == 1 &&
		binary.NativeEndian.Uint32(sel[sizeofU32Sel:]) == 0
}

// redirectOf returns the index of the link that the only action in a list redirects to, or 0. A filter with several
// actions is not ours.
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
