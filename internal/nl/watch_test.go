package nl_test

import (
	"context"
	"errors"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo"
	"github.com/tombolo-cni/tombolo/internal/nl"
	"github.com/tombolo-cni/tombolo/internal/nstest"
)

func TestWatchHearsWhatHappensInItsNamespace(t *testing.T) {
	t.Parallel()
	ns := nstest.New(t)
	w, err := nl.Subscribe(unix.NETLINK_ROUTE, &nl.Config{NetNS: ns}, unix.RTNLGRP_LINK)
	if err != nil {
		t.Fatal(err)
	}
	defer w.Close()
	elsewhere := dial(t, nstest.New(t))
	here := dial(t, ns)
	heard := make(chan error)
	go func() { _, err := w.Next(t.Context()); heard <- err }()
	var b nl.Batch
	addBridge(&b, "br0")
	if err := elsewhere.Execute(&b); err != nil {
		t.Fatal(err)
	}
	select {
	case err := <-heard:
		t.Fatalf("heard of another namespace's link: %v", err)
	default:
	}
	b.Reset()
	addBridge(&b, "br0")
	if err := here.Execute(&b); err != nil {
		t.Fatal(err)
	}
	if err := <-heard; err != nil {
		t.Error(err)
	}
}

func TestWatchGivesWhatIsQueuedWithoutWaiting(t *testing.T) {
	t.Parallel()
	ns := nstest.New(t)
	w, err := nl.Subscribe(unix.NETLINK_ROUTE, &nl.Config{NetNS: ns}, unix.RTNLGRP_LINK)
	if err != nil {
		t.Fatal(err)
	}
	defer w.Close()
	if list, err := w.Queued(); err != nil || len(list) != 0 {
		t.Errorf("before anything happened: %v, %v", list, err)
	}
	var b nl.Batch
	addBridge(&b, "br0")
	if err := dial(t, ns).Execute(&b); err != nil {
		t.Fatal(err)
	}
	// The kernel announces before it acknowledges.
	if list, err := w.Queued(); err != nil || len(list) == 0 || list[0].Type != unix.RTM_NEWLINK {
		t.Errorf("after a link was added: %v, %v", list, err)
	}
}

func TestWatchEndsWithItsContext(t *testing.T) {
	t.Parallel()
	w, err := nl.Subscribe(unix.NETLINK_ROUTE, &nl.Config{NetNS: nstest.New(t)}, unix.RTNLGRP_LINK)
	if err != nil {
		t.Fatal(err)
	}
	defer w.Close()
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error)
	go func() { _, err := w.Next(ctx); ended <- err }()
	cancel()
	if err := <-ended; !errors.Is(err, context.Canceled) {
		t.Errorf("Next: %v, want %v", err, context.Canceled)
	}
	if _, err := w.Next(ctx); !errors.Is(err, context.Canceled) {
		t.Errorf("Next with a context that is done: %v, want %v", err, context.Canceled)
	}
}

func TestWatchSaysThatItMissedSomething(t *testing.T) {
	t.Parallel()
	nstest.RequireInitialUserNS(t)
	ns := nstest.New(t)
	w, err := nl.Subscribe(unix.NETLINK_ROUTE, &nl.Config{NetNS: ns}, unix.RTNLGRP_LINK)
	if err != nil {
		t.Fatal(err)
	}
	defer w.Close()
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
	for range 1000 {
		if _, err = w.Next(t.Context()); err != nil {
			break
		}
	}
	if !errors.Is(err, unix.ENOBUFS) {
		t.Errorf("Next: %v, want %v", err, unix.ENOBUFS)
	}
}

func TestSubscribeSaysWhatItCannotDo(t *testing.T) {
	t.Parallel()
	_, err := nl.Subscribe(unix.NETLINK_ROUTE, nil, 4711)
	var opErr *tombolo.OpError
	if !errors.As(err, &opErr) {
		t.Errorf("Subscribe to a group that is none: %v, want an OpError", err)
	}
}

func BenchmarkExecute(b *testing.B) {
	c := dial(b, nstest.New(b))
	var batch nl.Batch
	addBridge(&batch, "br0")
	if err := c.Execute(&batch); err != nil {
		b.Fatal(err)
	}
	b.Run("one get", func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			batch.Reset()
			getLink(&batch, "br0", func(nl.Message) error { return nil })
			if err := c.Execute(&batch); err != nil {
				b.Fatal(err)
			}
		}
	})
	b.Run("ten changes", func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			batch.Reset()
			for range 10 {
				batch.Request("set link", nl.Name("br0"), unix.RTM_NEWLINK, 0, func(e *nl.Encoder) {
					e.Raw(make([]byte, unix.SizeofIfInfomsg))
					e.String(unix.IFLA_IFNAME, "br0")
					e.String(unix.IFLA_IFALIAS, "x")
				})
			}
			if err := c.Execute(&batch); err != nil {
				b.Fatal(err)
			}
		}
	})
}

func BenchmarkDial(b *testing.B) {
	ns := nstest.New(b)
	for name, cfg := range map[string]*nl.Config{"here": nil, "in a namespace": {NetNS: ns}} {
		b.Run(name, func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				c, err := nl.Dial(unix.NETLINK_ROUTE, cfg)
				if err != nil {
					b.Fatal(err)
				}
				c.Close()
			}
		})
	}
}
