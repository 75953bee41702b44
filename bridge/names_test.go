package bridge_test

import (
	"errors"
	"io/fs"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo"
	"github.com/tombolo-cni/tombolo/bridge"
	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
)

// The kernel makes a bridge for each call of such a name, and none has it.
func TestNamesThatTheKernelWouldNumberAreRefused(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	links := func() int { return strings.Count(nstest.Run(t, n.ns, "ip", "-o", "link"), "\n") }
	before := links()
	for range 2 {
		nstest.Run(t, n.ns, "ip", "link", "add", "kernel%d", "type", "bridge")
	}
	must.That(t, links() == before+2, "the kernel numbers no bridges")
	before = links()
	for _, name := range []string{"br%d", "%d", "br%", "100%x"} {
		_, err := n.conn.Ensure(t.Context(), bridge.Bridge{Name: name})
		expect.That(t, errors.Is(err, tombolo.ErrInvalid) && strings.Contains(err.Error(), "percent sign"), "Ensure of %q: %v", name, err)
		p := port(0)
		p.Name = name
		expect.Is(t, n.conn.Enslave(t.Context(), p), tombolo.ErrInvalid, "Enslave of %q", name)
		expect.Is(t, expect.Err(n.conn.Attach(t.Context(), nstest.New(t), p)), tombolo.ErrInvalid, "Attach as %q", name)
		p.Name, p.Peer = port(0).Name, name
		expect.Is(t, expect.Err(n.conn.Attach(t.Context(), nstest.New(t), p)), tombolo.ErrInvalid, "Attach to %q", name)
	}
	if links() != before {
		t.Errorf("%d links, where there were %d", links(), before)
	}
}

// The kernel reads a name to its NUL: of somebody else's link, that is. It refuses one of 16 bytes.
func TestNamesThatTheKernelWouldEndAreOfNoLink(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	ctx, name := t.Context(), n.link.Name
	must.Succeed(t, n.conn.SetAlias(ctx, name, "", "mine"))
	expect.Is(t, n.conn.SetAlias(ctx, name, "mine", "yours\x00"), tombolo.ErrInvalid, "an alias")
	for _, longer := range []string{name + "\x00x", "sixteen-bytes-xx"} {
		for what, err := range map[string]error{
			"Link":       func() error { _, err := n.conn.Link(ctx, longer); return err }(),
			"Shut":       n.conn.Shut(ctx, longer, "mine"),
			"SetPortMTU": n.conn.SetPortMTU(ctx, longer, 1400),
			"SetAlias":   n.conn.SetAlias(ctx, longer, "mine", "yours"),
			"Detach":     n.conn.Detach(ctx, longer, "mine"),
			"Remove":     n.conn.Remove(ctx, longer),
		} {
			expect.Is(t, err, tombolo.ErrInvalid, "%s of %q", what, longer)
		}
	}
	l, err := n.conn.Link(ctx, name)
	expect.That(t, err == nil && l.Alias == "mine" && l.Up && l.MTU == n.link.MTU, "the link is now %+v, %v", l, err)
}

func TestNumbersThatDoNotFitAreOfNoLink(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	ctx, index := t.Context(), n.link.Index+1<<32
	l, err := n.conn.LinkByIndex(ctx, index)
	expect.That(t, errors.Is(err, fs.ErrNotExist), "LinkByIndex: %+v, %v", l, err)
	list, err := n.conn.Ports(ctx, index)
	expect.That(t, len(list) == 0, "Ports: %v, %v", list, err)
	list, err = n.conn.Ports(ctx, 0)
	expect.That(t, errors.Is(err, tombolo.ErrInvalid) && len(list) == 0, "Ports of no bridge: %v, %v", list, err)
	l, _, err = ensure(t, n.conn, bridge.Bridge{Name: n.link.Name, MTU: 1400 + 1<<32})
	expect.That(t, errors.Is(err, unix.EINVAL), "an MTU: %+v, %v", l, err)
}
