// Package localnet protects the host's 127.0.0.0/8 by a filter at the ingress of a bridge. If route_localnet is on
// for the bridge, the host accepts packets from other machines to these addresses, unless its firewall drops them.
// The filter still works after someone has flushed the firewall.
//
//	conn := localnet.On(socket)
//	state, err := conn.Get(ctx, filter)
//	changed, err := conn.Ensure(ctx, filter, state, true)
//	state, err = conn.Get(ctx, filter)
//	err = conn.Remove(ctx, filter, state)
package localnet

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"

	"golang.org/x/net/bpf"
	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo"
	"github.com/tombolo-cni/tombolo/internal/nl"
	"github.com/tombolo-cni/tombolo/internal/tc"
)

// Conn adds, reads and removes the filters of bridges in one network namespace.
type Conn struct{ nl *nl.Conn }

// On returns a Conn that uses an open connection. The caller still has to close the connection. The Conn itself needs
// no Close.
func On(s tombolo.Socket) *Conn { return &Conn{nl: nl.Of(s)} }

// IsUnsupported reports whether err means that the kernel lacks a feature that the filter needs, and could not load it.
func IsUnsupported(err error) bool { return errors.Is(err, tc.ErrNotSupported) }

// Filter describes the filter for one bridge.
type Filter struct {
	// Bridge is the name of the bridge, and Index is its index.
	Bridge string
	Index  int
	// Mark is a bit of the packet mark. The filter accepts packets to 127.0.0.0/8 that have this bit. The firewall sets
	// the bit on replies to the host's own connections. With br_netfilter, the destination of these replies is already
	// translated to 127.0.0.1 when they reach the filter.
	Mark uint32
	// Stays is for Ensure. If it is set, Remove later leaves the bridge's clsact, even if Ensure added it. Place
	// explains why.
	Stays bool
}

func (k Filter) link() tc.Device { return tc.Device{Name: k.Bridge, Index: k.Index} }

// State describes the parts of a Filter that exist in the kernel. Get returns it.
type State struct {
	// Exists is set if the filter exists with the requested mark.
	Exists bool
	// Routed is set if the caller turned route_localnet on for the filter. Then the caller must turn it off together
	// with the filter.
	Routed bool

	filters []tc.Filter // our filters, with any program
	place   tc.Qdisc
	others  int
}

// These are parts of the handles of our filters. The lowest bits of a handle record which objects must be removed, or
// turned off, together with the filter. So this record lasts as long as the filter.
const (
	// noteRouted records that route_localnet was turned on, and notePlace that clsact was added.
	noteRouted = 1 << 0
	notePlace  = 1 << 1
	noteMask   = noteRouted | notePlace
	// handleBase is a part of every handle, so that no handle is 0. For 0, the kernel would choose a handle.
	handleBase = tc.Handle | 1<<8
)

// Ensure adds the filter if it is missing or differs, and reports whether it changed anything. It stores routed with
// the filter: see State.Routed. have is the result of Get, which the caller must call immediately before.
//
// Ensure does not change other filters at the bridge's ingress. A filter that the kernel runs earlier may accept
// packets that this filter would drop. Ensure replaces our own filter in place, or adds the new one before it deletes
// the old one. If the kernel has no cls_bpf or no clsact, IsUnsupported reports true for the error.
func (c *Conn) Ensure(ctx context.Context, k Filter, have *State, routed bool) (changed bool, _ error) {
	if have.Exists && have.Routed == routed && len(have.filters) == 1 {
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

	// SetProgram replaces an existing filter with the same handle, so delete only filters with other handles.
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
			// Skip other programs' filters, and the entry for the classifier itself, which has no program.
			continue
		}
		have.filters = append(have.filters, f)
		have.Exists = have.Exists || f.Protocol == unix.ETH_P_ALL && f.Direct && bytes.Equal(f.Program, want)
		have.Routed = have.Routed || f.Handle&noteRouted != 0
	}

	return &have, nil
}

// HasPlace reports whether the bridge has a clsact or an ingress qdisc. Another program may have added it for its own
// filters.
func (have *State) HasPlace() bool { return have.place.Kind != "" }

// Place adds a clsact to a new bridge. Remove leaves this clsact there. If a program adds or removes the clsact of a
// link that is up, the kernel drops the host's packets to the link. On a busy machine this takes 5 to 20 ms. So call
// Place before the bridge has pods. If the kernel does not support clsact, or if HasPlace is true for the bridge, Place
// returns an error.
func (c *Conn) Place(ctx context.Context, k Filter) error {
	var b nl.Batch
	k.link().AddClsact(&b)
	return c.nl.Do(ctx, &b)
}

// Any reports whether the bridge has one of our filters, with any mark.
func (have *State) Any() bool { return len(have.filters) > 0 }

// madePlace reports whether Ensure added the clsact for the filter, and Remove must delete it.
func (have *State) madePlace() bool {
	return slices.ContainsFunc(have.filters, func(f tc.Filter) bool { return f.Handle&notePlace != 0 })
}

// Remove deletes the filter. It also deletes the clsact if Ensure added it for the filter, unless other filters use it
// or Stays was set for Ensure. A missing filter or clsact is no error. have is the result of Get, which the caller must
// call immediately before.
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
	} else {
		for _, f := range have.filters {
			k.link().DelProgram(&b, f.Handle)
		}
	}

	return nl.PassAbsent(c.nl.Do(ctx, &b))
}

// program returns the filter's classic BPF program, an array of struct sock_filter (include/uapi/linux/filter.h). Every
// kernel can run it, without the verifier of extended BPF. The program drops IPv4 packets from 127.0.0.0/8, and
// packets to it unless they have the bit in mark.
//
// The kernel passes packets of a VLAN to the VLAN's link, which has its own route_localnet, or drops them. But it
// removes all tags with VLAN ID 0, which contain only a priority. Before the filter runs, it removes only the first of
// these tags. So the program drops packets with two such tags, which no real host sends.
func program(mark uint32) []byte {
	const (
		// network is SKF_NET_OFF (include/uapi/linux/filter.h) as an unsigned number.
		network             = 1<<32 - 0x100000
		source, destination = network + 12, network + 16 // offsets of the IPv4 addresses
		innerTCI            = network                    // offset of a second VLAN tag

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
