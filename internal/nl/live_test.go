package nl_test

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"strings"
	"sync"
	"testing"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo"
	"github.com/tombolo-cni/tombolo/internal/nl"
	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
	"github.com/tombolo-cni/tombolo/netns"
)

func TestMain(m *testing.M) { nstest.Main(m) }

func dial(tb testing.TB, ns *netns.NS) *nl.Conn {
	tb.Helper()
	c := must.Of(nl.Dial(unix.NETLINK_ROUTE, ns)).Get(tb)
	tb.Cleanup(func() { c.Close() })
	return c
}

// addBridge appends a request that makes a bridge, which takes less of a kernel
// than other links.
func addBridge(b *nl.Batch, name string) {
	addLink(b, nl.Name(name), netlink.Create|netlink.Excl, func(ae *netlink.AttributeEncoder) {
		ae.String(unix.IFLA_IFNAME, name)
		ofKind(ae, "bridge")
	})
}

func addLink(b *nl.Batch, name fmt.Stringer, flags netlink.HeaderFlags, attrs func(*netlink.AttributeEncoder)) {
	m, err := nl.Encode(unix.RTM_NEWLINK, flags, make([]byte, unix.SizeofIfInfomsg), attrs)
	b.Add("add link", name, m, err)
}

func ofKind(ae *netlink.AttributeEncoder, kind string) {
	ae.Nested(unix.IFLA_LINKINFO, func(ae *netlink.AttributeEncoder) error {
		ae.String(unix.IFLA_INFO_KIND, kind)
		return nil
	})
}

func listLinks() netlink.Message {
	return netlink.Message{Header: netlink.Header{Type: unix.RTM_GETLINK}, Data: make([]byte, unix.SizeofIfInfomsg)}
}

func getLink(b *nl.Batch, name string, reply func(netlink.Message) error) {
	m, err := nl.Encode(unix.RTM_GETLINK, 0, make([]byte, unix.SizeofIfInfomsg), func(ae *netlink.AttributeEncoder) {
		ae.String(unix.IFLA_IFNAME, name)
	})
	b.AddGet("get link", nl.Name(name), m, err, reply)
}

func linkName(m netlink.Message) (name string) {
	nl.Decode(m.Data[unix.SizeofIfInfomsg:], func(ad *netlink.AttributeDecoder) {
		if ad.Type() == unix.IFLA_IFNAME {
			name = ad.String()
		}
	})
	return name
}

func TestSocketBelongsToTheNamespaceItWasOpenedFor(t *testing.T) {
	t.Parallel()
	a, b := nstest.New(t), nstest.New(t)
	ca, cb := dial(t, a), dial(t, b)
	var batch nl.Batch
	addBridge(&batch, "br0")
	must.Succeed(t, ca.Execute(&batch))
	var get nl.Batch
	name := ""
	getLink(&get, "br0", func(m netlink.Message) error { name = linkName(m); return nil })
	err := ca.Execute(&get)
	expect.That(t, err == nil && name == "br0", "where it was made: link %q, %v", name, err)
	get.Reset()
	getLink(&get, "br0", nil)
	expect.Is(t, cb.Execute(&get), fs.ErrNotExist, "elsewhere")
	own := must.Of(nl.Dial(unix.NETLINK_ROUTE, nil)).Get(t)
	defer own.Close()
	get.Reset()
	getLink(&get, "lo", nil)
	expect.Success(t, own.Execute(&get), "in the test's own")
}

func TestKernelsOwnWordsAreInTheError(t *testing.T) {
	t.Parallel()
	c := dial(t, nstest.New(t))
	for _, tt := range []struct {
		name string
		add  func(*nl.Batch)
		want string
	}{
		{"with a text", func(b *nl.Batch) {
			addLink(b, nl.Name("x"), netlink.Create, func(ae *netlink.AttributeEncoder) { ofKind(ae, "nonsense") })
		}, "add link x: operation not supported (kernel: Unknown device type)"},
		{"without", func(b *nl.Batch) { getLink(b, "none", nil) }, "get link none: no such device"},
		{"of strict checking", func(b *nl.Batch) {
			m := netlink.Message{Header: netlink.Header{Type: unix.RTM_GETLINK}, Data: []byte{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}}
			b.AddGet("get link", nl.Name("lo"), m, nil, nil)
		}, "get link lo: invalid argument (kernel: Invalid values in header for get link request)"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			var b nl.Batch
			tt.add(&b)
			err := c.Execute(&b)
			expect.That(t, err != nil && err.Error() == tt.want, "got  %v\nwant %s", err, tt.want)
		})
	}
}

func TestLaterRequestsRunAfterAnEarlierOneFailed(t *testing.T) {
	t.Parallel()
	c := dial(t, nstest.New(t))
	var b nl.Batch
	addBridge(&b, "br0")
	addBridge(&b, "br0")
	addBridge(&b, "br1")
	err := c.Execute(&b)
	if !errors.Is(err, fs.ErrExist) || b.Err(0) != nil || b.Err(1) == nil || b.Err(2) != nil {
		t.Errorf("Execute: %v; errors %q, want only the second to exist", err, errs(&b))
	}
}

func TestAnswersOfALargeBatchAllArrive(t *testing.T) {
	t.Parallel()
	nstest.RequireInitialUserNS(t)
	ns := nstest.New(t)
	c := dial(t, ns)
	var first nl.Batch
	addBridge(&first, "br0")
	must.Succeed(t, c.Execute(&first))
	for _, n := range []int{40, 300, 3000} {
		t.Run(fmt.Sprint(n, " acknowledgements"), func(t *testing.T) {
			var b nl.Batch
			for range n {
				addBridge(&b, "br0")
			}
			c.Execute(&b)
			for i := range n {
				err := b.Err(i)
				must.That(t, errors.Is(err, fs.ErrExist), "request %d of %d: %v, want %v", i, n, err, fs.ErrExist)
			}
		})
		t.Run(fmt.Sprint(n, " links"), func(t *testing.T) {
			var b nl.Batch
			got := 0
			for range n {
				getLink(&b, "br0", func(m netlink.Message) error { got++; return nil })
			}
			err := c.Execute(&b)
			expect.That(t, err == nil && got == n, "%d links, %v, want %d", got, err, n)
		})
	}
}

// TestConnectionOutlivesLostAnswers takes room from a socket that a test opened
// itself, so that the kernel drops answers.
func TestConnectionOutlivesLostAnswers(t *testing.T) {
	t.Parallel()
	ns := nstest.New(t)
	tr := lossy(t, ns)
	c := nl.New(tr)
	var b nl.Batch
	for range 40 {
		addBridge(&b, "br0")
	}
	err := c.Execute(&b)
	must.That(t, errors.Is(err, unix.ENOBUFS), "Execute: %v, want %v: the fault did not fire", err, unix.ENOBUFS)
	lost := 0
	for i := range b.Len() {
		if errors.Is(b.Err(i), unix.ENOBUFS) {
			lost++
		}
	}
	expect.That(t, lost != 0, "no request has the error of its lost answer")
	b.Reset()
	name := ""
	getLink(&b, "br0", func(m netlink.Message) error { name = linkName(m); return nil })
	err = c.Execute(&b)
	expect.That(t, err == nil && name == "br0", "the next request: link %q, %v", name, err)
}

// smallSocket is a netlink socket with the smallest receive buffer.
type smallSocket struct{ fd int }

func lossy(tb testing.TB, ns *netns.NS) nl.Transport {
	tb.Helper()
	s := &smallSocket{}
	must.Succeed(tb, ns.Do(func() error {
		var err error
		s.fd, err = unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.NETLINK_ROUTE)
		return err
	}))
	tb.Cleanup(func() { unix.Close(s.fd) })
	must.Succeed(tb, unix.SetsockoptInt(s.fd, unix.SOL_SOCKET, unix.SO_RCVBUF, 1))
	return s
}

func (s *smallSocket) Send(b []byte) error {
	return unix.Sendto(s.fd, b, 0, &unix.SockaddrNetlink{Family: unix.AF_NETLINK})
}

func (s *smallSocket) Receive(b []byte) (int, error) {
	n, _, err := unix.Recvfrom(s.fd, b, unix.MSG_DONTWAIT)
	if errors.Is(err, unix.EAGAIN) {
		return 0, nl.ErrEmpty
	}
	return n, err
}

func (s *smallSocket) Close() error { return nil }

// corrupting spoils the first datagram that it receives.
type corrupting struct {
	nl.Transport
	done bool
}

func (c *corrupting) Receive(b []byte) (int, error) {
	n, err := c.Transport.Receive(b)
	if err == nil && !c.done {
		c.done = true
		return 3, nil
	}
	return n, err
}

func TestConnectionOutlivesABrokenDump(t *testing.T) {
	t.Parallel()
	tr := must.Of(nl.Open(unix.NETLINK_ROUTE, nstest.New(t))).Get(t)
	defer tr.Close()
	var b nl.Batch
	for i := range 60 { // more than the kernel puts into one part
		addBridge(&b, fmt.Sprint("br", i))
	}
	must.Succeed(t, nl.New(tr).Execute(&b))
	c := nl.New(&corrupting{Transport: tr})
	links := 0
	list := func() error {
		return c.List(context.Background(), "list links", listLinks(), nil, func(netlink.Message) error { links++; return nil })
	}
	if err := list(); !errors.Is(err, nl.ErrMalformed) {
		t.Fatalf("the first dump: %v, want %v: the fault did not fire", err, nl.ErrMalformed)
	}
	err := list()
	expect.That(t, err == nil && links >= 61, "the second dump: %d links, %v, want 61 or more", links, err)
}

func TestConnectionIsSharedByGoroutines(t *testing.T) {
	t.Parallel()
	c := dial(t, nstest.New(t))
	var setUp nl.Batch
	const n = 8
	for i := range n {
		addBridge(&setUp, fmt.Sprint("br", i))
	}
	must.Succeed(t, c.Execute(&setUp))
	var wg sync.WaitGroup
	for i := range n {
		wg.Go(func() {
			want := fmt.Sprint("br", i)
			for range 50 {
				got := ""
				var b nl.Batch
				getLink(&b, want, func(m netlink.Message) error { got = linkName(m); return nil })
				err := c.Execute(&b)
				expect.That(t, err == nil && got == want, "link %q, %v, want %s", got, err, want)
			}
		})
		wg.Go(func() {
			for range 10 {
				links := 0
				err := c.List(context.Background(), "list links", listLinks(), nil, func(m netlink.Message) error {
					if strings.HasPrefix(linkName(m), "br") {
						links++
					}
					return nil
				})
				expect.That(t, err == nil && links == n, "%d links, %v, want %d", links, err, n)
			}
		})
	}
	wg.Wait()
}

func TestDialSaysWhatItCannotOpen(t *testing.T) {
	t.Parallel()
	_, err := nl.Dial(4711, nil)
	var opErr *tombolo.OpError
	expect.That(t, errors.As(err, &opErr) && errors.Is(err, unix.EPROTONOSUPPORT),
		"Dial: %v, want an OpError with %v", err, unix.EPROTONOSUPPORT)
	ns := nstest.New(t)
	ns.Close()
	expect.Is(t, expect.Err(nl.Dial(unix.NETLINK_ROUTE, ns)), unix.EBADF, "Dial in a namespace whose handle is closed")
}
