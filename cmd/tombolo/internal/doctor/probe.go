package doctor

import (
	"cmp"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"net/netip"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/google/nftables/expr"
	"github.com/mdlayher/netlink"
	"golang.org/x/net/bpf"
	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/nftnl"
	"github.com/tombolo-cni/tombolo/internal/nl"
	"github.com/tombolo-cni/tombolo/netns"
)

// probe describes a packet that a pod sends, and its answer, by what no address translation changes.
type probe struct {
	request, answer message
	isQuestion      bool // for the MAC of a neighbour
}

// message describes packets by their EtherType, and by bytes at offsets from the network header. IPv4 headers have no
// options.
type message struct {
	ethertype uint16
	fields    []field
}

type field struct {
	offset int
	bytes  []byte
}

// messageOf describes packets of IP of a protocol, by fields of the protocol's own header.
func messageOf(is4 bool, protocol byte, fields ...field) message {
	m := message{ethertype: unix.ETH_P_IPV6, fields: []field{{6, []byte{protocol}}}}
	header := 40
	if is4 {
		m, header = message{ethertype: unix.ETH_P_IP, fields: []field{{9, []byte{protocol}}}}, 20
	}
	for _, f := range fields {
		m.fields = append(m.fields, field{header + f.offset, f.bytes})
	}
	return m
}

// echoProbe is an echo request with an identifier (RFC 792, RFC 4443).
func echoProbe(is4 bool, id uint16) probe {
	protocol, request, reply := byte(unix.IPPROTO_ICMPV6), byte(128), byte(129)
	if is4 {
		protocol, request, reply = unix.IPPROTO_ICMP, 8, 0
	}
	identified := field{4, binary.BigEndian.AppendUint16(nil, id)}
	return probe{messageOf(is4, protocol, field{0, []byte{request}}, identified), messageOf(is4, protocol, field{0, []byte{reply}}, identified), false}
}

// flowProbe is a packet of TCP or UDP from a port of the pod's.
func flowProbe(is4 bool, protocol byte, from uint16) probe {
	port := binary.BigEndian.AppendUint16(nil, from)
	return probe{messageOf(is4, protocol, field{0, port}), messageOf(is4, protocol, field{2, port}), false}
}

// neighbourProbe is the question for the MAC of an address (RFC 826, RFC 4861).
func neighbourProbe(a netip.Addr) probe {
	if !a.Is4() {
		return probe{messageOf(false, unix.IPPROTO_ICMPV6, field{0, []byte{135}}, field{8, a.AsSlice()}), messageOf(false, unix.IPPROTO_ICMPV6, field{0, []byte{136}}, field{8, a.AsSlice()}), true}
	}
	return probe{
		message{unix.ETH_P_ARP, []field{{6, []byte{0, 1}}, {24, a.AsSlice()}}},
		message{unix.ETH_P_ARP, []field{{6, []byte{0, 2}}, {14, a.AsSlice()}}},
		true,
	}
}

func (m *message) is(ethertype uint16, packet []byte) bool {
	return ethertype == m.ethertype && !slices.ContainsFunc(m.fields, func(f field) bool {
		return len(packet) < f.offset+len(f.bytes) || string(packet[f.offset:f.offset+len(f.bytes)]) != string(f.bytes)
	})
}

// filter returns the socket filter that takes the request and the answer.
func (p *probe) filter() ([]bpf.RawInstruction, error) {
	var program []bpf.Instruction
	for _, m := range []message{p.request, p.answer} {
		list := []bpf.Instruction{bpf.LoadExtension{Num: bpf.ExtProto}, bpf.JumpIf{Val: uint32(m.ethertype)}}
		for _, f := range m.fields {
			for i, b := range f.bytes {
				list = append(list, bpf.LoadAbsolute{Off: uint32(f.offset + i), Size: 1}, bpf.JumpIf{Val: uint32(b)})
			}
		}
		for i := 1; i < len(list); i += 2 {
			jump := list[i].(bpf.JumpIf)
			jump.SkipFalse = uint8(len(list) - i) // to behind the RetConstant
			list[i] = jump
		}
		program = append(append(program, list...), bpf.RetConstant{Val: math.MaxUint16})
	}
	return bpf.Assemble(append(program, bpf.RetConstant{}))
}

// sighting is a probe, or its answer, on one link.
type sighting struct {
	link        int
	out, answer bool
	src         netip.Addr // the zero value for ARP
}

// tap hears a probe on the links of a network namespace. link 0 is all of them.
func tap(ns *netns.NS, link int, p *probe) (fd int, _ error) {
	program, err := p.filter()
	if err != nil {
		return -1, err
	}
	protocol := uint16(unix.ETH_P_ALL)<<8 | uint16(unix.ETH_P_ALL)>>8 // in network byte order
	err = ns.Do(func() error {
		if fd, err = unix.Socket(unix.AF_PACKET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, int(protocol)); err != nil {
			return fmt.Errorf("open packet socket: %w", err)
		}
		return errors.Join(nl.AttachFilter(fd, program), unix.Bind(fd, &unix.SockaddrLinklayer{Protocol: protocol, Ifindex: link}))
	})
	return fd, err
}

// heard reads all that a tap has heard.
func heard(fd int, p *probe) (list []sighting) {
	buf := make([]byte, 128)
	for {
		n, from, err := unix.Recvfrom(fd, buf, unix.MSG_DONTWAIT)
		at, ok := from.(*unix.SockaddrLinklayer)
		if err != nil || !ok {
			return list
		}
		ethertype, packet := at.Protocol<<8|at.Protocol>>8, buf[:n]
		s := sighting{link: at.Ifindex, out: at.Pkttype == unix.PACKET_OUTGOING, answer: p.answer.is(ethertype, packet)}
		switch {
		case !s.answer && !p.request.is(ethertype, packet): // from before the filter was there
			continue
		case ethertype == unix.ETH_P_IP:
			s.src, _ = netip.AddrFromSlice(packet[12:16])
		case ethertype == unix.ETH_P_IPV6:
			s.src, _ = netip.AddrFromSlice(packet[8:24])
		}
		list = append(list, s)
	}
}

// trail is how far a probe and its answer came.
type trail struct {
	probe
	pod, host []sighting
	passed    map[bool]map[string]bool // the chains of ours, by whether it is the answer
	dropped   map[bool]*rule           // the rules that dropped it
}

// follow has send send the probe, and records where it and its answer were seen.
func (e *examination) follow(ctx context.Context, p probe, send func()) (*trail, error) {
	t := &trail{probe: p, passed: map[bool]map[string]bool{false: {}, true: {}}, dropped: map[bool]*rule{}}
	inPod, err := tap(e.pod, e.index, &p)
	if err != nil {
		return nil, err
	}
	defer unix.Close(inPod)
	onHost, err := tap(e.host, 0, &p)
	if err != nil {
		return nil, err
	}
	defer unix.Close(onHost)
	err = t.trace(ctx, send)
	t.pod, t.host = heard(inPod, &p), heard(onHost, &p)
	return t, err
}

// rule is a rule of a chain, or its policy.
type rule struct {
	family       uint8
	table, chain string
	handle       uint64 // 0: the policy
}

// trace has nf_tables tell what becomes of the probe that send sends, and of its answer. The tables belong to the
// socket, so that they go with the process at the latest.
func (t *trail) trace(ctx context.Context, send func()) error {
	const group = 9 // NFNLGRP_NFTRACE
	watch, err := nl.Subscribe(unix.NETLINK_NETFILTER, nil, group)
	if err != nil {
		return err
	}
	defer watch.Close()
	owner, err := nl.Dial(unix.NETLINK_NETFILTER, nil)
	if err != nil {
		return err
	}
	defer owner.Close()
	if err := asDoctor(func() error { return t.tables().Commit(owner) }); err != nil {
		return err
	}

	sending, stop := context.WithCancel(ctx)
	go func() {
		defer stop()
		send()
		time.Sleep(wait / 10) // the kernel has told all by then
	}()
	answers := map[uint32]bool{}
	for {
		list, err := watch.Next(sending)
		if sending.Err() != nil {
			return ctx.Err()
		}
		if err != nil && !errors.Is(err, unix.ENOBUFS) { // some of many messages may be missing
			return err
		}
		for _, m := range list {
			if err := t.read(m, answers); err != nil {
				return err
			}
		}
	}
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

func tableName() string { return fmt.Sprintf("%s-%d", nftnl.DoctorName, os.Getpid()) }

// The chains of doctor's table, by which the trace tells how far a packet came: through all of a hook, or to it.
const (
	beganPrerouting   = "begin"
	passedPrerouting  = "prerouting"
	beganForward      = "forward-begin"
	passedForward     = "forward"
	passedPostrouting = "postrouting"
	beganInput        = "input-begin"
	passedInput       = "input"
)

// tables makes a table that sees packets before all others do, for IP and for bridges, and in that for IP chains at the
// ends of the hooks.
func (t *trail) tables() *nftnl.Transaction {
	const (
		owned = 2 // NFT_TABLE_F_OWNER, Linux 5.12
		first = -450
	)
	transaction := nftnl.Begin(nil)
	add := func(family uint8, chain string, hook uint32, priority int32, messages ...message) {
		at := nl.Name("chain " + chain + " of doctor's table")
		transaction.Add("make", at, family, unix.NFT_MSG_NEWTABLE, netlink.Create,
			nftnl.String(unix.NFTA_TABLE_NAME, tableName()), nftnl.Uint32(unix.NFTA_TABLE_FLAGS, owned))
		transaction.Add("make", at, family, unix.NFT_MSG_NEWCHAIN, netlink.Create,
			nftnl.String(unix.NFTA_CHAIN_TABLE, tableName()), nftnl.String(unix.NFTA_CHAIN_NAME, chain),
			nftnl.Nest(unix.NFTA_CHAIN_HOOK, nftnl.Uint32(unix.NFTA_HOOK_HOOKNUM, hook), nftnl.Uint32(unix.NFTA_HOOK_PRIORITY, uint32(priority))),
			nftnl.String(unix.NFTA_CHAIN_TYPE, "filter"))
		for _, m := range messages {
			transaction.AddRule("make a rule of", at, family, netlink.Append, "", nftnl.Collect(m.traceIt),
				nftnl.String(unix.NFTA_RULE_TABLE, tableName()), nftnl.String(unix.NFTA_RULE_CHAIN, chain))
		}
	}
	add(unix.NFPROTO_BRIDGE, "bridge", unix.NF_INET_PRE_ROUTING, math.MinInt32, t.request, t.answer)
	add(unix.NFPROTO_INET, beganPrerouting, unix.NF_INET_PRE_ROUTING, first, t.request, t.answer)
	add(unix.NFPROTO_INET, "output", unix.NF_INET_LOCAL_OUT, first, t.answer)
	add(unix.NFPROTO_INET, passedPrerouting, unix.NF_INET_PRE_ROUTING, math.MaxInt32)
	add(unix.NFPROTO_INET, beganForward, unix.NF_INET_FORWARD, math.MinInt32)
	add(unix.NFPROTO_INET, passedForward, unix.NF_INET_FORWARD, math.MaxInt32)
	add(unix.NFPROTO_INET, passedPostrouting, unix.NF_INET_POST_ROUTING, math.MaxInt32)
	add(unix.NFPROTO_INET, beganInput, unix.NF_INET_LOCAL_IN, math.MinInt32)
	add(unix.NFPROTO_INET, passedInput, unix.NF_INET_LOCAL_IN, math.MaxInt32)
	return transaction
}

// traceIt matches the message, and has the kernel trace it.
func (m message) traceIt(x *nftnl.Expressions) {
	x.Meta(expr.MetaKeyPROTOCOL, nftnl.First)
	x.Compare(expr.CmpOpEq, binary.BigEndian.AppendUint16(nil, m.ethertype))
	for _, f := range m.fields {
		x.Payload(expr.PayloadBaseNetworkHeader, uint32(f.offset), uint32(len(f.bytes)), nftnl.First)
		x.Compare(expr.CmpOpEq, f.bytes)
	}
	x.Add(&expr.Immediate{Register: uint32(nftnl.First), Data: []byte{1}})
	x.Add(&expr.Meta{Key: expr.MetaKeyNFTRACE, SourceRegister: true, Register: uint32(nftnl.First)})
}

// read reads an NFT_MSG_TRACE, whose attributes are NFTA_TRACE_*. The first one about a packet has its headers.
func (t *trail) read(m netlink.Message, answers map[uint32]bool) error {
	const header = 4 // struct nfgenmsg
	if m.Header.Type != nftnl.Type(unix.NFT_MSG_TRACE) || len(m.Data) < header {
		return nil
	}
	attrs := m.Data[header:]
	text := func(typ uint16) string { return nftnl.Text(nftnl.Find(attrs, typ)) }
	number := func(path ...uint16) uint32 { return nftnl.Number(nftnl.Find(attrs, path...)) }
	r := rule{
		family: m.Data[0], table: text(unix.NFTA_TRACE_TABLE), chain: text(unix.NFTA_TRACE_CHAIN),
		handle: nftnl.Number64(nftnl.Find(attrs, unix.NFTA_TRACE_RULE_HANDLE)),
	}
	id := number(unix.NFTA_TRACE_ID)
	packet := slices.Concat(
		nftnl.Find(attrs, unix.NFTA_TRACE_NETWORK_HEADER), nftnl.Find(attrs, unix.NFTA_TRACE_TRANSPORT_HEADER))
	isDrop := func(path ...uint16) bool {
		return nftnl.Find(attrs, path...) != nil && int32(number(path...))&0xff == int32(expr.VerdictDrop)
	}
	drops := isDrop(unix.NFTA_TRACE_VERDICT, unix.NFTA_VERDICT_CODE) || isDrop(unix.NFTA_TRACE_POLICY)
	if packet != nil {
		answers[id] = t.answer.is(t.answer.ethertype, packet)
	}
	answer := answers[id]
	switch {
	case r.table == tableName():
		t.passed[answer][r.chain] = true
	case drops && t.dropped[answer] == nil:
		t.dropped[answer] = &r
	}
	return nil
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
		handles = append(handles, nftnl.Number64(nftnl.Find(data, unix.NFTA_RULE_HANDLE)))
		return nil
	}, nftnl.String(unix.NFTA_RULE_TABLE, r.table), nftnl.String(unix.NFTA_RULE_CHAIN, r.chain))
	return slices.Index(handles, r.handle) + 1, err
}

func (r *rule) at() string {
	return fmt.Sprintf("chain %s of table %s %s", r.chain, nftnl.FamilyName(r.family), r.table)
}

// remedy returns the command that helps against a rule of a chain, or its policy, that drops a probe or its answer.
// Rules that a program makes anew are that program's to delete.
func (e *examination) remedy(r *rule, at string, answer bool) string {
	link := cmp.Or(e.at.HostVLAN, e.at.Bridge)
	const firewalld = "filter_FWD_"
	switch {
	case r.table == nftnl.DefaultTable:
		return "it is Tombolo's own rule: see guard, lanGuard and ingressPolicy of the network, and whether the pod has changed its MAC or address"
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
		side := map[bool]string{false: "iifname ", true: "oifname "}[answer]
		if r.family == unix.NFPROTO_BRIDGE {
			link = e.port.Name
		}
		return fmt.Sprintf("nft add rule %s %s %s %s%s accept", nftnl.FamilyName(r.family), r.table, r.chain, side, link)
	}
	return fmt.Sprintf("nft delete rule %s %s %s handle %d", nftnl.FamilyName(r.family), r.table, r.chain, r.handle)
}
