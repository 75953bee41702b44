package doctor

import (
	"cmp"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"math/bits"
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
	"github.com/tombolo-cni/tombolo/ipam"
	"github.com/tombolo-cni/tombolo/netns"
)

// probe describes a request from a pod and its answer, by fields that address translation seldom changes.
type probe struct {
	request, answer message
	isQuestion      bool // the request asks for the MAC of a neighbour
}

// message describes packets by their EtherType, and by bytes at offsets from the network header. It assumes IPv4
// headers without options.
type message struct {
	ethertype uint16
	fields    []field
}

type field struct {
	offset int
	bytes  []byte
}

// ipMessage describes packets of a protocol over IP. The offsets of fields begin at the protocol's own header.
func ipMessage(is4 bool, protocol byte, fields ...field) message {
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

// echoProbe describes an echo request with an identifier, and its reply (RFC 792, RFC 4443).
func echoProbe(is4 bool, id uint16) probe {
	protocol, request, reply := byte(unix.IPPROTO_ICMPV6), byte(128), byte(129)
	if is4 {
		protocol, request, reply = unix.IPPROTO_ICMP, 8, 0
	}
	newMessage := func(kind byte) message {
		return ipMessage(is4, protocol, field{0, []byte{kind}}, field{4, binary.BigEndian.AppendUint16(nil, id)})
	}
	return probe{request: newMessage(request), answer: newMessage(reply)}
}

// flowProbe describes TCP or UDP packets from a port of the pod, and their answers.
func flowProbe(is4 bool, protocol byte, from uint16) probe {
	port := binary.BigEndian.AppendUint16(nil, from)
	return probe{request: ipMessage(is4, protocol, field{0, port}), answer: ipMessage(is4, protocol, field{2, port})}
}

// neighbourProbe describes the request for the MAC of an address, and its answer (RFC 826, RFC 4861).
func neighbourProbe(a netip.Addr) probe {
	if a.Is4() {
		return probe{
			message{unix.ETH_P_ARP, []field{{6, []byte{0, 1}}, {24, a.AsSlice()}}},
			message{unix.ETH_P_ARP, []field{{6, []byte{0, 2}}, {14, a.AsSlice()}}}, true,
		}
	}
	newMessage := func(kind byte) message {
		return ipMessage(false, unix.IPPROTO_ICMPV6, field{0, []byte{kind}}, field{8, a.AsSlice()})
	}
	return probe{newMessage(135), newMessage(136), true}
}

// is reports whether a packet matches the message. packet begins with the network header.
func (m *message) is(ethertype uint16, packet []byte) bool {
	return ethertype == m.ethertype && !slices.ContainsFunc(m.fields, func(f field) bool {
		return len(packet) < f.offset+len(f.bytes) || string(packet[f.offset:f.offset+len(f.bytes)]) != string(f.bytes)
	})
}

// filter returns a socket filter that accepts the request and the answer.
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
			jump.SkipFalse = uint8(len(list) - i) // jump to the instruction after RetConstant
			list[i] = jump
		}
		program = append(append(program, list...), bpf.RetConstant{Val: math.MaxUint16})
	}

	return bpf.Assemble(append(program, bpf.RetConstant{}))
}

// sighting is one observation of a packet: the index of the link, and the packet's source address if it is an IP
// packet.
type sighting struct {
	link int
	src  netip.Addr
}

// trail records how far a probe and its answer came.
type trail struct {
	probe
	left, arrived  bool      // the request left the pod's interface, and came to the bridge
	sent, came     *sighting // the request left by a link outside the bridge, and the answer came by one
	returned, back bool      // the answer left the host towards the pod, and came to the pod's interface
	to, from       passage   // how far request and answer came through the host's rules
}

// passage records how far a packet came through the rules of the host.
type passage struct {
	chain string // the last of doctor's chains that saw the packet
	drop  *rule  // the rule that dropped the packet
	queue *rule  // the rule that queued the packet, if the packet has not come back
}

// follow calls send, which sends the probe. It returns a trail of the places that the probe and its answer passed.
// These are links of the host, including the pod's port, and chains of nf_tables.
func (e *examination) follow(ctx context.Context, p probe, send func()) (*trail, error) {
	program, err := p.filter()
	if err != nil {
		return nil, err
	}

	fd, err := unix.Socket(unix.AF_PACKET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		return nil, fmt.Errorf("open packet socket: %w", err)
	}
	defer unix.Close(fd)
	all := &unix.SockaddrLinklayer{Protocol: bits.ReverseBytes16(unix.ETH_P_ALL)}
	if err := cmp.Or(nl.AttachFilter(fd, program), unix.Bind(fd, all)); err != nil {
		return nil, err
	}

	t := &trail{probe: p}
	if err := t.trace(ctx, e.host, send); err != nil {
		return nil, err
	}

	packet := make([]byte, 128)
	for {
		n, from, err := unix.Recvfrom(fd, packet, unix.MSG_DONTWAIT)
		at, ok := from.(*unix.SockaddrLinklayer)
		if err != nil || !ok {
			return t, nil
		}

		ethertype := bits.ReverseBytes16(at.Protocol)
		s := &sighting{link: at.Ifindex}
		switch ethertype {
		case unix.ETH_P_IP:
			s.src, _ = netip.AddrFromSlice(packet[12:16])
		case unix.ETH_P_IPV6:
			s.src, _ = netip.AddrFromSlice(packet[8:24])
		}
		e.see(t, s, at.Pkttype == unix.PACKET_OUTGOING, t.answer.is(ethertype, packet[:n]))
	}
}

// see adds one sighting of the request or the answer to a trail. out is set if the packet was leaving the host by the
// link.
func (e *examination) see(t *trail, s *sighting, out, isAnswer bool) {
	atPort := s.link == e.port.Index
	atBridge := s.link == e.link.Index || s.link == e.bridge.Index || slices.Contains(e.between, s.link)
	elsewhere := !atPort && !atBridge
	switch {
	case out && isAnswer:
		t.returned, t.back = t.returned || !elsewhere, t.back || atPort
	case isAnswer && elsewhere:
		t.came = cmp.Or(t.came, s)
	case out && elsewhere:
		t.sent = cmp.Or(t.sent, s)
	case !out && !isAnswer:
		t.left, t.arrived = t.left || atPort, t.arrived || atBridge
	}
}

// rule identifies a rule of a chain, or the chain's policy.
type rule struct {
	family       uint8
	table, chain string
	handle       uint64 // 0 means the policy
	queue        uint16 // if the rule queues packets: the number of the queue
}

// String returns the names of the rule's chain and table.
func (r *rule) String() string {
	return fmt.Sprintf("chain %s of table %s %s", r.chain, nftnl.FamilyName(r.family), r.table)
}

// trace makes the kernel trace the probe and its answer in nf_tables, calls send, and records how far the probe and its
// answer came. The doctor's tables belong to a socket, so the kernel deletes them when trace or the process ends.
func (t *trail) trace(ctx context.Context, host *netns.NS, send func()) error {
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
	if err := asDoctor(host, func() error { return t.tables().Commit(owner) }); err != nil {
		return err
	}

	sending, stop := context.WithCancel(ctx)
	go func() {
		defer stop()
		send()
		time.Sleep(wait / 10) // the kernel has sent all messages by then
	}()
	answers := map[uint32]bool{}
	for {
		list, err := watch.Next(sending)
		if sending.Err() != nil {
			return ctx.Err()
		}

		if err != nil && !errors.Is(err, unix.ENOBUFS) { // ENOBUFS means that only some messages are missing
			return err
		}
		for _, m := range list {
			if err := t.read(m, answers); err != nil {
				return err
			}
		}
	}
}

// asDoctor calls do in the namespace host, on a thread that has the name DoctorName during the call. The kernel puts
// this name into its notifications of changes, so tombolod can ignore these changes.
func asDoctor(host *netns.NS, do func() error) error {
	const comm = "/proc/thread-self/comm"
	return host.Do(func() error { // run all steps on one thread
		before, err := os.ReadFile(comm)
		if err != nil {
			return err
		}
		if err := os.WriteFile(comm, []byte(nftnl.DoctorName), 0); err != nil {
			return err
		}
		return errors.Join(do(), os.WriteFile(comm, before, 0))
	})
}

func tableName() string { return fmt.Sprintf("%s-%d", nftnl.DoctorName, os.Getpid()) }

// end is the suffix of the names of the doctor's last chain in each hook.
const end = "-end"

// tables returns a transaction that creates the doctor's tables. The table for bridges has one chain. The table for IP
// has a first and a last chain in each hook. The first chain of a hook, and the one for bridges, make the kernel trace
// the probe and its answer. The last one shows that a packet came through the hook.
func (t *trail) tables() *nftnl.Transaction {
	const (
		owned = 2    // NFT_TABLE_F_OWNER, Linux 5.12
		first = -450 // after br_netfilter, which keeps bridged packets from passing the hook twice
	)
	transaction := nftnl.Begin(nil)
	add := func(family uint8, chain string, hook int, priority int32, messages ...message) {
		at := nl.Name("chain " + chain + " of doctor's table")
		transaction.Add("make", at, family, unix.NFT_MSG_NEWTABLE, netlink.Create,
			nftnl.String(unix.NFTA_TABLE_NAME, tableName()), nftnl.Uint32(unix.NFTA_TABLE_FLAGS, owned))
		transaction.Add("make", at, family, unix.NFT_MSG_NEWCHAIN, netlink.Create,
			nftnl.String(unix.NFTA_CHAIN_TABLE, tableName()), nftnl.String(unix.NFTA_CHAIN_NAME, chain),
			nftnl.Nest(unix.NFTA_CHAIN_HOOK, nftnl.Uint32(unix.NFTA_HOOK_HOOKNUM, uint32(hook)),
				nftnl.Uint32(unix.NFTA_HOOK_PRIORITY, uint32(priority))),
			nftnl.String(unix.NFTA_CHAIN_TYPE, "filter"))
		for _, m := range messages {
			transaction.AddRule("make a rule of", at, family, netlink.Append, "", nftnl.Collect(m.traceIt),
				nftnl.String(unix.NFTA_RULE_TABLE, tableName()), nftnl.String(unix.NFTA_RULE_CHAIN, chain))
		}
	}

	add(unix.NFPROTO_BRIDGE, "bridge", unix.NF_INET_PRE_ROUTING, math.MinInt32, t.request, t.answer)
	for hook, name := range []string{"prerouting", "input", "forward", "output", "postrouting"} { // NF_INET_*
		add(unix.NFPROTO_INET, name, hook, first, t.request, t.answer)
		add(unix.NFPROTO_INET, name+end, hook, math.MaxInt32)
	}

	return transaction
}

// traceIt adds expressions that match the message, and make the kernel trace it.
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

// read parses an NFT_MSG_TRACE with its attributes NFTA_TRACE_*, and updates t.to or t.from. Only the first message
// about a packet has the packet's headers. The map answers remembers for each trace ID whether the packet is an
// answer.
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
	const queues = 3 // NF_QUEUE; the queue's number is above the lower 16 bits
	code := number(unix.NFTA_TRACE_VERDICT, unix.NFTA_VERDICT_CODE)
	if packet != nil {
		answers[id] = t.answer.is(t.answer.ethertype, packet)
	}

	pass := &t.to
	if answers[id] {
		pass = &t.from
	}

	switch {
	case r.table == tableName():
		pass.chain, pass.queue = r.chain, nil // the packet has come back from a queue, or is another packet
	case r.table == nftnl.DefaultTable && strings.HasPrefix(r.chain, "share-mute-"):
		// Ignore this drop. The packet is only a copy: the host receives the original on the shared NIC.
	case drops:
		pass.drop = cmp.Or(pass.drop, &r)
	case int32(code) > 0 && code&0xff == queues:
		r.queue, pass.queue = uint16(code>>16), &r
	}

	return nil
}

// find returns the position of a rule in its chain, counted from 1, and the rule's comment. The position is 0 if the
// rule no longer exists.
func (r *rule) find() (number int, comment string, _ error) {
	conn, err := nl.Dial(unix.NETLINK_NETFILTER, nil)
	if err != nil {
		return 0, "", err
	}
	defer conn.Close()
	n := 0
	err = nftnl.List(conn, "list rules of chain "+r.chain, r.family, unix.NFT_MSG_GETRULE, func(data []byte) error {
		if n++; nftnl.Number64(nftnl.Find(data, unix.NFTA_RULE_HANDLE)) == r.handle {
			number, comment = n, nftnl.RuleComment(data)
		}
		return nil
	}, nftnl.String(unix.NFTA_RULE_TABLE, r.table), nftnl.String(unix.NFTA_RULE_CHAIN, r.chain))
	return number, comment, err
}

// droppedBy returns a finding that the rule r drops a packet, which the argument what describes. side is "iifname" or
// "oifname": the match that a new rule needs to select the packet by the pod's link.
func (e *examination) droppedBy(r *rule, what, side string) *Finding {
	if r.handle == 0 {
		return finding(StepFirewall, e.remedy(r, "", side), "%s%s drops, by its policy, %s", r, quoted(r, ""), what)
	}
	number, comment, err := r.find()
	e.fail(err)
	return finding(StepFirewall, e.remedy(r, comment, side),
		"%s drops or rejects, by its rule number %d with handle %d%s, %s",
		r, number, r.handle, strings.TrimSuffix(quoted(r, comment), ","), what)
}

// acceptInPolicy returns a command that makes a firewalld policy accept packets from the pod's subnet, ahead of the
// policy's other rules.
func (e *examination) acceptInPolicy(policy string) string {
	family := map[bool]string{true: "ipv4", false: "ipv6"}[e.own.Is4()]
	i := slices.IndexFunc(e.at.Addresses, func(a ipam.Address) bool { return a.Prefix.Addr() == e.own })
	return fmt.Sprintf(`firewall-cmd --permanent --policy=%s --add-rich-rule='rule priority="-32768" family="%s" `+
		`source address="%s" accept' && firewall-cmd --reload`, policy, family, e.at.Addresses[i].Prefix.Masked())
}

// remedy returns advice against a rule that drops a packet, or against a chain's policy. It does not suggest deleting a
// rule whose program managerOf knows, or a rule with a comment, which a program may manage.
func (e *examination) remedy(r *rule, comment, side string) string {
	link := e.link.Name
	zone, ofZone := strings.CutPrefix(r.chain, "filter_FWD_")
	ofZone = ofZone && r.table == "firewalld"
	policy, ofPolicy := strings.CutPrefix(zone, "policy_")
	switch {
	case r.table == nftnl.DefaultTable:
		return "see guard, lanGuard, internal and the policies of the network, and whether the pod changed its MAC " +
			"or address"
	case ofZone && ofPolicy:
		return e.acceptInPolicy(strings.TrimSuffix(strings.TrimSuffix(policy, "_pre"), "_deny"))
	case ofZone && strings.HasPrefix(zone, "trusted"):
		return "firewall-cmd --permanent --zone=trusted --set-target=ACCEPT && firewall-cmd --reload"
	case ofZone && slices.Contains(e.opt.Trusted, link):
		// firewalld applies this zone before the zone trusted, since the pod's address is one of this zone's sources.
		// It applies policies before all zones.
		add := "firewall-cmd --permanent --policy=tombolo --add-"
		return "firewall-cmd --permanent --new-policy=tombolo && " + add + "ingress-zone=" + zone + " && " +
			add + "egress-zone=ANY && " + e.acceptInPolicy("tombolo")
	}

	for _, o := range e.obstacles {
		if o.Firewalld && r.table == "firewalld" || r.handle == 0 && o.Chain == r.String() {
			return o.Remedy
		}
	}

	chain := fmt.Sprintf("%s %s %s", nftnl.FamilyName(r.family), r.table, r.chain)
	switch m := managerOf(r); {
	case m != nil:
		return m.governs(comment)
	case comment != "":
		return "have the program or the person that made the rule let this pass: nft -a list chain " + chain
	case r.handle != 0:
		return fmt.Sprintf("nft delete rule %s handle %d # unless a program manages table %s", chain, r.handle, r.table)
	}

	if r.family == unix.NFPROTO_BRIDGE {
		link = e.port.Name
	}

	return fmt.Sprintf("nft add rule %s %s %s accept", chain, side, link)
}
