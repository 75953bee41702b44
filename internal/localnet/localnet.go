// Package localnet protects the host's 127.0.0.0/8 by a filter at the ingress of a bridge. If route_localnet is on
// for a bridge, the host accepts packets from others to these addresses, unless its firewall drops them. The filter
// stays in place when someone flushes the firewall.
//
//	conn := localnet.On(socket)
//	state, err := conn.Get(ctx, filter) // is it there, and who switched route_localnet on?
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

// On returns a Conn over an open connection, which still belongs to its owner. The Conn needs no Close.
func On(s tombolo.Socket) *Conn { return &Conn{nl: nl.Of(s)} }

// IsUnsupported reports whether an error means that the kernel lacks a feature and could not load it.
func IsUnsupported(err error) bool { return errors.Is(err, tc.ErrNotSupported) }

// Filter describes the filter of one bridge.
type Filter struct {
	// Bridge is the bridge's name and Index its index.
	Bridge string
	Index  int
	// Mark is a bit of a packet's mark. Packets with it may go to 127.0.0.0/8. If bridged packets pass the firewall,
	// replies to the host's own connections have such a destination before they reach the filter. The firewall gives
	// them the mark.
	Mark uint32
	// Stays means that a clsact that Ensure creates for the filter stays when the filter is removed: see Place.
	Stays bool
}

func (k Filter) link() tc.Device { return tc.Device{Name: k.Bridge, Index: k.Index} }

// State is the part of a Filter that exists in the kernel.
type State struct {
	// There is true if the filter is in place, with the requested mark.
	There bool
	// Routed is true if route_localnet was switched on for the filter, and so must be switched off with it.
	Routed bool

	filters []tc.Filter // our filters, with any program
	place   tc.Qdisc
	others  int
}

// Handles of our filters. The lowest bits record which objects must be removed with the filter, since the kernel
// stores no other note with a filter.
const (
	// noteRouted stands for route_localnet, notePlace for the clsact.
	noteRouted = 1 << 0
	notePlace  = 1 << 1
	noteMask   = noteRouted | notePlace
	// handleBase makes all handles differ from 0, for which the kernel would choose a handle.
	handleBase = tc.Handle | 1<<8
)

// Ensure adds the filter if it is missing or differs, and reports whether it changed anything. routed is recorded
// with the filter: see State.Routed. have is the result of a Get just before.
//
// Ensure leaves other filters at the bridge's ingress alone. One with an earlier priority may accept packets that
// this filter would drop. Ensure adds the new filter before it deletes one of ours with another note. If the kernel
// has no cls_bpf or no clsact, IsUnsupported reports true for the error.
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

	// This replaces a filter of ours with the same handle, and its program.
	k.link().SetProgram(&b, handle, program(k.Mark))
	for _, f := range have.filters {
		if f.Handle != handle {
			k.link().DelProgram(&b, f.Handle)
		}
	}

	if err := c.nl.Do(ctx, &b); err != nil {
		return false, tc.Unsupported(err, "sch_ingress and cls_bpf")
	}

	return true, nil
}

// Get returns the state of the filter. If the bridge does not exist, the error matches fs.ErrNotExist.
func (c *Conn) Get(ctx context.Context, k Filter) (*State, error) {
	if k.Bridge == "" || len(k.Bridge) >= unix.IFNAMSIZ || k.Index <= 0 {
		return nil, &tombolo.OpError{Op: "keep others from 127.0.0.0/8 by", Object: k.Bridge,
			Err: fmt.Errorf("%w: it names no link", tombolo.ErrInvalid)}
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
			// Each classifier first lists itself, without a filter.
			continue
		}
		have.filters = append(have.filters, f)
		have.There = have.There || f.Protocol == unix.ETH_P_ALL && f.Direct && bytes.Equal(f.Program, want)
		have.Routed = have.Routed || f.Handle&noteRouted != 0
	}

	return &have, nil
}

// HasPlace reports whether the bridge has a clsact, perhaps only for filters of others.
func (have *State) HasPlace() bool { return have.place.Kind != "" }

// Place adds a clsact to a new bridge, which keeps it as long as it exists. When a clsact is added to or removed from
// a link that is up, the kernel drops the host's packets to the link for 5 to 20 ms on a busy machine. So it must be
// there before the first pod. The kernel returns an error if it has no clsact, or if the bridge has one already.
func (c *Conn) Place(ctx context.Context, k Filter) error {
	var b nl.Batch
	k.link().AddClsact(&b)
	return c.nl.Do(ctx, &b)
}

// Any reports whether there is a filter of ours, with any mark.
func (have *State) Any() bool { return len(have.filters) > 0 }

// madePlace reports whether the clsact was created for the filter.
func (have *State) madePlace() bool {
	for _, f := range have.filters {
		if f.Handle&notePlace != 0 {
			return true
		}
	}
	return false
}

// Remove deletes the filter, and the clsact if it was created for the filter and no other filter uses it. It is no
// error if they are gone already. have is the result of a Get just before.
func (c *Conn) Remove(ctx context.Context, k Filter, have *State) error {
	var b nl.Batch
	if have.madePlace() && have.others == 0 {
		var err error
		if _, have.others, err = k.link().Filters(ctx, c.nl, tc.Egress); err != nil {
			return nl.PassAbsent(err)
		}
	}

	if have.madePlace() && have.others == 0 {
		k.link().DelQdisc(&b, tc.Clsact)
		return nl.PassAbsent(c.nl.Do(ctx, &b))
	}

	for _, f := range have.filters {
		k.link().DelProgram(&b, f.Handle)
	}

	if b.Len() == 0 {
		return nil
	}

	return nl.PassAbsent(c.nl.Do(ctx, &b))
}

// program returns the filter as a program of classic BPF (struct sock_filter of include/uapi/linux/filter.h). Every
// kernel runs it, without a check by the verifier.
//
// The kernel passes packets of a VLAN to the VLAN's link, which has its own route_localnet, or drops them. But it
// removes tags of VLAN 0, which carry a priority only, one after the other, and only the first before the filter
// runs. So the program drops packets with two such tags, which no host sends.
func program(mark uint32) []byte {
	const (
		// SKF_NET_OFF of include/uapi/linux/filter.h, counted from the end of the numbers
		network             = 1<<32 - 0x100000
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
		in, _ := op.Assemble() // can fail only for an invalid constant, and there is none
		code = binary.NativeEndian.AppendUint16(code, in.Op)
		code = append(code, in.Jt, in.Jf)
		code = binary.NativeEndian.AppendUint32(code, in.K)
	}

	return code
}
