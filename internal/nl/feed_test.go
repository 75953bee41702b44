package nl_test

import (
	"errors"
	"os"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/nl"
	"github.com/tombolo-cni/tombolo/internal/nstest"
	"github.com/tombolo-cni/tombolo/netns"
)

func follow(t *testing.T) (*nl.Feed, *netns.NS) {
	t.Helper()
	ns := nstest.New(t)
	f, err := nl.Follow(unix.NETLINK_ROUTE, &nl.Config{NetNS: ns}, unix.RTNLGRP_LINK)
	if err != nil {
		t.Fatal(err)
	}
	return f, ns
}

func TestAFeedHearsWhatHappensAndEndsWhenItIsClosed(t *testing.T) {
	t.Parallel()
	f, ns := follow(t)
	c := dial(t, ns)
	heard := make(chan error)
	go func() { _, err := f.Next(); heard <- err }()
	var b nl.Batch
	addBridge(&b, "br0")
	if err := c.Execute(&b); err != nil {
		t.Fatal(err)
	}
	if err := <-heard; err != nil {
		t.Error(err)
	}
	go func() {
		for {
			if _, err := f.Next(); err != nil {
				heard <- err
				return
			}
		}
	}()
	if err := f.Close(); err != nil {
		t.Error(err)
	}
	if err := <-heard; !errors.Is(err, os.ErrClosed) {
		t.Errorf("Next: %v, want %v", err, os.ErrClosed)
	}
}

func TestAFeedSaysThatItMissedSomething(t *testing.T) {
	t.Parallel()
	nstest.RequireInitialUserNS(t)
	f, ns := follow(t)
	defer f.Close()
	c := dial(t, ns)
	var b nl.Batch
	addBridge(&b, "br0")
	if err := c.Execute(&b); err != nil {
		t.Fatal(err)
	}
	// More announcements than its buffer holds.
	b.Reset()
	for i := range 400 {
		b.Request("set link", nl.Name("br0"), unix.RTM_NEWLINK, 0, func(e *nl.Encoder) {
			e.Raw(make([]byte, unix.SizeofIfInfomsg))
			e.String(unix.IFLA_IFNAME, "br0")
			e.Uint32(unix.IFLA_TXQLEN, uint32(100+i))
		})
	}
	if err := c.Execute(&b); err != nil {
		t.Fatal(err)
	}
	for {
		list, err := f.Next()
		if errors.Is(err, unix.ENOBUFS) {
			break
		}
		if err != nil || len(list) == 0 {
			t.Fatalf("Next: %v, %v", list, err)
		}
	}
}

func TestAFeedOfNoGroupIsRefused(t *testing.T) {
	t.Parallel()
	if f, err := nl.Follow(unix.NETLINK_ROUTE, nil, 1<<20); err == nil {
		t.Errorf("Follow gave %v", f)
	}
}
