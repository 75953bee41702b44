package tc

import (
	"encoding/binary"
	"fmt"
	"math/bits"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/nl"
)

// Qdisc is a queueing discipline: nothing, if its kind is empty.
type Qdisc struct {
	Link   int // the index of its link
	Kind   string
	Handle uint32
	// Of a tbf only: the rate in bytes per second, the burst as the time that the rate
	// takes for it, in ticks, and the queue in bytes.
	Rate   uint64
	Ticks  uint32
	Limit  uint32
	Peaked bool // it has a second, peak rate, which ours never has
}

// tick is the unit of time of qdiscs, in nanoseconds: it has been fixed since Linux
// 2.6.31 (PSCHED_SHIFT, include/net/pkt_sched.h; the second number of
// /proc/net/psched).
const tick = 64

// decode reads what follows struct tcmsg. Of TCA_OPTIONS those of the kinds are read for
// which options gives a function: the kernel writes the kind first, and each kind numbers
// its attributes anew.
func decode(b []byte, kind *string, options func() func(*netlink.AttributeDecoder) error) error {
	return nl.Decode(b[sizeofTCMsg:], func(ad *netlink.AttributeDecoder) error {
		switch ad.Type() {
		case unix.TCA_KIND:
			*kind = ad.String()
		case unix.TCA_OPTIONS:
			if read := options(); read != nil {
				each(ad, read)
			}
		}
		return nil
	})
}

// each calls fn for every attribute within one.
func each(ad *netlink.AttributeDecoder, fn func(*netlink.AttributeDecoder) error) {
	ad.Do(func(b []byte) error { return nl.Decode(b, fn) })
}

// structure reads an attribute that has a struct of a size, or a longer one of a later
// kernel.
func structure(ad *netlink.AttributeDecoder, what string, size int, read func([]byte)) {
	ad.Do(func(b []byte) error {
		if len(b) < size {
			return fmt.Errorf("%w: %s in %d bytes", nl.ErrMalformed, what, len(b))
		}
		read(b)
		return nil
	})
}

// Decode reads the body of an RTM_NEWQDISC.
func (q *Qdisc) Decode(b []byte) error {
	if len(b) < sizeofTCMsg {
		return fmt.Errorf("%w: a qdisc of %d bytes", nl.ErrMalformed, len(b))
	}
	*q = Qdisc{Link: int(int32(binary.NativeEndian.Uint32(b[4:]))), Handle: binary.NativeEndian.Uint32(b[8:])}
	return decode(b, &q.Kind, func() func(*netlink.AttributeDecoder) error {
		if q.Kind != "tbf" {
			return nil
		}
		return q.decodeTBF
	})
}

func (q *Qdisc) decodeTBF(ad *netlink.AttributeDecoder) error {
	switch ad.Type() {
	case tbfParms:
		structure(ad, "parameters of tbf", sizeofTBFQopt, func(p []byte) {
			q.Rate = max(q.Rate, uint64(binary.NativeEndian.Uint32(p[8:])))
			q.Peaked = binary.NativeEndian.Uint32(p[20:]) != 0
			q.Limit = binary.NativeEndian.Uint32(p[24:])
			q.Ticks = binary.NativeEndian.Uint32(p[28:])
		})
	case tbfRate64:
		q.Rate = max(q.Rate, ad.Uint64())
	}
	return nil
}

// Ours says whether it is in a place and of a kind that only we make.
func (q Qdisc) Ours() bool { return q.Kind == "tbf" && q.Handle == Handle }

// Burst is in bytes, to within what a tick is worth.
func (q Qdisc) Burst() uint64 {
	const second = 1e9
	high, low := bits.Mul64(q.Rate, uint64(q.Ticks)*tick)
	low, carry := bits.Add64(low, second/2, 0)
	high += carry
	if high >= second {
		return 0 // no limit is so large: 274 s of 2⁶³ bytes per second
	}
	bytes, _ := bits.Div64(high, low, second)
	return bytes
}

// Is says whether a qdisc is what SetTBF makes of w.
func (q Qdisc) Is(w Bucket) bool {
	if !q.Ours() || q.Peaked || q.Rate != w.Rate || q.Limit != w.Limit {
		return false
	}
	// The kernel keeps the burst as a time, by a multiplication that is good to some
	// nine digits at usual rates and to four at the highest.
	high, low := bits.Mul64(uint64(w.Burst), 1e9)
	if high >= w.Rate {
		return false
	}
	ns, _ := bits.Div64(high, low, w.Rate)
	want, have := uint64(uint32(ns/tick)), uint64(q.Ticks) // the kernel tells 32 bits: 274 s
	off := max(want, have) - min(want, have)
	return off <= 1+want/1000
}

// Filter is a filter of a link's ingress or egress.
type Filter struct {
	Priority uint16
	Protocol uint16
	Handle   uint32
	Kind     string
	MatchAll bool   // it is u32, and has a single key, of no bits
	Redirect int    // the index of the link that its only action redirects to, 0 if none
	Program  []byte // of a bpf in the classic form
	Name     string // of a bpf in the extended form, as its maker called it
	Direct   bool   // it is bpf, and its program returns the verdict on the packet
}

// Decode reads the body of an RTM_NEWTFILTER.
func (f *Filter) Decode(b []byte) error {
	if len(b) < sizeofTCMsg {
		return fmt.Errorf("%w: a filter of %d bytes", nl.ErrMalformed, len(b))
	}
	info := binary.NativeEndian.Uint32(b[16:])
	*f = Filter{
		Handle:   binary.NativeEndian.Uint32(b[8:]),
		Priority: uint16(info >> 16),
		Protocol: htons(uint16(info)),
	}
	return decode(b, &f.Kind, func() func(*netlink.AttributeDecoder) error {
		switch f.Kind {
		case "u32":
			return f.decodeU32
		case "bpf":
			return f.decodeBPF
		}
		return nil
	})
}

func (f *Filter) decodeBPF(ad *netlink.AttributeDecoder) error {
	switch ad.Type() {
	case bpfOps:
		f.Program = ad.Bytes()
	case bpfName:
		f.Name = ad.String()
	case bpfFlags:
		f.Direct = ad.Uint32()&bpfActDirect != 0
	}
	return nil
}

func (f *Filter) decodeU32(ad *netlink.AttributeDecoder) error {
	switch ad.Type() {
	case u32Sel:
		f.MatchAll = isMatchAll(ad.Bytes())
	case u32Act:
		// Of several actions none is what we make.
		var targets []int
		each(ad, func(ad *netlink.AttributeDecoder) error {
			targets = append(targets, 0)
			var kind string
			each(ad, func(ad *netlink.AttributeDecoder) error {
				switch ad.Type() {
				case actKind:
					kind = ad.String()
				case actOptions:
					if kind == "mirred" {
						each(ad, decodeMirred(&targets[len(targets)-1]))
					}
				}
				return nil
			})
			return nil
		})
		if len(targets) == 1 {
			f.Redirect = targets[0]
		}
	}
	return nil
}

// isMatchAll looks at struct tc_u32_sel: the last of its keys, of which there must
// be one, begins with its mask.
func isMatchAll(sel []byte) bool {
	return len(sel) == sizeofU32Sel+sizeofU32Key && sel[0]&u32Terminal != 0 && sel[2] == 1 &&
		binary.NativeEndian.Uint32(sel[sizeofU32Sel:]) == 0
}

// decodeMirred reads which link an action redirects to.
func decodeMirred(to *int) func(*netlink.AttributeDecoder) error {
	return func(ad *netlink.AttributeDecoder) error {
		if ad.Type() == mirredParms {
			structure(ad, "parameters of mirred", sizeofTCMirred, func(p []byte) {
				if binary.NativeEndian.Uint32(p[20:]) == mirredRedirect {
					*to = int(int32(binary.NativeEndian.Uint32(p[24:])))
				}
			})
		}
		return nil
	}
}
