package nl_test

import (
	"errors"
	"os"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/nl"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
	"github.com/tombolo-cni/tombolo/netns"
)

func follow(t *testing.T) (*nl.Feed, *netns.NS) {
	t.Helper()
	ns := nstest.New(t)
	f, err := nl.Follow(unix.NETLINK_ROUTE, &nl.Config{NetNS: ns}, unix.RTNLGRP_LINK)
	must.Succeed(t, err)
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
	must.Succeed(t, c.Execute(&b))
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

func TestAFeedOfNoGroupIsRefused(t *testing.T) {
	t.Parallel()
	if f, err := nl.Follow(unix.NETLINK_ROUTE, nil, 1<<20); err == nil {
		t.Errorf("Follow gave %v", f)
	}
}
