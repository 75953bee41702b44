package foreign

import (
	"cmp"
	"context"
	"fmt"
	"net/netip"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/nftnl"
)

// strictForward is firewalld's chain for packets to host ports, if StrictForwardPorts is set.
const strictForward = "filter_FORWARD_dnat"

// Openings returns one function for each firewall of the host that may refuse calls of host ports without our mark.
// The function returns the command that opens ports in this firewall. The ports lead to the address pod behind link.
// A port of the host or of the pod is written as 80, and a range as 80-90. The firewall may accept the calls already,
// by a rule with conditions.
//
// If admitted is set, our rules let the calls pass, and Openings looks only for firewalld's StrictForwardPorts, which
// refuses them nevertheless.
//
// The rules that firewalld needs also change the destination of packets. They do this for callers that an endpoint's
// PublishFrom excludes, too. So if limited is set, commands for firewalld contain the word CALLER in place of an
// address or prefix. firewalld refuses this word, so the operator has to replace it.
func (c *Conn) Openings(ctx context.Context, link string, pod netip.Addr, admitted, limited bool) (
	open []func(protocol, host, podPort string) string, _ error) {
	family := uint8(unix.NFPROTO_IPV4)
	if pod.Is6() {
		family = unix.NFPROTO_IPV6
	}

	err := c.planned(ctx, "", func(p *plan) error {
		legacy, err := c.legacy(Path{Prefixes: []netip.Prefix{netip.PrefixFrom(pod, pod.BitLen())}})
		if open = nil; len(legacy) > 0 && !admitted {
			open = append(open, openByIptables(iptablesProgram(family)+"-legacy", 1, pod))
		}

		for _, hookFamily := range []uint8{unix.NFPROTO_INET, family} {
			chains, unread := p.forwardChains(hookFamily)
			err = cmp.Or(err, unread)
			for _, ch := range chains {
				at := chain{hookFamily, ch.Table, ch.Name}
				command, unread := p.opening(ctx, at, ch, link, pod, admitted, limited)
				if err = cmp.Or(err, unread); command != nil {
					open = append(open, command)
				}
			}
		}
		return err
	})

	return open, err
}

// opening returns the function of Openings for one base chain, or nil if the chain accepts the calls.
func (p *plan) opening(ctx context.Context, at chain, ch nftnl.Chain, link string, pod netip.Addr, admitted,
	limited bool) (func(protocol, host, podPort string) string, error) {
	ip, version, source := "ip", "4", ""
	if pod.Is6() {
		ip, version = "ip6", "6"
	}
	if limited {
		source = `source address="CALLER" `
	}

	b := base{policy: policyOf(ch)}
	isFirewalld := strings.HasPrefix(at.table, "firewalld")
	p.read(ctx, &b, at, &packet{known: p.mark, to: link, redirected: true, firewalld: isFirewalld})
	o, number := b.obstacle(at.String())
	isIptables := at.family != unix.NFPROTO_INET && at.name == iptablesForward
	switch {
	case o == nil, admitted && !(isFirewalld && b.leadsTo(strictForward)):
		return nil, b.err
	case isFirewalld: // policies come behind its rejection of redirected packets
		return func(protocol, host, podPort string) string {
			return fmt.Sprintf(`firewall-cmd --permanent --add-rich-rule='rule family="ipv%s" %sforward-port `+
				`port="%s" protocol="%s" to-port="%s" to-addr="%s"' && firewall-cmd --reload`,
				version, source, host, protocol, podPort, pod)
		}, b.err
	case isIptables && b.leadsTo("ufw"+strings.TrimPrefix(ip, "ip")+"-before-forward"):
		return func(protocol, _, podPort string) string {
			return fmt.Sprintf("ufw route allow proto %s from any to %s port %s", protocol, pod, colon(podPort))
		}, b.err
	case isIptables:
		return openByIptables(iptablesProgram(at.family), number, pod), b.err
	}

	return func(protocol, _, podPort string) string {
		return fmt.Sprintf("%s %s daddr %s %s dport %s accept", b.insert(at, number), ip, pod, protocol, podPort)
	}, b.err
}

// openByIptables returns a function for Openings. Its command adds a rule to FORWARD of an iptables program, before
// the rule with the given number or, for 0, at the end.
func openByIptables(program string, number int, pod netip.Addr) func(protocol, host, podPort string) string {
	return func(protocol, _, podPort string) string {
		return fmt.Sprintf("%s -d %s -p %s --dport %s -j ACCEPT", insertInto(program, number), pod, protocol,
			colon(podPort))
	}
}

// colon returns a range of ports in the form of iptables and ufw.
func colon(ports string) string { return strings.ReplaceAll(ports, "-", ":") }
