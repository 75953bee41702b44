package nl_test

import (
	"context"
	"errors"
	"os"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo"
	"github.com/tombolo-cni/tombolo/internal/nl"
	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
	"github.com/tombolo-cni/tombolo/netns"
)

func TestWatchHearsWhatHappensInItsNamespace(t *testing.T) {
	t.Parallel()
	ns := nstest.New(t)
	w, err := nl.Subscribe(unix.NETLINK_ROUTE, ns, unix.RTNLGRP_LINK)
	must.Succeed(t, err)
	defer w.Close()
	elsewhere := dial(t, nstest.New(t))
	here := dial(t, ns)
	heard := make(chan error)
	go func() { _, err := w.Next(t.Context()); heard <- err }()
	var b nl.Batch
	addBridge(&b, "br0")
	must.Succeed(t, elsewhere.Execute(&b))
	select {
	case err := <-heard:
		t.Fatalf("heard of another namespace's link: %v", err)
	default:
	}
	b.Reset()
	addBridge(&b, "br0")
	must.Succeed(t, here.Execute(&b))
	expect.Success(t, <-heard)
}

func TestWatchGivesWhatIsQueuedWithoutWaiting(t *testing.T) {
	t.Parallel()
	ns := nstest.New(t)
	w := must.Of(nl.Subscribe(unix.NETLINK_ROUTE, ns, unix.RTNLGRP_LINK)).Get(t)
	defer w.Close()
	expect.Of(w.Queued()).Len(t, 0, "before anything happened")
	var b nl.Batch
	addBridge(&b, "br0")
	must.Succeed(t, dial(t, ns).Execute(&b))
	// The kernel announces before it acknowledges.
	if list, err := w.Queued(); err != nil || len(list) == 0 || list[0].Header.Type != unix.RTM_NEWLINK {
		t.Errorf("after a link was added: %v, %v", list, err)
	}
}

func TestWatchEndsWithItsContext(t *testing.T) {
	t.Parallel()
	w, err := nl.Subscribe(unix.NETLINK_ROUTE, nstest.New(t), unix.RTNLGRP_LINK)
	must.Succeed(t, err)
	defer w.Close()
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error)
	go func() { _, err := w.Next(ctx); ended <- err }()
	cancel()
	expect.Is(t, <-ended, context.Canceled, "Next")
	expect.Is(t, expect.Err(w.Next(ctx)), context.Canceled, "Next with a context that is done")
}

// Once something is lost the kernel goes on losing until the queue has been read. A
// caller that looks for itself when it is told must not have to look again.
func TestLossIsToldOnceNothingMoreCanBeLost(t *testing.T) {
	t.Parallel()
	nstest.RequireInitialUserNS(t)
	type listener struct {
		next  func() ([]netlink.Message, error)
		close func() error
	}
	for name, subscribe := range map[string]func(*netns.NS) (listener, error){
		"watch, waiting": func(ns *netns.NS) (listener, error) {
			w, err := nl.Subscribe(unix.NETLINK_ROUTE, ns, unix.RTNLGRP_LINK)
			return listener{func() ([]netlink.Message, error) { return w.Next(t.Context()) }, w.Close}, err
		},
		"watch, not waiting": func(ns *netns.NS) (listener, error) {
			w, err := nl.Subscribe(unix.NETLINK_ROUTE, ns, unix.RTNLGRP_LINK)
			return listener{w.Queued, w.Close}, err
		},
		"feed": func(ns *netns.NS) (listener, error) {
			f, err := nl.FollowOnly(unix.NETLINK_ROUTE, ns, nil, unix.RTNLGRP_LINK)
			return listener{f.Next, f.Close}, err
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			ns := nstest.New(t)
			l := must.Of(subscribe(ns)).Get(t)
			defer l.close()
			c := dial(t, ns)
			var b nl.Batch
			addBridge(&b, "br0")
			// More than there is room for.
			for i := range 400 {
				setQueueLength(&b, "br0", uint32(100+i))
			}
			must.Succeed(t, c.Execute(&b))
			must.Succeed(t, expect.Err(l.next()), "the first announcement")
			const unheard, heard = 1000, 2000
			b.Reset()
			setQueueLength(&b, "br0", unheard)
			must.Succeed(t, c.Execute(&b))
			for {
				list, err := l.next()
				if errors.Is(err, unix.ENOBUFS) {
					break
				}
				must.That(t, err == nil && len(list) > 0, "got %v, %v before %v", list, err, unix.ENOBUFS)
				must.That(t, !slices.Contains(queueLengths(t, list), unheard),
					"the kernel announced what came after a loss: the fault did not fire")
			}
			b.Reset()
			setQueueLength(&b, "br0", heard)
			must.Succeed(t, c.Execute(&b))
			list, err := l.next()
			diff := cmp.Diff([]uint32{heard}, queueLengths(t, list))
			expect.That(t, diff == "" && err == nil, "heard after the loss was told: (-want +got)\n%s, %v", diff, err)
		})
	}
}

func setQueueLength(b *nl.Batch, link string, n uint32) {
	m, err := nl.Encode(unix.RTM_NEWLINK, 0, make([]byte, unix.SizeofIfInfomsg), func(ae *netlink.AttributeEncoder) {
		ae.String(unix.IFLA_IFNAME, link)
		ae.Uint32(unix.IFLA_TXQLEN, n)
	})
	b.Add("set link", nl.Name(link), m, err)
}

func queueLengths(t *testing.T, list []netlink.Message) (lengths []uint32) {
	t.Helper()
	for _, m := range list {
		must.Succeed(t, nl.Decode(m.Data[unix.SizeofIfInfomsg:], func(ad *netlink.AttributeDecoder) {
			if ad.Type() == unix.IFLA_TXQLEN {
				lengths = append(lengths, ad.Uint32())
			}
		}))
	}
	return lengths
}

func TestSubscribeSaysWhatItCannotDo(t *testing.T) {
	t.Parallel()
	_, err := nl.Subscribe(unix.NETLINK_ROUTE, nil, 4711)
	var opErr *tombolo.OpError
	expect.That(t, errors.As(err, &opErr), "Subscribe to a group that is none: %v, want an OpError", err)
}

// A number that is closed twice may be another file's by then, and what is read from it is too.
func TestWatchThatIsClosedUsesNoOtherFile(t *testing.T) {
	ns := nstest.New(t)
	w, err := nl.Subscribe(unix.NETLINK_ROUTE, ns, unix.RTNLGRP_LINK)
	must.Succeed(t, err)
	ended := make(chan error)
	go func() { _, err := w.Next(t.Context()); ended <- err }()
	expect.Success(t, w.Close())
	expect.Is(t, <-ended, tombolo.ErrInvalid, "the Next that waited")
	// It gets the number that is free.
	other, err := os.Open(os.DevNull)
	must.Succeed(t, err)
	defer other.Close()
	_, next := w.Next(t.Context())
	_, queued := w.Queued()
	for verb, err := range map[string]error{"Next": next, "Queued": queued, "Close": w.Close()} {
		expect.Is(t, err, tombolo.ErrInvalid, "%s of one that is closed", verb)
	}
	expect.Success(t, expect.Err(other.Stat()), "the other file")
}
