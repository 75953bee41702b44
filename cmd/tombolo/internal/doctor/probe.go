package doctor

import (
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

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/icmp"
	"github.com/tombolo-cni/tombolo/internal/nftnl"
	"github.com/tombolo-cni/tombolo/netns"
	"github.com/tombolo-cni/tombolo/nft/foreign"
)

// hops is how far probes get: to the host's next hop.
const hops = 2

// traceEcho finds the rule that drops an echo request of the pod's.
func (e *examination) traceEcho(ctx context.Context, pod *netns.NS, own, to netip.Addr) (found bool, _ error) {
	id := uint16(rand.Uint32())
	protocol, at := byte(unix.IPPROTO_ICMPV6), uint32(4)
	if own.Is4() {
		protocol = unix.IPPROTO_ICMP
	}
	match := probe(own.AsSlice(), to.AsSlice(), protocol, at, binary.BigEndian.AppendUint16(nil, id))
	t, err := trace(ctx, match, func() error {
		_ = ping(ctx, pod, to, icmp.Echo{From: own, Wait: wait / 10, ID: id, Hops: hops})
		return ctx.Err()
	})
	if err != nil {
		return false, err
	}
	return e.report(t, to.String())
}

// connection has the pod begin a connection by TCP, and finds the rule that drops its first packet.
func (e *examination) connection(ctx context.Context, pod *netns.NS, own netip.Addr, to netip.AddrPort) error {
	const dynamic = 49152 // the first port that is nobody's (RFC 6335)
	from := netip.AddrPortFrom(own, dynamic+rand.N[uint16](1<<14))
	ports := binary.BigEndian.AppendUint16(binary.BigEndian.AppendUint16(nil, from.Port()), to.Port()) // TCP's header begins with them
	var unreachable error
	t, err := trace(ctx, probe(own.AsSlice(), to.Addr().AsSlice(), unix.IPPROTO_TCP, 0, ports), func() error {
		unreachable = pod.Do(func() error { return connect(ctx, from, to) })
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
	return e.untraced(ctx, own, to)
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
	number, priority, err := r.position()
	if err != nil {
		return false, err
	}
	at := fmt.Sprintf("chain %s of table %s %s", r.chain, nftnl.FamilyName(r.family), r.table)
	if r.handle == 0 {
		e.add(StepFirewall, e.remedy(r, priority), "%s drops, by its policy, what the pod sends to %s", at, to)
		return true, nil
	}
	e.add(StepFirewall, e.remedy(r, priority), "%s drops or rejects, by its rule number %d with handle %d, what the pod sends to %s", at, number, r.handle, to)
	return true, nil
}

// remedy is the command that helps against a rule, or a policy. Rules that a program makes anew are that
// program's to delete.
func (e *examination) remedy(r *rule, priority int32) string {
	link := e.at.Bridge
	if e.at.HostVLAN != "" {
		link = e.at.HostVLAN
	}
	const firewalld = "filter_FWD_"
	switch {
	case r.table == "firewalld" && strings.HasPrefix(r.chain, firewalld+"policy_"):
		return "see firewall-cmd --list-all-policies: the policy has to accept what comes from the zone of " + link
	case r.table == "firewalld" && strings.HasPrefix(r.chain, firewalld+"trusted"):
		return "see firewall-cmd --info-zone=trusted, whose target is not ACCEPT"
	case r.table == "firewalld" && slices.Contains(e.opt.Trusted, link):
		zone := strings.TrimPrefix(r.chain, firewalld)
		return "see firewall-cmd --info-zone=" + zone + ": it comes before trusted, where " + link + " is, since it has the pod's address as a source"
	case r.table == "firewalld":
		return foreign.JoinTrusted(link)
	case strings.HasPrefix(r.chain, "ufw-user-") || strings.HasPrefix(r.chain, "ufw6-user-"):
		return "see ufw status numbered, and ufw delete NUMBER; another command's deletion ends with ufw's next reload"
	case r.handle != 0:
		return fmt.Sprintf("nft delete rule %s %s %s handle %d", nftnl.FamilyName(r.family), r.table, r.chain, r.handle)
	case priority <= nftnl.PriorityForward:
		return foreign.AcceptLink(r.family, r.table, r.chain, 0, link)
	}
	return foreign.AcceptMark(r.family, r.table, r.chain, 0, e.opt.Marks[e.at.Network])
}

// untraced names what may drop packets where nothing traces them.
func (e *examination) untraced(ctx context.Context, own netip.Addr, to netip.AddrPort) error {
	path := foreign.Path{Bridge: e.at.Bridge, Prefixes: []netip.Prefix{netip.PrefixFrom(own, own.BitLen())}}
	obstacles, err := foreign.Legacy(e.opt.Marks[e.at.Network], path)
	for _, o := range obstacles {
		e.add(StepFirewall, o.Remedy, "%s, which cannot be traced, may drop what the pod sends to %s", o.Chain, to)
		e.found[len(e.found)-1].Note = true
	}
	return err
}
