package tc

import (
	"encoding/binary"
	"fmt"
	"math/bits"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/nl"
)

// Qdisc is a queueing discipline. An empty Kind means that there is none.
type Qdisc struct {
	Link   int // the index of its link
	Kind   string
	Handle uint32
	// The following fields are set for a tbf only. Rate is in bytes per second. Ticks is the burst, as the time that
	// it takes at this rate. Limit is the queue's length in bytes.
	Rate   uint64
	Ticks  uint32
	Limit  uint32
	Peaked bool // the qdisc also has a peak rate, which ours never has
}

// tick is the unit of time of qdiscs, in nanoseconds. It has been fixed since Linux 2.6.31 (PSCHED_SHIFT,
// include/net/pkt_sched.h; the second number of /proc/net/psched).
const tick = 64

// decode parses the attributes after struct tcmsg. It decodes TCA_OPTIONS with the function that options returns for
// the kind, if any. The kernel writes the kind first, and each kind numbers its attributes differently.
func decode(b []byte, kind *string, options func() func(*netlink.AttributeDecoder)) error {
	return nl.Decode(b[sizeofTCMsg:], func(ad *netlink.AttributeDecoder) {
		switch ad.Type() {
		case unix.TCA_KIND:
			*kind = ad.String()
		case unix.TCA_OPTIONS:
			if read := options(); read != nil {
				nl.DecodeNested(ad, read)
			}
		}
	})
}

// structure reads an attribute with a struct of at least size bytes; a later kernel may send a longer one.
func structure(ad *netlink.AttributeDecoder, what string, size int, read func([]byte)) {
	ad.Do(func(b []byte) error {
		if len(b) < size {
			return fmt.Errorf("%w: %s in %d bytes", nl.ErrMalformed, what, len(b))
		}
		read(b)
		return nil
	})
}

// Decode parses the body of an RTM_NEWQDISC.
func (q *Qdisc) Decode(b []byte) error {
	if len(b) < sizeofTCMsg {
		return fmt.Errorf("%w: a qdisc of %d bytes", nl.ErrMalformed, len(b))
	}
	*q = Qdisc{Link: int(int32(binary.NativeEndian.Uint32(b[4:]))), Handle: binary.NativeEndian.Uint32(b[8:])}
	return decode(b, &q.Kind, func() func(*netlink.AttributeDecoder) {
		if q.Kind != "tbf" {
			return nil
		}
		return q.decodeTBF
	})
}

func (q *Qdisc) decodeTBF(ad *netlink.AttributeDecoder) {
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
}

// Ours reports whether the qdisc has the kind and handle that only we use.
func (q Qdisc) Ours() bool { return q.Kind == "tbf" && q.Handle == Handle }

// Burst returns the burst in bytes, with the precision of a tick.
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

// Is reports whether the qdisc is as SetTBF would create it for w.
func (q Qdisc) Is(w Bucket) bool {
	if !q.Ours() || q.Peaked || q.Rate != w.Rate || q.Limit != w.Limit {
		return false
	}

	// The kernel stores the burst as a time. Its multiplication is exact to some nine digits at usual rates, and to
	// four at the highest.
	high, low := bits.Mul64(uint64(w.Burst), 1e9)
	if high >= w.Rate {
		return false
	}

	ns, _ := bits.Div64(high, low, w.Rate)
	want, have := uint64(uint32(ns/tick)), uint64(q.Ticks) // the kernel reports 32 bits, which is 274 s
	off := max(want, have) - min(want, have)
	return off <= 1+want/1000
}

// Filter is a filter at a link's ingress or egress.
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

// Decode parses the body of an RTM_NEWTFILTER.
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
	return decode(b, &f.Kind, func() func(*netlink.AttributeDecoder) {
		switch f.Kind {
		case "u32":
			return f.decodeU32
		case "bpf":
			return f.decodeBPF
		}
		return nil
	})
}

func (f *Filter) decodeBPF(ad *netlink.AttributeDecoder) {
	switch ad.Type() {
	case bpfOps:
		f.Program = ad.Bytes()
	case bpfName:
		f.Name = ad.String()
	case bpfFlags:
		f.Direct = ad.Uint32()&bpfActDirect != 0
	}
}

func (f *Filter) decodeU32(ad *netlink.AttributeDecoder) {
	switch ad.Type() {
	case u32Sel:
		f.MatchAll = isMatchAll(ad.Bytes())
	case u32Act:
		// A filter with several actions is not ours.
		var targets []int
		nl.DecodeNested(ad, func(ad *netlink.AttributeDecoder) {
			targets = append(targets, 0)
			var kind string
			nl.DecodeNested(ad, func(ad *netlink.AttributeDecoder) {
				switch ad.Type() {
				case actKind:
					kind = ad.String()
				case actOptions:
					if kind == "mirred" {
						nl.DecodeNested(ad, decodeMirred(&targets[len(targets)-1]))
					}
				}
			})
		})
		if len(targets) == 1 {
			f.Redirect = targets[0]
		}
	}
}

// isMatchAll reports whether a struct tc_u32_sel matches every packet. It must have exactly one key, whose first
// field, the mask, is 0.
func isMatchAll(sel []byte) bool {
	return len(sel) == sizeofU32Sel+sizeofU32Key && sel[0]&u32Terminal != 0 && sel[2] == 1 &&
		binary.NativeEndian.Uint32(sel[sizeofU32Sel:]) == 0
}

// decodeMirred returns a function that stores the index of the link that an action redirects to.
func decodeMirred(to *int) func(*netlink.AttributeDecoder) {
	return func(ad *netlink.AttributeDecoder) {
		if ad.Type() == mirredParms {
			structure(ad, "parameters of mirred", sizeofTCMirred, func(p []byte) {
				if binary.NativeEndian.Uint32(p[20:]) == mirredRedirect {
					*to = int(int32(binary.NativeEndian.Uint32(p[24:])))
				}
			})
		}
	}
}
