package doctor

import (
	"context"
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"

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
	fd, ports, err := bound(pod, own, to.Port())
	if err != nil {
		return fmt.Errorf("connect to %s: %w", to, err)
	}
	defer unix.Close(fd)
	t, err := trace(ctx, probe(own.AsSlice(), to.Addr().AsSlice(), unix.IPPROTO_TCP, 0, ports), func() error {
		err := unix.Connect(fd, sockaddr(to))
		if err == nil || err == unix.EINPROGRESS {
			return nil
		}
		return fmt.Errorf("connect to %s: %w", to, err)
	})
	if err != nil {
		return err
	}
	if found, err := e.report(t, to.String()); found || err != nil {
		return err
	}
	return e.untraced(ctx, own, to)
}

// bound opens a socket in the pod, whose packets get no further than the host's next hop, and gives what TCP's header
// begins with: both ports.
func bound(pod *netns.NS, own netip.Addr, to uint16) (fd int, ports []byte, _ error) {
	family, level, option := unix.AF_INET6, unix.IPPROTO_IPV6, unix.IPV6_UNICAST_HOPS
	if own.Is4() {
		family, level, option = unix.AF_INET, unix.IPPROTO_IP, unix.IP_TTL
	}
	err := pod.Do(func() (err error) {
		fd, err = unix.Socket(family, unix.SOCK_STREAM|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0)
		return err
	})
	if err != nil {
		return -1, nil, err
	}
	err = unix.SetsockoptInt(fd, level, option, hops)
	if err == nil {
		err = unix.Bind(fd, sockaddr(netip.AddrPortFrom(own, 0)))
	}
	var name unix.Sockaddr
	if err == nil {
		name, err = unix.Getsockname(fd)
	}
	if err != nil {
		unix.Close(fd)
		return -1, nil, err
	}
	port := 0
	switch a := name.(type) {
	case *unix.SockaddrInet4:
		port = a.Port
	case *unix.SockaddrInet6:
		port = a.Port
	}
	return fd, binary.BigEndian.AppendUint16(binary.BigEndian.AppendUint16(nil, uint16(port)), to), nil
}

func sockaddr(a netip.AddrPort) unix.Sockaddr {
	if a.Addr().Is4() {
		return &unix.SockaddrInet4{Addr: a.Addr().As4(), Port: int(a.Port())}
	}
	return &unix.SockaddrInet6{Addr: a.Addr().As16(), Port: int(a.Port())}
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
