// Package localnet keeps others from the host's 127.0.0.0/8 by a filter at the ingress of
// a bridge. A host that has route_localnet on for a bridge takes what others send there,
// but for its firewall; this holds where the firewall has been flushed.
//
//	conn := localnet.On(socket)
//	state, err := conn.Get(ctx, filter) // is it there, and whose was route_localnet?
//	changed, err := conn.Ensure(ctx, filter, state, true)
//	err = conn.Remove(ctx, filter, state)
package localnet

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"

	"golang.org/x/net/bpf"
	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo"
	"github.com/tombolo-cni/tombolo/internal/nl"
	"github.com/tombolo-cni/tombolo/internal/tc"
)

// Conn works on the bridges of one network namespace.
type Conn struct{ nl *nl.Conn }

// On makes a Conn over a connection that stays with its owner. It needs no Close.
func On(s tombolo.Socket) *Conn { return &Conn{nl: nl.Of(s)} }

// IsUnsupported says of an error that its cause is what the kernel lacks, and could not
// or would not load.
func IsUnsupported(err error) bool { return errors.Is(err, tc.ErrNotSupported) }

// Filter says which filter is meant.
type Filter struct {
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

func (k Filter) link() tc.Link { return tc.Link{Name: k.Bridge, Index: k.Index} }

// State is what the kernel has of a Filter.
type State struct {
	// There says that the filter is in place, with the mark that was asked for.
	There bool
	// Routed says that route_localnet was switched on for the sake of it, and so is to
	// go with it.
	Routed bool

	filters []tc.Filter // of ours, with any program
	place   tc.Qdisc
	others  int
}

// Handles of our filters: the lowest bits note the objects that go with them, since the kernel keeps no other note
// of a filter.
const (
	// noteRouted stands for route_localnet, notePlace for the clsact.
	noteRouted = 1 << 0
	notePlace  = 1 << 1
	noteMask   = noteRouted | notePlace
	// handleBase is there because a handle of 0 would have the kernel choose one.
	handleBase = tc.Handle | 1<<8
)

// Ensure puts the filter in place, and says whether it had to. routed is noted with it: see State.Routed. Others'
// filters at the bridge's ingress stay as they are; one with an earlier priority may accept what this one would
// drop.
//
// The filter is there before an old one of ours with another note goes. An error says
// IsUnsupported where the kernel has no cls_bpf or no clsact.
//
// have is what Get has just said.
func (c *Conn) Ensure(ctx context.Context, k Filter, have *State, routed bool) (changed bool, _ error) {
	if have.There && have.Routed == routed && len(have.filters) == 1 {
		return false, nil
	}
	var b nl.Batch
	notes := uint32(0)
	if routed {
		notes |= noteRouted
	}
	made := have.madePlace()
	if !have.HasPlace() {
		k.link().AddClsact(&b)
		made = true
	}
	if made && !k.Stays {
		notes |= notePlace
	}
	handle := uint32(handleBase | notes)
	// This replaces a filter of ours with this handle, and its program.
	k.link().SetProgram(&b, handle, program(k.Mark))
	for _, f := range have.filters {
		if f.Handle != handle {
			k.link().DelProgram(&b, f.Handle)
		}
	}
	if err := tc.Execute(ctx, c.nl, &b); err != nil {
		return false, tc.Unsupported(err, "sch_ingress and cls_bpf")
	}
	return true, nil
}

// Get says what is in place. The error matches fs.ErrNotExist if the bridge is not
// there.
func (c *Conn) Get(ctx context.Context, k Filter) (*State, error) {
	if k.Bridge == "" || len(k.Bridge) >= unix.IFNAMSIZ || k.Index <= 0 {
		return nil, &tombolo.OpError{Op: "keep others from 127.0.0.0/8 by", Object: k.Bridge, Err: fmt.Errorf("%w: it names no link", tombolo.ErrInvalid)}
	}
	var have State
	var b nl.Batch
	k.link().GetQdisc(&b, tc.Clsact, &have.place)
	if err := tc.Look(ctx, c.nl, &b); err != nil {
		return nil, err
	}
	if err := b.Err(0); errors.Is(err, unix.ENODEV) {
		return nil, err
	}
	if have.place.Kind == "" {
		return &have, nil
	}
	own, others, err := k.link().Filters(ctx, c.nl, tc.Ingress)
	if err != nil {
		return nil, err
	}
	have.others = others
	want := program(k.Mark)
	for _, f := range own {
		if f.Kind != "bpf" || f.Handle&^uint32(noteMask) != handleBase {
			// Before its filters, each classifier lists itself.
			continue
		}
		have.filters = append(have.filters, f)
		have.There = have.There || f.Protocol == unix.ETH_P_ALL && f.Direct && bytes.Equal(f.Program, want)
		have.Routed = have.Routed || f.Handle&noteRouted != 0
	}
	return &have, nil
}

// HasPlace says whether there is a place for the filter, be it for others' filters alone.
func (have *State) HasPlace() bool { return have.place.Kind != "" }

// Place gives a new bridge the place of the filter (clsact), for as long as there is the bridge. While one comes to
// a link that is up, or goes, the kernel drops what the host sends by the link, for 5 to 20 ms on a busy machine:
// so it has to be there before pods are. The error is of the kernel's, which may have none, or one already.
func (c *Conn) Place(ctx context.Context, k Filter) error {
	var b nl.Batch
	k.link().AddClsact(&b)
	return tc.Execute(ctx, c.nl, &b)
}

// Any says whether there is a filter of ours, with any mark.
func (have *State) Any() bool { return len(have.filters) > 0 }

// madePlace says whether the clsact was made for the filter.
func (have *State) madePlace() bool {
	for _, f := range have.filters {
		if f.Handle&notePlace != 0 {
			return true
		}
	}
	return false
}

// Remove takes the filter away, and the clsact if that was made for it and no other filter uses it. It is no error
// if they are gone already. have is as Ensure's.
func (c *Conn) Remove(ctx context.Context, k Filter, have *State) error {
	var b nl.Batch
	if have.madePlace() && have.others == 0 {
		var err error
		if _, have.others, err = k.link().Filters(ctx, c.nl, tc.Egress); err != nil {
			return tc.PassAbsent(err)
		}
	}
	if have.madePlace() && have.others == 0 {
		k.link().DelQdisc(&b, tc.Clsact)
		return tc.PassAbsent(tc.Execute(ctx, c.nl, &b))
	}
	for _, f := range have.filters {
		k.link().DelProgram(&b, f.Handle)
	}
	if b.Len() == 0 {
		return nil
	}
	return tc.PassAbsent(tc.Execute(ctx, c.nl, &b))
}

// program is the filter as a program of classic BPF (struct sock_filter of
// include/uapi/linux/filter.h), which every kernel runs without a verifier's leave.
//
// The kernel gives packets of a VLAN to the VLAN's link, which has its own route_localnet, or drops them. But the
// kernel takes tags of VLAN 0, which are a priority and no VLAN, off one after the other, and only the first before
// it comes by here. No host sends two; packets with two are dropped.
func program(mark uint32) []byte {
	const (
		network             = 1<<32 - 0x100000           // SKF_NET_OFF of include/uapi/linux/filter.h, from the end of the numbers
		source, destination = network + 12, network + 16 // of IPv4
		innerTCI            = network                    // of a second tag

		vlanID   = 0xfff
		loopback = 127

		goOn = 1<<32 - 1 // TC_ACT_UNSPEC
		drop = 2         // TC_ACT_SHOT
	)
	list := []bpf.Instruction{
		0:  bpf.LoadExtension{Num: bpf.ExtProto},
		1:  bpf.JumpIf{Cond: bpf.JumpEqual, Val: unix.ETH_P_IP, SkipTrue: 8},
		2:  bpf.JumpIf{Cond: bpf.JumpEqual, Val: unix.ETH_P_8021Q, SkipTrue: 1},
		3:  bpf.JumpIf{Cond: bpf.JumpEqual, Val: unix.ETH_P_8021AD, SkipFalse: 12},
		4:  bpf.LoadExtension{Num: bpf.ExtVLANTag},
		5:  bpf.ALUOpConstant{Op: bpf.ALUOpAnd, Val: vlanID},
		6:  bpf.JumpIf{Cond: bpf.JumpEqual, Val: 0, SkipFalse: 9},
		7:  bpf.LoadAbsolute{Off: innerTCI, Size: 2},
		8:  bpf.ALUOpConstant{Op: bpf.ALUOpAnd, Val: vlanID},
		9:  bpf.JumpIf{Cond: bpf.JumpEqual, Val: 0, SkipTrue: 7, SkipFalse: 6},
		10: bpf.LoadAbsolute{Off: source, Size: 1},
		11: bpf.JumpIf{Cond: bpf.JumpEqual, Val: loopback, SkipTrue: 5},
		12: bpf.LoadAbsolute{Off: destination, Size: 1},
		13: bpf.JumpIf{Cond: bpf.JumpEqual, Val: loopback, SkipFalse: 2},
		14: bpf.LoadExtension{Num: bpf.ExtMark},
		15: bpf.JumpIf{Cond: bpf.JumpBitsSet, Val: mark, SkipFalse: 1},
		16: bpf.RetConstant{Val: goOn},
		17: bpf.RetConstant{Val: drop},
	}
	var code []byte
	for _, op := range list {
		in, _ := op.Assemble() // an error is about a constant that there cannot be
		code = binary.NativeEndian.AppendUint16(code, in.Op)
		code = append(code, in.Jt, in.Jf)
		code = binary.NativeEndian.AppendUint32(code, in.K)
	}
	return code
}
