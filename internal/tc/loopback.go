package tc

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo"
	"github.com/tombolo-cni/tombolo/internal/nl"
)

// Keep is what a filter at the ingress of a bridge is to keep from the host's
// 127.0.0.0/8. A host that has route_localnet on for a bridge takes what others send
// there, but for its firewall; this holds where the firewall has been flushed.
type Keep struct {
	// Bridge is the bridge's name and Index its index.
	Bridge string
	Index  int
	// Mark is a bit of a packet's mark: what has it, and is sent to 127.0.0.0/8, passes.
	// Where bridged packets pass the firewall, answers to the host's own calls have that
	// destination again before they come by here, and the firewall gives them the mark.
	Mark uint32
	// Stays says that a clsact which is made for the filter stays when that goes: see Place.
	Stays bool
}

// Kept is what the kernel has of a Keep.
type Kept struct {
	// There says that the filter is in place, with the mark that was asked for.
	There bool
	// Routed says that route_localnet was switched on for the sake of it, and so is to
	// go with it.
	Routed bool

	filters []filter // of ours, whatever they do
	place   qdisc
	others  int
}

// Handles of our filters: what else is to go with them is noted in the lowest bits,
// since the kernel keeps no other note of a filter.
const (
	keepHandle = ownHandle
	// keepRouted stands for route_localnet, keepPlace for the clsact.
	keepRouted = 1 << 0
	keepPlace  = 1 << 1
	keepNotes  = keepRouted | keepPlace
	// keepBase is there because a handle of 0 would have the kernel choose one.
	keepBase = keepHandle | 1<<8
)

// Keep puts the filter in place, and says whether it had to. routed is noted with it:
// see Kept.Routed. What others have at the bridge's ingress stays as it is; there, a
// filter of an earlier priority may accept what this one would drop.
//
// The filter is there before an old one of ours with another note goes. ErrNotSupported
// is the cause where the kernel has no cls_bpf or no clsact.
func (c *Conn) Keep(ctx context.Context, k Keep, routed bool) (changed bool, _ error) {
	have, err := c.Kept(ctx, k)
	if err != nil {
		return false, err
	}
	if have.There && have.Routed == routed && len(have.filters) == 1 {
		return false, nil
	}
	var b nl.Batch
	notes := uint32(0)
	if routed {
		notes |= keepRouted
	}
	made := have.madePlace()
	if !have.HasPlace() {
		addClsact(&b, k.Bridge, k.Index)
		made = true
	}
	if made && !k.Stays {
		notes |= keepPlace
	}
	handle := uint32(keepBase | notes)
	// Whatever ours had this handle is replaced, with what it does.
	setKeeper(&b, k, handle)
	for _, f := range have.filters {
		if f.handle != handle {
			delKeeper(&b, k, f.handle)
		}
	}
	if err := c.execute(ctx, &b); err != nil {
		return false, unsupported(err, "sch_ingress and cls_bpf")
	}
	return true, nil
}

// Kept says what is in place. The error matches fs.ErrNotExist if the bridge is not
// there.
func (c *Conn) Kept(ctx context.Context, k Keep) (*Kept, error) {
	if k.Bridge == "" || len(k.Bridge) >= unix.IFNAMSIZ || k.Index <= 0 {
		return nil, &tombolo.OpError{Op: "keep others from 127.0.0.0/8 by", Object: k.Bridge, Err: fmt.Errorf("%w: it names no link", ErrInvalid)}
	}
	var have Kept
	var b nl.Batch
	getQdisc(&b, k.Bridge, k.Index, parentClsact, &have.place)
	if err := c.read(ctx, &b); err != nil {
		return nil, err
	}
	if err := b.Err(0); errors.Is(err, unix.ENODEV) {
		return nil, err
	}
	if have.place.kind == "" {
		return &have, nil
	}
	var at installed
	if err := c.filters(ctx, k.Index, &at, parentIngress); err != nil {
		return nil, err
	}
	have.others = at.others
	program := keeper(k.Mark)
	for _, f := range at.own {
		if f.kind != "bpf" || f.handle&^uint32(keepNotes) != keepBase {
			// Before its filters, each classifier lists itself.
			continue
		}
		have.filters = append(have.filters, f)
		have.There = have.There || f.protocol == unix.ETH_P_ALL && f.direct && bytes.Equal(f.program, program)
		have.Routed = have.Routed || f.handle&keepRouted != 0
	}
	return &have, nil
}

// HasPlace says whether there is a place for the filter, be it for others' filters alone.
func (have *Kept) HasPlace() bool { return have.place.kind != "" }

// Place gives a new bridge the place of the filter (clsact), for as long as there is the bridge.
// While one comes to a link that is up, or goes, the kernel drops what the host sends by the
// link, for 5 to 20 ms on a busy machine: so it is to be there before anybody is behind the
// bridge. The error is of the kernel's,
// which may have none, or one already.
func (c *Conn) Place(ctx context.Context, k Keep) error {
	var b nl.Batch
	addClsact(&b, k.Bridge, k.Index)
	return c.execute(ctx, &b)
}

// Any says whether there is a filter of ours, whatever its mark.
func (have *Kept) Any() bool { return len(have.filters) > 0 }

// madePlace says whether the clsact was made for the filter.
func (have *Kept) madePlace() bool {
	for _, f := range have.filters {
		if f.handle&keepPlace != 0 {
			return true
		}
	}
	return false
}

// Unkeep takes the filter away, and the clsact if that was made for it and nobody else
// uses it. What is gone already is success.
func (c *Conn) Unkeep(ctx context.Context, k Keep) error {
	have, err := c.Kept(ctx, k)
	if err != nil {
		return passAbsent(err)
	}
	var b nl.Batch
	if have.madePlace() && have.others == 0 {
		var at installed
		if err := c.filters(ctx, k.Index, &at, parentEgress); err != nil {
			return passAbsent(err)
		}
		have.others = at.others
	}
	if have.madePlace() && have.others == 0 {
		delQdisc(&b, k.Bridge, k.Index, parentClsact)
		return passAbsent(c.execute(ctx, &b))
	}
	for _, f := range have.filters {
		delKeeper(&b, k, f.handle)
	}
	if b.Len() == 0 {
		return nil
	}
	return passAbsent(c.execute(ctx, &b))
}

func setKeeper(b *nl.Batch, k Keep, handle uint32) {
	program := keeper(k.Mark)
	b.Request("set filter of", nl.Name(k.Bridge), unix.RTM_NEWTFILTER, unix.NLM_F_CREATE, func(e *nl.Encoder) {
		tcMsg(e, k.Index, handle, parentIngress, filterInfo(unix.ETH_P_ALL))
		e.String(tcaKind, "bpf")
		e.Nest(tcaOptions, func(e *nl.Encoder) {
			e.Uint16(bpfOpsLen, uint16(len(program)/sizeofSockFilter))
			e.Bytes(bpfOps, program)
			e.Uint32(bpfFlags, bpfActDirect)
		})
	})
}

func delKeeper(b *nl.Batch, k Keep, handle uint32) {
	b.Request("delete filter of", nl.Name(k.Bridge), unix.RTM_DELTFILTER, 0, func(e *nl.Encoder) {
		tcMsg(e, k.Index, handle, parentIngress, filterInfo(unix.ETH_P_ALL))
		e.String(tcaKind, "bpf")
	})
}

// keeper is the filter as a program of classic BPF (struct sock_filter of
// include/uapi/linux/filter.h), which every kernel runs without a verifier's leave.
//
// What is in a VLAN goes to a link of the VLAN's, whose route_localnet is another, or
// nowhere. But the kernel takes tags of VLAN 0, which are a priority and no VLAN, off one
// after the other, and only the first before it comes by here. Nobody sends two; what
// comes so is dropped.
func keeper(mark uint32) []byte {
	const (
		ld, ldh, ldb = unix.BPF_LD | unix.BPF_W | unix.BPF_ABS, unix.BPF_LD | unix.BPF_H | unix.BPF_ABS, unix.BPF_LD | unix.BPF_B | unix.BPF_ABS
		and          = unix.BPF_ALU | unix.BPF_AND | unix.BPF_K
		jeq, jset    = unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, unix.BPF_JMP | unix.BPF_JSET | unix.BPF_K
		ret          = unix.BPF_RET | unix.BPF_K

		// SKF_AD_OFF and SKF_NET_OFF of include/uapi/linux/filter.h, as the kernel
		// counts them: from the end of the numbers.
		ad      = 1<<32 - 0x1000
		network = 1<<32 - 0x100000

		protocol = ad
		markOf   = ad + 20
		vlanTCI  = ad + 44

		source, destination = network + 12, network + 16 // of IPv4
		innerTCI            = network                    // of a second tag

		vlanID   = 0xfff
		loopback = 127

		goOn = 1<<32 - 1 // TC_ACT_UNSPEC
		drop = 2         // TC_ACT_SHOT
	)
	list := []unix.SockFilter{
		0:  {Code: ld, K: protocol},
		1:  {Code: jeq, K: unix.ETH_P_IP, Jt: 8},
		2:  {Code: jeq, K: unix.ETH_P_8021Q, Jt: 1},
		3:  {Code: jeq, K: unix.ETH_P_8021AD, Jf: 12},
		4:  {Code: ld, K: vlanTCI},
		5:  {Code: and, K: vlanID},
		6:  {Code: jeq, K: 0, Jf: 9},
		7:  {Code: ldh, K: innerTCI},
		8:  {Code: and, K: vlanID},
		9:  {Code: jeq, K: 0, Jt: 7, Jf: 6},
		10: {Code: ldb, K: source},
		11: {Code: jeq, K: loopback, Jt: 5},
		12: {Code: ldb, K: destination},
		13: {Code: jeq, K: loopback, Jf: 2},
		14: {Code: ld, K: markOf},
		15: {Code: jset, K: mark, Jf: 1},
		16: {Code: ret, K: goOn},
		17: {Code: ret, K: drop},
	}
	var program []byte
	for _, op := range list {
		program = binary.NativeEndian.AppendUint16(program, op.Code)
		program = append(program, op.Jt, op.Jf)
		program = binary.NativeEndian.AppendUint32(program, op.K)
	}
	return program
}
