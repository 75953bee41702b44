package share_test

import (
	"errors"
	"io/fs"
	"net"
	"net/netip"
	"strings"
	"testing"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
	"github.com/tombolo-cni/tombolo/netns"
)

// A bond, a team and a VLAN's interface are shared as hardware is, also while a cable of two is out.
func TestBondsTeamsAndVLANsAreShared(t *testing.T) {
	t.Parallel()
	const tag = "ip link add link $on name $on.10 type vlan id 10; ip addr flush dev $on; ip addr add $four dev $on.10; " +
		"ip addr add $six dev $on.10 nodad; ip link set $on.10 up"
	const bond = "ip link add up0 type bond mode active-backup miimon 50; ip addr flush dev eth0; " +
		"ip link set eth0 down; ip link set eth1 down; ip link set eth0 master up0; ip link set eth1 master up0; " +
		"ip link set eth0 up; ip link set eth1 up; ip link set up0 up; " +
		"ip addr add $four dev up0; ip addr add $six dev up0 nodad"
	const team = "ip addr flush dev eth0; ip link set eth0 down; ip link set eth0 master team0; ip link set eth0 up; " +
		"ip link set team0 up; ip addr add $four dev team0; ip addr add $six dev team0 nodad"
	for name, tt := range map[string]struct {
		host, nic string
		tagged    bool // the LAN is a VLAN
	}{
		"VLAN":           {strings.ReplaceAll(tag, "$on", "eth0"), "eth0.10", true},
		"team":           {"ip link add team0 type team", "team0", false},
		"bond":           {bond, "up0", false},
		"VLAN on a bond": {bond + "; " + strings.ReplaceAll(tag, "$on", "up0"), "up0.10", true},
	} {
		nstest.RunParallel(t, name, func(t *testing.T) {
			n := newLab(t)
			n.share.NIC = tt.nic
			nstest.Veth(t, n.wire, "second", n.host, "eth1")
			nstest.Run(t, n.wire, "ip", "link", "set", "second", "master", "sw")
			up := func(ns *netns.NS, commands, four, six string) {
				t.Helper()
				commands = strings.NewReplacer("$four", four, "$six", six).Replace(commands)
				_, err := nstest.Try(ns, "sh", "-ec", commands)
				if err != nil && strings.Contains(err.Error(), "Unknown device type") {
					t.Skip("this kernel lacks the link's kind; test/vm/run.sh boots one that has it")
				}
				must.Succeed(t, err)
			}
			up(n.host, tt.host, "192.168.50.2/24", "fd50::2/64")
			if name == "team" {
				must.Succeed(t, n.host.Do(func() error { return setTeamMode("team0", "roundrobin") }))
				up(n.host, team, "192.168.50.2/24", "fd50::2/64")
			}
			if tt.tagged {
				up(n.laptop, strings.ReplaceAll(tag, "$on", "eth0"), "192.168.50.9/24", "fd50::9/64")
			}
			expect.Success(t, nstest.Ping(t, n.host, netip.MustParseAddr("192.168.50.9")), "before it is shared")

			expect.Of(n.conn.Ensure(t.Context(), n.share)).Is(t, true, "the first Ensure")
			n.connect(t)
			n.reach(t, "made")
			if strings.HasPrefix(tt.nic, "up0") {
				for _, cable := range []string{"p1", "second"} {
					nstest.Run(t, n.wire, "ip", "link", "set", cable, "down")
					n.reach(t, cable+" is out")
					nstest.Run(t, n.wire, "ip", "link", "set", cable, "up")
				}
			}
			left := must.Of(n.conn.Check(t.Context(), n.share)).Get(t)
			expect.That(t, len(left) == 0, "differences: %v", left)
			must.Succeed(t, n.conn.Remove(t.Context(), n.share))
			after := nstest.Run(t, n.host, "ip", "link", "show", "dev", tt.nic)
			expect.That(t, !strings.Contains(after, "PROMISC"), "after Remove: %s", after)
		})
	}
}

// setTeamMode has a team without ports send by a mode, as teamd does: the kernel's family "team" of generic netlink.
func setTeamMode(name, mode string) error {
	link, err := net.InterfaceByName(name)
	if err != nil {
		return err
	}
	conn, err := netlink.Dial(unix.NETLINK_GENERIC, nil)
	if err != nil {
		return err
	}
	defer conn.Close()
	call := func(family uint16, flags netlink.HeaderFlags, command byte, fill func(*netlink.AttributeEncoder)) ([]netlink.Message, error) {
		e := netlink.NewAttributeEncoder()
		fill(e)
		attributes, err := e.Encode()
		if err != nil {
			return nil, err
		}
		header := netlink.Header{Type: netlink.HeaderType(family), Flags: netlink.Request | flags}
		return conn.Execute(netlink.Message{Header: header, Data: append([]byte{command, 1, 0, 0}, attributes...)})
	}
	answers, err := call(unix.GENL_ID_CTRL, 0, unix.CTRL_CMD_GETFAMILY, func(e *netlink.AttributeEncoder) {
		e.String(unix.CTRL_ATTR_FAMILY_NAME, "team")
	})
	if err != nil {
		return err
	}
	d, err := netlink.NewAttributeDecoder(answers[0].Data[4:])
	if err != nil {
		return err
	}
	for d.Next() {
		if d.Type() != unix.CTRL_ATTR_FAMILY_ID {
			continue
		}
		_, err := call(d.Uint16(), netlink.Acknowledge, 1, func(e *netlink.AttributeEncoder) { // TEAM_CMD_OPTIONS_SET
			e.Uint32(1, uint32(link.Index))
			e.Nested(2, func(options *netlink.AttributeEncoder) error {
				options.Nested(1, func(option *netlink.AttributeEncoder) error {
					option.String(1, "mode")
					option.Uint8(3, 5) // NLA_STRING
					option.String(4, mode)
					return nil
				})
				return nil
			})
		})
		if errors.Is(err, unix.ESRCH) {
			err = nil // the mode is set, and nobody listens for such changes
		}
		return err
	}
	return fs.ErrNotExist
}
