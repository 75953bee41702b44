package nl_test

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/nl"
	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
)

// Without the filter, the announcements of 10,000 rules overflow the socket; with it, each
// transaction is one announcement.
func TestAFeedOfOneTypeIsNotFloodedByOthers(t *testing.T) {
	t.Parallel()
	ns := nstest.New(t)
	const newGeneration = unix.NFNL_SUBSYS_NFTABLES<<8 | unix.NFT_MSG_NEWGEN
	all := must.Of(nl.FollowOnly(unix.NETLINK_NETFILTER, ns, nil, unix.NFNLGRP_NFTABLES)).Get(t)
	defer all.Close()
	one, err := nl.FollowOnly(unix.NETLINK_NETFILTER, ns, []nl.Kind{{Type: newGeneration}}, unix.NFNLGRP_NFTABLES)
	must.Succeed(t, err)
	file := t.TempDir() + "/rules"
	rules := "table ip storm { chain c { }; }\n" + strings.Repeat("add rule ip storm c counter\n", 10_000)
	must.Succeed(t, os.WriteFile(file, []byte(rules), 0o600))
	nstest.Run(t, ns, "nft", "-f", file)
	nstest.Run(t, ns, "nft", "flush", "ruleset")

	lost := false
	for range 20_000 {
		if _, err := all.Next(); errors.Is(err, unix.ENOBUFS) {
			lost = true
			break
		}
	}
	expect.That(t, lost, "the rules did not overflow a socket without a filter")
	for range 2 {
		list, err := one.Next()
		expect.That(t, err == nil && len(list) == 1 && list[0].Header.Type == newGeneration, "got %v, %v", list, err)
	}
	expect.Success(t, one.Close())
	list, err := one.Next()
	expect.That(t, errors.Is(err, os.ErrClosed), "more: %v, %v", list, err)
}

func TestAFeedOfOneTypeOfNoGroupIsRefused(t *testing.T) {
	t.Parallel()
	f, err := nl.FollowOnly(unix.NETLINK_NETFILTER, nil, []nl.Kind{{Type: 1}}, 1<<20)
	expect.That(t, err != nil, "FollowOnly gave %v", f)
}

// Twenty thousand routes of a routing engine come and go, and what is asked for is heard all the
// same: what the kernel says of its own routes, and of links.
func TestAFeedOfSomeKindsHearsThoseAlone(t *testing.T) {
	t.Parallel()
	ns := nstest.New(t)
	const protocolAt = 5 // in struct rtmsg
	feed, err := nl.FollowOnly(unix.NETLINK_ROUTE, ns,
		[]nl.Kind{{Type: unix.RTM_DELLINK}, {Type: unix.RTM_DELROUTE, At: protocolAt, Byte: unix.RTPROT_KERNEL}},
		unix.RTNLGRP_LINK, unix.RTNLGRP_IPV4_IFADDR, unix.RTNLGRP_IPV4_ROUTE)
	must.Succeed(t, err)
	defer feed.Close()
	var routes strings.Builder
	for i := range 20_000 {
		fmt.Fprintf(&routes, "route add 172.%d.%d.0/28 dev x proto bird\n", 16+i/256, i%256)
	}
	file := t.TempDir() + "/routes"
	withdrawn := strings.ReplaceAll(routes.String(), "route add", "route del")
	must.Succeed(t, os.WriteFile(file, []byte(routes.String()+withdrawn), 0o600))
	nstest.Run(t, ns, "sh", "-ec", "ip link add x type bridge; ip link set x up; ip addr add 10.1.0.1/24 dev x; ip -batch "+file+
		"; ip route del 10.1.0.0/24 dev x; ip link del x")
	var heard []uint16
	for !slices.Contains(heard, unix.RTM_DELLINK) {
		list := must.Of(feed.Next()).Get(t)
		for _, m := range list {
			heard = append(heard, uint16(m.Header.Type))
			if m.Header.Type == unix.RTM_DELROUTE && m.Data[5] != unix.RTPROT_KERNEL {
				t.Fatalf("heard of a route of protocol %d", m.Data[5])
			}
		}
	}
	// With the link the kernel's local and broadcast routes go.
	expect.That(t, len(heard) >= 2 && len(heard) <= 10 && heard[0] == unix.RTM_DELROUTE, "heard %v", heard)
}
