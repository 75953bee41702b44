package nl_test

import (
	"os"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/nl"
	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
	"github.com/tombolo-cni/tombolo/netns"
)

func follow(t *testing.T) (*nl.Feed, *netns.NS) {
	t.Helper()
	ns := nstest.New(t)
	f := must.Of(nl.FollowOnly(unix.NETLINK_ROUTE, ns, nil, unix.RTNLGRP_LINK)).Get(t)
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
	expect.Success(t, <-heard)
	go func() {
		for {
			if _, err := f.Next(); err != nil {
				heard <- err
				return
			}
		}
	}()
	expect.Success(t, f.Close())
	expect.Is(t, <-heard, os.ErrClosed, "Next")
}

func TestAFeedOfNoGroupIsRefused(t *testing.T) {
	t.Parallel()
	f, err := nl.FollowOnly(unix.NETLINK_ROUTE, nil, nil, 1<<20)
	expect.That(t, err != nil, "Follow gave %v", f)
}
