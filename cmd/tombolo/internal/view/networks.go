package view

import (
	"fmt"
	"net/netip"
	"strconv"
	"strings"

	"github.com/tombolo-cni/tombolo/internal/printable"
)

// Networks is the text of tombolo networks.
func Networks(list []Network) string {
	var b strings.Builder
	for i := range list {
		if i > 0 {
			b.WriteByte('\n')
		}
		list[i].text(&b)
	}
	if len(list) == 0 {
		b.WriteString("no network is on record\n")
	}
	return b.String()
}

// lines writes lines of a key and a value.
type lines struct{ b *strings.Builder }

// line leaves out what has no value.
func (w *lines) line(key, value string) {
	if value != "" {
		fmt.Fprintf(w.b, "  %-15s%s\n", key, printable.Line(value))
	}
}

func (n *Network) text(b *strings.Builder) {
	w := &lines{b: b}
	b.WriteString(printable.Line(n.Name) + "\n")
	if n.Mode == "" {
		why := "recreate its pods"
		if n.bare {
			why = "no ADD of it has succeeded"
		}
		w.line("record", "none of the network itself: "+why)
	}
	w.line("mode", n.Mode)
	bridge := n.Bridge
	if n.MTU > 0 {
		bridge += fmt.Sprintf(" (MTU %d)", n.MTU)
	}
	w.line("bridge", bridge)
	if n.VLAN != 0 {
		w.line("VLAN", strconv.Itoa(n.VLAN))
	}
	w.line("VLAN trunk", n.VLANTrunk)
	w.line("uplink", n.Uplink)
	w.line("subnets", prefixes(n.Subnets))
	w.line("gateways", prefixes(n.Gateways))
	if n.DefaultRoute != "" {
		w.line("default route", "to the "+n.DefaultRoute)
	}
	if n.SLAAC {
		w.line("IPv6", "by router advertisements")
	}
	if n.Mode != "" {
		masquerade := onOff(n.Masquerade)
		if n.Masquerade && len(n.NonMasquerade) > 0 {
			masquerade += ", except to " + prefixes(n.NonMasquerade)
		}
		w.line("masquerade", masquerade)
		w.line("policy", n.Policy)
		guard := onOff(n.Guard)
		if n.Guard && n.MACOnly > 0 {
			guard += fmt.Sprintf(", of MACs alone for %d of the pods", n.MACOnly)
		}
		w.line("guard", guard)
	}
	pods := strconv.Itoa(n.Attachments)
	if n.Adding > 0 {
		pods += fmt.Sprintf(", %d of them not ready", n.Adding)
	}
	w.line("pods", pods)
	for _, p := range n.Pools {
		w.line("pool", p.String())
	}
	if len(n.Pools) > 0 {
		w.line("", n.PoolNote)
	} else {
		w.line("pool", n.PoolNote)
	}
	for i := range n.Ports {
		key := "host ports"
		if i > 0 {
			key = ""
		}
		w.line(key, n.Ports[i].String())
	}
}

func onOff(on bool) string {
	if on {
		return "on"
	}
	return "off"
}

func prefixes(list []netip.Prefix) string {
	var texts []string
	for _, p := range list {
		texts = append(texts, p.String())
	}
	return strings.Join(texts, ", ")
}

// String reads "10.61.0.0/24: 3 of 253 in use, 250 free".
func (p Pool) String() string {
	return fmt.Sprintf("%s: %d of %s in use, %s free", p.Range, p.Used, number(p.Size), number(p.Free))
}

// number writes a large one as a power of two.
func number(n uint64) string {
	if n < 1<<40 {
		return strconv.FormatUint(n, 10)
	}
	bits := 0
	for ; n > 0; n >>= 1 {
		bits++
	}
	return "some 2^" + strconv.Itoa(bits)
}

// String reads "192.0.2.1:8080/tcp -> default/web:80, container 0123456789ab".
func (p *Port) String() string {
	owner := ""
	if p.Pod != "" {
		owner = p.Pod + " "
	}
	text := fmt.Sprintf("%s/%s -> %sport %d (container %.12s, %s)", p.host(), p.Protocol, owner, p.PodPort, p.ContainerID, p.IfName)
	if p.Withheld {
		text += ", published by another network"
	}
	return text
}

// host is the port with its address, if it is on one only.
func (p *Port) host() string {
	if !p.HostIP.IsValid() {
		return strconv.Itoa(p.HostPort)
	}
	return netip.AddrPortFrom(p.HostIP, uint16(p.HostPort)).String()
}
