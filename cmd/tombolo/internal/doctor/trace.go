package doctor

import (
	"context"
	"errors"
	"fmt"
	"os"

	"github.com/google/nftables/expr"
	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/nftnl"
	"github.com/tombolo-cni/tombolo/internal/nl"
	"github.com/tombolo-cni/tombolo/netns"
)

// traced is what the kernel tells of a packet that is traced.
type traced struct {
	seen    bool // it came to nf_tables
	dropped bool // and ended there, by what follows
	rule    rule
}

// rule is a rule of a chain, or its policy.
type rule struct {
	family       uint8
	table, chain string
	handle       uint64 // 0: the policy
}

// trace has nf_tables tell what becomes of a packet that send sends, and that the rule matches alone. The
// rule's table belongs to the socket, so that it goes with the process at the latest.
func trace(ctx context.Context, match func(*nftnl.Expressions), send func() error) (*traced, error) {
	const group = 9 // NFNLGRP_NFTRACE
	watch, err := nl.Subscribe(unix.NETLINK_NETFILTER, nil, group)
	if err != nil {
		return nil, err
	}
	defer watch.Close()
	owner, err := nl.Dial(unix.NETLINK_NETFILTER, nil)
	if err != nil {
		return nil, err
	}
	defer owner.Close()
	if err := asDoctor(func() error { return traceRule(match).Commit(owner) }); err != nil {
		return nil, err
	}
	if err := send(); err != nil {
		return nil, err
	}
	heard, stop := context.WithTimeout(ctx, wait)
	defer stop()
	found := &traced{}
	for !found.dropped {
		list, err := watch.Next(heard)
		if errors.Is(err, context.DeadlineExceeded) {
			return found, ctx.Err()
		}
		if err != nil {
			return nil, err
		}
		for _, m := range list {
			if err := found.read(m); err != nil {
				return nil, err
			}
		}
	}
	return found, nil
}

// asDoctor has the kernel name the thread in what it tells of a change.
func asDoctor(do func() error) error {
	const comm = "/proc/thread-self/comm"
	host, err := netns.Current()
	if err != nil {
		return err
	}
	defer host.Close()
	return host.Do(func() error { // all of it on one thread
		was, err := os.ReadFile(comm)
		if err != nil {
			return err
		}
		if err := os.WriteFile(comm, []byte(nftnl.DoctorName), 0); err != nil {
			return err
		}
		return errors.Join(do(), os.WriteFile(comm, was, 0))
	})
}

// traceRule makes the table, with a chain that sees packets before all others do.
func traceRule(match func(*nftnl.Expressions)) *nftnl.Transaction {
	const (
		owned = 2 // NFT_TABLE_F_OWNER, Linux 5.12
		first = -450
		name  = "prerouting"
	)
	table := fmt.Sprintf("%s-%d", nftnl.DoctorName, os.Getpid())
	t, at := nftnl.Begin(nil), nl.Name("table inet "+table)
	t.Add("make", at, unix.NFPROTO_INET, unix.NFT_MSG_NEWTABLE, netlink.Create,
		nftnl.String(unix.NFTA_TABLE_NAME, table), nftnl.Uint32(unix.NFTA_TABLE_FLAGS, owned))
	priority := int32(first)
	t.Add("make a chain of", at, unix.NFPROTO_INET, unix.NFT_MSG_NEWCHAIN, netlink.Create,
		nftnl.String(unix.NFTA_CHAIN_TABLE, table), nftnl.String(unix.NFTA_CHAIN_NAME, name),
		nftnl.Nest(unix.NFTA_CHAIN_HOOK, nftnl.Uint32(unix.NFTA_HOOK_HOOKNUM, unix.NF_INET_PRE_ROUTING), nftnl.Uint32(unix.NFTA_HOOK_PRIORITY, uint32(priority))),
		nftnl.String(unix.NFTA_CHAIN_TYPE, "filter"))
	t.AddRule("make a rule of", at, unix.NFPROTO_INET, netlink.Append, "", func(x *nftnl.Expressions) {
		match(x)
		x.Add(&expr.Immediate{Register: uint32(nftnl.First), Data: []byte{1}})
		x.Add(&expr.Meta{Key: expr.MetaKeyNFTRACE, SourceRegister: true, Register: uint32(nftnl.First)})
	}, nftnl.String(unix.NFTA_RULE_TABLE, table), nftnl.String(unix.NFTA_RULE_CHAIN, name))
	return t
}

// read reads an NFT_MSG_TRACE, whose attributes are NFTA_TRACE_*. What follows a drop is of another packet.
func (t *traced) read(m netlink.Message) error {
	const header = 4 // struct nfgenmsg
	if m.Header.Type != nftnl.Type(unix.NFT_MSG_TRACE) || len(m.Data) < header || t.dropped {
		return nil
	}
	t.seen = true
	r := rule{family: m.Data[0]}
	return nftnl.Decode(m.Data[header:], func(ad *netlink.AttributeDecoder) error {
		switch ad.Type() {
		case unix.NFTA_TRACE_TABLE:
			r.table = ad.String()
		case unix.NFTA_TRACE_CHAIN:
			r.chain = ad.String()
		case unix.NFTA_TRACE_RULE_HANDLE:
			r.handle = ad.Uint64()
		case unix.NFTA_TRACE_VERDICT:
			return nftnl.Nested(ad, func(ad *netlink.AttributeDecoder) error {
				if ad.Type() == unix.NFTA_VERDICT_CODE {
					t.dropped = int32(ad.Uint32())&0xff == int32(expr.VerdictDrop)
				}
				return nil
			})
		case unix.NFTA_TRACE_POLICY:
			t.dropped = t.dropped || int32(ad.Uint32()) == int32(expr.VerdictDrop)
		}
		t.rule = r
		return nil
	})
}

// probe matches packets of a protocol by addresses, and by bytes at an offset behind the IP header.
func probe(from, to []byte, protocol byte, offset uint32, is []byte) func(*nftnl.Expressions) {
	family, source := byte(unix.NFPROTO_IPV6), uint32(8)
	if len(from) == 4 {
		family, source = unix.NFPROTO_IPV4, 12
	}
	return func(x *nftnl.Expressions) {
		x.Meta(expr.MetaKeyNFPROTO, nftnl.First)
		x.Compare(expr.CmpOpEq, []byte{family})
		x.Payload(expr.PayloadBaseNetworkHeader, source, uint32(len(from)), nftnl.First)
		x.Compare(expr.CmpOpEq, from)
		x.Payload(expr.PayloadBaseNetworkHeader, source+uint32(len(from)), uint32(len(to)), nftnl.First)
		x.Compare(expr.CmpOpEq, to)
		x.Meta(expr.MetaKeyL4PROTO, nftnl.First)
		x.Compare(expr.CmpOpEq, []byte{protocol})
		x.Payload(expr.PayloadBaseTransportHeader, offset, uint32(len(is)), nftnl.First)
		x.Compare(expr.CmpOpEq, is)
	}
}

// position finds where a rule stands in its chain, from 1 on, and the chain's priority if it is a base chain.
func (r *rule) position() (number int, priority int32, _ error) {
	conn, err := nl.Dial(unix.NETLINK_NETFILTER, nil)
	if err != nil {
		return 0, 0, err
	}
	defer conn.Close()
	attrs := []netlink.Attribute{nftnl.String(unix.NFTA_RULE_TABLE, r.table), nftnl.String(unix.NFTA_RULE_CHAIN, r.chain)}
	n := 0
	err = nftnl.List(conn, "list rules of chain "+r.chain, r.family, unix.NFT_MSG_GETRULE, func(data []byte) error {
		n++
		return nftnl.Decode(data, func(ad *netlink.AttributeDecoder) error {
			if ad.Type() == unix.NFTA_RULE_HANDLE && ad.Uint64() == r.handle {
				number = n
			}
			return nil
		})
	}, attrs...)
	if err != nil || r.handle != 0 {
		return number, 0, err
	}
	var b nl.Batch
	nftnl.Get(&b, nl.Name("chain "+r.chain), r.family, unix.NFT_MSG_GETCHAIN, func(data []byte) error {
		ch, err := nftnl.DecodeChain(data)
		priority = ch.Priority
		return err
	}, nftnl.String(unix.NFTA_CHAIN_TABLE, r.table), nftnl.String(unix.NFTA_CHAIN_NAME, r.chain))
	return 0, priority, nftnl.Look(conn, &b)
}
