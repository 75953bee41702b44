package nl_test

import (
	"errors"
	"os"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/nl"
	"github.com/tombolo-cni/tombolo/internal/nstest"
)

// Without the filter, the announcements of 10,000 rules overflow the socket; with it, each
// transaction is one announcement.
func TestAFeedOfOneTypeIsNotFloodedByOthers(t *testing.T) {
	t.Parallel()
	ns := nstest.New(t)
	cfg := &nl.Config{NetNS: ns}
	const newGeneration = unix.NFNL_SUBSYS_NFTABLES<<8 | unix.NFT_MSG_NEWGEN
	all, err := nl.Follow(unix.NETLINK_NETFILTER, cfg, unix.NFNLGRP_NFTABLES)
	if err != nil {
		t.Fatal(err)
	}
	defer all.Close()
	one, err := nl.FollowType(unix.NETLINK_NETFILTER, cfg, newGeneration, unix.NFNLGRP_NFTABLES)
	if err != nil {
		t.Fatal(err)
	}
	file := t.TempDir() + "/rules"
	rules := "table ip storm { chain c { }; }\n" + strings.Repeat("add rule ip storm c counter\n", 10_000)
	if err := os.WriteFile(file, []byte(rules), 0o600); err != nil {
		t.Fatal(err)
	}
	nstest.Run(t, ns, "nft", "-f", file)
	nstest.Run(t, ns, "nft", "flush", "ruleset")

	lost := false
	for range 20_000 {
		if _, err := all.Next(); errors.Is(err, unix.ENOBUFS) {
			lost = true
			break
		}
	}
	if !lost {
		t.Error("the rules did not overflow a socket without a filter")
	}
	for range 2 {
		list, err := one.Next()
		if err != nil || len(list) != 1 || list[0].Header.Type != newGeneration {
			t.Errorf("got %v, %v", list, err)
		}
	}
	if err := one.Close(); err != nil {
		t.Error(err)
	}
	if list, err := one.Next(); !errors.Is(err, os.ErrClosed) {
		t.Errorf("more: %v, %v", list, err)
	}
}

func TestAFeedOfOneTypeOfNoGroupIsRefused(t *testing.T) {
	t.Parallel()
	if f, err := nl.FollowType(unix.NETLINK_NETFILTER, nil, 1, 1<<20); err == nil {
		t.Errorf("FollowType gave %v", f)
	}
}
