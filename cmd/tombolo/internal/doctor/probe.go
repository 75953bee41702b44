package doctor

import (
	"cmp"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"net/netip"
	"os"
	"slices"
	"strings"
	"syscall"

	"github.com/google/nftables/expr"
	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/icmp"
	"github.com/tombolo-cni/tombolo/internal/nftnl"
	"github.com/tombolo-cni/tombolo/internal/nl"
	"github.com/tombolo-cni/tombolo/netns"
)

// hops is how far probes get: to the host's next hop.
const hops = 2

// traceEcho finds the rule that drops an echo request of the pod's.
func (e *examination) traceEcho(ctx context.Context, own, to netip.Addr) (found bool, _ error) {
	id := uint16(rand.Uint32())
	protocol, at := byte(unix.IPPROTO_ICMPV6), uint32(4)
	if own.Is4() {
		protocol = unix.IPPROTO_ICMP
	}
	match := probe(own.AsSlice(), to.AsSlice(), protocol, at, binary.BigEndian.AppendUint16(nil, id))
	t, err := trace(ctx, match, func() error {
		_ = ping(ctx, e.pod, to, icmp.Echo{From: own, Wait: wait / 10, ID: id, Hops: hops})
		return ctx.Err()
	})
	if err != nil {
		return false, err
	}
	return e.report(t, to.String())
}

// connection has the pod begin a connection by TCP, and finds the rule that drops its first packet.
func (e *examination) connection(ctx context.Context, own netip.Addr, to netip.AddrPort) error {
	const dynamic = 49152 // the first port that is not assigned (RFC 6335)
	from := netip.AddrPortFrom(own, dynamic+rand.N[uint16](1<<14))
	ports := binary.BigEndian.AppendUint16(binary.BigEndian.AppendUint16(nil, from.Port()), to.Port()) // TCP's header begins with them
	var unreachable error
	t, err := trace(ctx, probe(own.AsSlice(), to.Addr().AsSlice(), unix.IPPROTO_TCP, 0, ports), func() error {
		unreachable = e.pod.Do(func() error { return connect(ctx, from, to) })
		return ctx.Err()
	})
	if err != nil {
		return err
	}
	if found, err := e.report(t, to.String()); found || err != nil {
		return err
	}
	if !t.seen && unreachable != nil {
		return fmt.Errorf("connect to %s: %w", to, unreachable)
	}
	for _, o := range e.obstacles {
		if o.Legacy && strings.Contains(o.Chain, "ip6") == own.Is6() {
			e.add(StepFirewall, o.Remedy, "%s, which cannot be traced, may drop what the pod sends to %s", o.Chain, to)
			e.found[len(e.found)-1].Note = true
		}
	}
	return nil
}

// connect begins a connection, whose packets get no further than the host's next hop. No answer, or a refusal, is none
// of its errors.
func connect(ctx context.Context, from, to netip.AddrPort) error {
	dialer := net.Dialer{LocalAddr: net.TCPAddrFromAddrPort(from), Timeout: wait / 10, Control: func(_, _ string, raw syscall.RawConn) error {
		level, option := unix.IPPROTO_IPV6, unix.IPV6_UNICAST_HOPS
		if to.Addr().Is4() {
			level, option = unix.IPPROTO_IP, unix.IP_TTL
		}
		var optionErr error
		err := raw.Control(func(fd uintptr) { optionErr = unix.SetsockoptInt(int(fd), level, option, hops) })
		return errors.Join(err, optionErr)
	}}
	conn, err := dialer.DialContext(ctx, "tcp", to.String())
	if err == nil {
		return conn.Close()
	}
	if errors.Is(err, unix.ECONNREFUSED) || errors.Is(err, os.ErrDeadlineExceeded) {
		return nil
	}
	return err
}

// report says what dropped a probe, if anything did.
func (e *examination) report(t *traced, to string) (found bool, _ error) {
	if !t.dropped {
		return false, nil
	}
	r := &t.rule
	at := fmt.Sprintf("chain %s of table %s %s", r.chain, nftnl.FamilyName(r.family), r.table)
	if r.handle == 0 {
		e.add(StepFirewall, e.remedy(r, at), "%s drops, by its policy, what the pod sends to %s", at, to)
		return true, nil
	}
	number, err := r.number()
	e.add(StepFirewall, e.remedy(r, at), "%s drops or rejects, by its rule number %d with handle %d, what the pod sends to %s", at, number, r.handle, to)
	return true, err
}

// remedy is the command that helps against a rule of a chain, or its policy. Rules that a program makes anew are that
// program's to delete.
func (e *examination) remedy(r *rule, at string) string {
	link := cmp.Or(e.at.HostVLAN, e.at.Bridge)
	const firewalld = "filter_FWD_"
	switch {
	case r.table == "firewalld" && strings.HasPrefix(r.chain, firewalld+"policy_"):
		return "see firewall-cmd --list-all-policies: the policy has to accept what comes from the zone of " + link
	case r.table == "firewalld" && strings.HasPrefix(r.chain, firewalld+"trusted"):
		return "see firewall-cmd --info-zone=trusted, whose target is not ACCEPT"
	case r.table == "firewalld" && slices.Contains(e.opt.Trusted, link):
		zone := strings.TrimPrefix(r.chain, firewalld)
		return "see firewall-cmd --info-zone=" + zone + ": it comes before trusted, where " + link + " is, since it has the pod's address as a source"
	case strings.HasPrefix(r.chain, "ufw-user-") || strings.HasPrefix(r.chain, "ufw6-user-"):
		return "see ufw status numbered, and ufw delete NUMBER; another command's deletion ends with ufw's next reload"
	}
	for _, o := range e.obstacles {
		if o.Firewalld && r.table == "firewalld" || r.handle == 0 && o.Chain == at {
			return o.Remedy
		}
	}
	if r.handle == 0 {
		return "tombolo repair"
	}
	return fmt.Sprintf("nft delete rule %s %s %s handle %d", nftnl.FamilyName(r.family), r.table, r.chain, r.handle)
}

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
	t.AddRule("make a rule of", at, unix.NFPROTO_INET, netlink.Append, "", nftnl.Collect(func(x *nftnl.Expressions) {
		match(x)
		x.Add(&expr.Immediate{Register: uint32(nftnl.First), Data: []byte{1}})
		x.Add(&expr.Meta{Key: expr.MetaKeyNFTRACE, SourceRegister: true, Register: uint32(nftnl.First)})
	}), nftnl.String(unix.NFTA_RULE_TABLE, table), nftnl.String(unix.NFTA_RULE_CHAIN, name))
	return t
}

// read reads an NFT_MSG_TRACE, whose attributes are NFTA_TRACE_*. Messages after a drop are about another packet.
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

// number is where a rule stands in its chain, from 1 on.
func (r *rule) number() (int, error) {
	conn, err := nl.Dial(unix.NETLINK_NETFILTER, nil)
	if err != nil {
		return 0, err
	}
	defer conn.Close()
	var handles []uint64
	err = nftnl.List(conn, "list rules of chain "+r.chain, r.family, unix.NFT_MSG_GETRULE, func(data []byte) error {
		return nftnl.Decode(data, func(ad *netlink.AttributeDecoder) error {
			if ad.Type() == unix.NFTA_RULE_HANDLE {
				handles = append(handles, ad.Uint64())
			}
			return nil
		})
	}, nftnl.String(unix.NFTA_RULE_TABLE, r.table), nftnl.String(unix.NFTA_RULE_CHAIN, r.chain))
	return slices.Index(handles, r.handle) + 1, err
}
