package bridge_test

import (
	"context"
	"errors"
	"io/fs"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nltest"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
)

// What a caller does before the port comes up is done once it is a port with all its
// attributes, so that the port of a pod that sends at once has a limit or a filter already.
func TestBeforeUpIsCalledWhileThePortIsDownOnItsBridge(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	pod := nstest.New(t)
	p := port(5)
	p.Hairpin = true
	var calls int
	p.BeforeUp = func(_ context.Context, index int) error {
		calls++
		l, err := n.conn.Link(t.Context(), p.Name)
		if err != nil {
			return err
		}
		expect.That(t, l.Index == index && !l.Up && l.Master != 0 && l.Alias == p.Alias,
			"called with index %d of %+v", index, l)
		expect.Contains(t, nstest.Run(t, n.ns, "bridge", "-d", "link", "show", "dev", p.Name), "hairpin on", "the port has not its attributes yet")
		nstest.Run(t, n.ns, "tc", "qdisc", "add", "dev", p.Name, "root", "tbf", "rate", "8mbit", "burst", "10k", "limit", "30k")
		return nil
	}
	a, err := n.conn.Attach(t.Context(), pod, p)
	must.That(t, err == nil && calls == 1, "called %d times, %v", calls, err)
	l, err := n.conn.Link(t.Context(), p.Name)
	expect.That(t, err == nil && l.Up && l.Index == a.Index, "afterwards the port is %+v, %v", l, err)
	expect.Contains(t, nstest.Run(t, n.ns, "tc", "qdisc", "show", "dev", p.Name), "tbf", "what was put on it is gone")
	// Enslave mends a port that is up, and calls nothing.
	nstest.Run(t, n.ns, "ip", "link", "set", p.Name, "down")
	if err := n.conn.Enslave(t.Context(), p); err != nil || calls != 1 {
		t.Errorf("Enslave: %v, and %d calls", err, calls)
	}
	if l, err := n.conn.Link(t.Context(), p.Name); err != nil || !l.Up {
		t.Errorf("after Enslave the port is %+v, %v", l, err)
	}
}

func TestAttachIsUndoneWhenBeforeUpOrTheComingUpFails(t *testing.T) {
	t.Parallel()
	refused := errors.New("not this one")
	up := nltest.Fault{Type: unix.RTM_NEWLINK, Nth: 3, Errno: unix.ENOBUFS}
	for name, c := range map[string]struct {
		faults []*nltest.Fault
		err    error
		want   error
	}{
		"BeforeUp":      {nil, refused, refused},
		"the coming up": {[]*nltest.Fault{&up}, nil, unix.ENOBUFS},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			n := newNode(t)
			pod := nstest.New(t)
			p := port(5)
			var called bool
			p.BeforeUp = func(context.Context, int) error { called = true; return c.err }
			_, err := faultyConn(t, n, c.faults, nil).Attach(t.Context(), pod, p)
			expect.That(t, errors.Is(err, c.want) && called, "error is %v, called %t", err, called)
			expect.Is(t, expect.Err(n.conn.Link(t.Context(), p.Name)), fs.ErrNotExist, "the port is there")
			out := nstest.Run(t, pod, "ip", "-o", "link")
			expect.That(t, strings.Count(out, "\n") == 1, "the pod has more than lo:\n%s", out)
			if c.faults != nil {
				nltest.MustHaveFired(t, c.faults[0])
			}
		})
	}
}
