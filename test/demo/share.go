package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"os"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/bridge"
	"github.com/tombolo-cni/tombolo/internal/icmp"
	"github.com/tombolo-cni/tombolo/internal/printable"
	"github.com/tombolo-cni/tombolo/netns"
	"github.com/tombolo-cni/tombolo/network"
)

const (
	lanName   = "lan"
	lanBridge = "br0"
	nic       = "enp1s0" // of the node
)

// machine is one of the LAN's.
type machine struct {
	name      string
	ns        *netns.NS
	addresses []netip.Addr
}

// onLAN returns an address of each family in the LAN.
func (b *sandbox) onLAN(number int) []netip.Prefix {
	return []netip.Prefix{
		netip.MustParsePrefix(fmt.Sprintf("192.168.50.%d/24", number)), netip.MustParsePrefix(fmt.Sprintf("fd50::%d/64", number)),
	}[:b.families]
}

// shareNIC puts the node and a laptop on a LAN, and a container beside the node by the node's NIC, which keeps all that
// it has. Each of the three pings the others.
func (s *show) shareNIC(ctx context.Context, w io.Writer) error {
	if ids, err := os.ReadFile("/proc/self/uid_map"); err != nil || !strings.Contains(string(ids), "4294967295") {
		fmt.Fprintln(w, "\nTo share a NIC takes a BPF program, which root of a user namespace may not load: this part is left out.")
		return err
	}
	node, err := netns.Current()
	if err != nil {
		return err
	}
	defer node.Close()
	var all []machine
	defer func() {
		for _, m := range all[min(1, len(all)):] {
			m.ns.Close()
		}
	}()
	all = append(all, machine{name: "the node", ns: node})
	for _, name := range []string{"a laptop", "the container", "the switch"} {
		ns, err := netns.New()
		if err != nil {
			return err
		}
		all = append(all, machine{name: name, ns: ns})
	}
	lan, container := all[3].ns, &all[2]
	if err := lan.Do(func() error { return s.connectLAN(ctx, all[:2]) }); err != nil {
		return fmt.Errorf("build the LAN: %w", err)
	}
	before, err := nodeHas()
	if err != nil {
		return err
	}

	call := s.call(&pod{name: "container", ns: container.ns})
	var addresses []string
	for _, p := range s.onLAN(3) {
		addresses = append(addresses, fmt.Sprintf(`{"address": %q}`, p))
		container.addresses = append(container.addresses, p.Addr())
	}
	call.Stdin = fmt.Appendf(nil, `{
  "cniVersion": "1.1.0", "name": %q, "type": "tombolo", "mode": "lan", "bridge": %q, "uplink": %q, "stateDir": %q,
  "ipam": {"type": "static", "addresses": [%s]}
}`, lanName, lanBridge, nic, s.stateDir, strings.Join(addresses, ", "))
	if _, err := call.Add(ctx); err != nil {
		return fmt.Errorf("ADD of the container that shares %s: %w", nic, err)
	}
	fmt.Fprintf(w, "\nON THE LAN BY %s\tADDRESSES\tPINGS ITS NEIGHBOURS\n", nic)
	for i, m := range all[:3] {
		p, cells := pod{name: m.name, ns: m.ns}, []string{}
		for k, to := range all[:3] {
			if k == i {
				continue
			}
			times, err := p.ping(ctx, to.name, to.addresses)
			if err != nil {
				return err
			}
			cells = append(cells, to.name+": "+times)
		}
		fmt.Fprintf(w, "%s\t%s\t%s\n", m.name, printable.List(m.addresses, ", "), strings.Join(cells, "; "))
	}
	beside, err := nodeHas()
	if err != nil {
		return err
	}

	if err := call.Run(ctx, "DEL"); err != nil {
		return fmt.Errorf("DEL of the container that shares %s: %w", nic, err)
	}
	opened, err := network.Open(ctx, &network.Config{StateDir: s.stateDir})
	if err == nil {
		err = opened.Remove(ctx, lanName)
	}
	after, lookErr := nodeHas()
	left, countErr := s.take(ctx)
	if err := errors.Join(err, lookErr, countErr); err != nil {
		return fmt.Errorf("remove network %q: %w", lanName, err)
	}
	if left != (inventory{bridge: noBridge}) {
		return fmt.Errorf("after the removal of network %q there are %s", lanName, left)
	}
	if !slices.Equal(before, beside) || !slices.Equal(before, after) {
		return fmt.Errorf("%s had %q, with the container %q, and has %q", nic, before, beside, after)
	}
	fmt.Fprintf(w, "\n%s kept its addresses and routes: before, beside the container, and after.\n", nic)
	return nil
}

// connectLAN makes a switch in the calling thread's namespace, and connects the machines to it.
func (s *show) connectLAN(ctx context.Context, machines []machine) error {
	conn, err := bridge.Dial(nil)
	if err != nil {
		return err
	}
	defer conn.Close()
	if _, err := conn.Ensure(ctx, bridge.Bridge{Name: "switch"}); err != nil {
		return err
	}
	for i := range machines {
		m := &machines[i]
		prefixes := s.onLAN(i + 1)
		port := bridge.Port{Bridge: "switch", Name: fmt.Sprintf("port%d", i+1), Peer: []string{nic, podInterface}[i], Addresses: prefixes}
		if _, err := conn.Attach(ctx, m.ns, port); err != nil {
			return err
		}
		for _, p := range prefixes {
			m.addresses = append(m.addresses, p.Addr())
		}
	}
	for _, address := range machines[1].addresses {
		if err := icmp.Ping(ctx, machines[0].ns, address, icmp.Echo{Wait: pingTimeout}); err != nil {
			return err
		}
	}
	return nil
}

// nodeHas lists the addresses and routes of the NIC, as the kernel shows them to the calling thread.
func nodeHas() (lines []string, _ error) {
	tid := fmt.Sprintf("/proc/self/task/%d/net/", unix.Gettid())
	for _, file := range []string{"route", "ipv6_route", "if_inet6"} {
		text, err := os.ReadFile(tid + file)
		if err != nil && file == "route" {
			return nil, err
		}
		for line := range strings.Lines(string(text)) {
			fields := strings.Fields(line)
			if file == "ipv6_route" {
				fields = slices.Delete(fields, 6, 8) // counts of users
			}
			if slices.Contains(fields, nic) {
				lines = append(lines, strings.Join(fields, " "))
			}
		}
	}
	slices.Sort(lines)
	return lines, nil
}
