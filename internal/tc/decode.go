package tc

import (
	"encoding/binary"
	"fmt"
	"math/bits"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/nl"
)

// link is what the kernel says of a link, as far as it matters here.
type link struct {
	index, mtu  int
	name        string
	kind, alias string
	up          bool
}

// decode reads the body of an RTM_NEWLINK.
func (l *link) decode(b []byte) error {
	if len(b) < unix.SizeofIfInfomsg {
		return fmt.Errorf("%w: a link of %d bytes", nl.ErrMalformed, len(b))
	}
	*l = link{
		index: int(int32(binary.NativeEndian.Uint32(b[4:]))),
		up:    binary.NativeEndian.Uint32(b[8:])&unix.IFF_UP != 0,
	}
	attrs := nl.ParseAttrs(b[unix.SizeofIfInfomsg:])
	for attrs.Next() {
		switch attrs.Type {
		case unix.IFLA_IFNAME:
			l.name = attrs.String()
		case unix.IFLA_MTU:
			l.mtu = int(attrs.Uint32())
		case unix.IFLA_IFALIAS:
			l.alias = attrs.String()
		case unix.IFLA_LINKINFO:
			info := attrs.Nested()
			for info.Next() {
				if info.Type == unix.IFLA_INFO_KIND {
					l.kind = info.String()
				}
			}
			if err := info.Err(); err != nil {
				return err
			}
		}
	}
	return attrs.Err()
}

// qdisc is a queueing discipline: nothing, if its kind is empty.
type qdisc struct {
	kind   string
	handle uint32
	// Of a tbf only: the rate in bytes per second, the burst as the time that the rate
	// takes for it, in ticks, and the queue in bytes.
	rate   uint64
	ticks  uint32
	limit  uint32
	peaked bool // it has a second, peak rate, which ours never has
}

// tick is the unit of time of qdiscs, in nanoseconds: it has been fixed since Linux
// 2.6.31 (PSCHED_SHIFT, include/net/pkt_sched.h; the second number of
// /proc/net/psched).
const tick = 64

// decode reads the body of an RTM_NEWQDISC.
func (q *qdisc) decode(b []byte) error {
	if len(b) < sizeofTCMsg {
		return fmt.Errorf("%w: a qdisc of %d bytes", nl.ErrMalformed, len(b))
	}
	*q = qdisc{handle: binary.NativeEndian.Uint32(b[8:])}
	attrs := nl.ParseAttrs(b[sizeofTCMsg:])
	for attrs.Next() {
		switch attrs.Type {
		case tcaKind:
			q.kind = attrs.String()
		case tcaOptions:
			// The kernel writes the kind first; other kinds number theirs anew.
			if q.kind != "tbf" {
				continue
			}
			if err := q.decodeTBF(attrs.Nested()); err != nil {
				return err
			}
		}
	}
	return attrs.Err()
}

func (q *qdisc) decodeTBF(attrs *nl.Attrs) error {
	var rate64 uint64
	for attrs.Next() {
		switch attrs.Type {
		case tbfParms:
			p := attrs.Data
			if len(p) < sizeofTBFQopt {
				return fmt.Errorf("%w: parameters of tbf in %d bytes", nl.ErrMalformed, len(p))
			}
			q.rate = uint64(binary.NativeEndian.Uint32(p[8:]))
			q.peaked = binary.NativeEndian.Uint32(p[20:]) != 0
			q.limit = binary.NativeEndian.Uint32(p[24:])
			q.ticks = binary.NativeEndian.Uint32(p[28:])
		case tbfRate64:
			if len(attrs.Data) != 8 {
				return fmt.Errorf("%w: a rate of %d bytes", nl.ErrMalformed, len(attrs.Data))
			}
			rate64 = binary.NativeEndian.Uint64(attrs.Data)
		}
	}
	q.rate = max(q.rate, rate64)
	return attrs.Err()
}

// ours says whether it is in a place and of a kind that only we make.
func (q qdisc) ours() bool { return q.kind == "tbf" && q.handle == ownHandle }

// burst is in bytes, to within what a tick is worth.
func (q qdisc) burst() uint64 {
	const second = 1e9
	high, low := bits.Mul64(q.rate, uint64(q.ticks)*tick)
	low, carry := bits.Add64(low, second/2, 0)
	high += carry
	if high >= second {
		return 0 // nobody has it: 274 s of 2⁶³ bytes per second
	}
	bytes, _ := bits.Div64(high, low, second)
	return bytes
}

// is says whether a qdisc is what setTBF makes of w.
func (q qdisc) is(w bucket) bool {
	if !q.ours() || q.peaked || q.rate != w.rate || q.limit != w.limit {
		return false
	}
	// The kernel keeps the burst as a time, by a multiplication that is good to some
	// nine digits at usual rates and to four at the highest.
	high, low := bits.Mul64(uint64(w.burst), 1e9)
	if high >= w.rate {
		return false
	}
	ns, _ := bits.Div64(high, low, w.rate)
	want, have := ns/tick, uint64(q.ticks)
	off := max(want, have) - min(want, have)
	return off <= 1+want/1000
}

// filter is a filter of a port's ingress or egress.
type filter struct {
	priority uint16
	protocol uint16
	handle   uint32
	kind     string
	matchAll bool   // it is u32, and has a single key, of no bits
	redirect int    // the index of the link that its only action redirects to, 0 if none
	program  []byte // of a bpf in the classic form
	direct   bool   // it is bpf, and what its program returns is what becomes of the packet
}

// decode reads the body of an RTM_NEWTFILTER.
func (f *filter) decode(b []byte) error {
	if len(b) < sizeofTCMsg {
		return fmt.Errorf("%w: a filter of %d bytes", nl.ErrMalformed, len(b))
	}
	info := binary.NativeEndian.Uint32(b[16:])
	*f = filter{
		handle:   binary.NativeEndian.Uint32(b[8:]),
		priority: uint16(info >> 16),
		protocol: htons(uint16(info)),
	}
	attrs := nl.ParseAttrs(b[sizeofTCMsg:])
	for attrs.Next() {
		switch attrs.Type {
		case tcaKind:
			f.kind = attrs.String()
		case tcaOptions:
			// The kernel writes the kind first; other kinds number theirs anew.
			var err error
			switch f.kind {
			case "u32":
				err = f.decodeU32(attrs.Nested())
			case "bpf":
				err = f.decodeBPF(attrs.Nested())
			}
			if err != nil {
				return err
			}
		}
	}
	return attrs.Err()
}

func (f *filter) decodeBPF(attrs *nl.Attrs) error {
	for attrs.Next() {
		switch attrs.Type {
		case bpfOps:
			f.program = slices.Clone(attrs.Data)
		case bpfFlags:
			f.direct = attrs.Uint32()&bpfActDirect != 0
		}
	}
	return attrs.Err()
}

func (f *filter) decodeU32(attrs *nl.Attrs) error {
	for attrs.Next() {
		switch attrs.Type {
		case u32Sel:
			f.matchAll = isMatchAll(attrs.Data)
		case u32Act:
			var err error
			if f.redirect, err = decodeActions(attrs.Nested()); err != nil {
				return err
			}
		}
	}
	return attrs.Err()
}

// isMatchAll looks at struct tc_u32_sel: the last of its keys, of which there must
// be one, begins with its mask.
func isMatchAll(sel []byte) bool {
	return len(sel) == sizeofU32Sel+sizeofU32Key && sel[0]&u32Terminal != 0 && sel[2] == 1 &&
		binary.NativeEndian.Uint32(sel[sizeofU32Sel:]) == 0
}

// decodeActions gives the link that a filter's only action redirects to.
func decodeActions(actions *nl.Attrs) (to int, _ error) {
	var n int
	for actions.Next() {
		n++
		var kind string
		attrs := actions.Nested()
		for attrs.Next() {
			switch attrs.Type {
			case actKind:
				kind = attrs.String()
			case actOptions:
				if kind != "mirred" {
					continue
				}
				var err error
				if to, err = decodeMirred(attrs.Nested()); err != nil {
					return 0, err
				}
			}
		}
		if err := attrs.Err(); err != nil {
			return 0, err
		}
	}
	if n != 1 {
		to = 0
	}
	return to, actions.Err()
}

func decodeMirred(attrs *nl.Attrs) (to int, _ error) {
	for attrs.Next() {
		if attrs.Type != mirredParms {
			continue
		}
		p := attrs.Data
		if len(p) < sizeofTCMirred {
			return 0, fmt.Errorf("%w: parameters of mirred in %d bytes", nl.ErrMalformed, len(p))
		}
		if binary.NativeEndian.Uint32(p[20:]) == mirredRedirect {
			to = int(int32(binary.NativeEndian.Uint32(p[24:])))
		}
	}
	return to, attrs.Err()
}
