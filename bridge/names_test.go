package bridge_test

import (
	"errors"
	"strings"
	"testing"

	"github.com/tombolo-cni/tombolo/bridge"
	"github.com/tombolo-cni/tombolo/internal/nstest"
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
	if links() != before+2 {
		t.Fatal("the kernel numbers no bridges")
	}
	before = links()
	for _, name := range []string{"br%d", "%d", "br%", "100%x"} {
		if _, _, err := n.conn.Ensure(t.Context(), bridge.Bridge{Name: name}); !errors.Is(err, bridge.ErrInvalid) || !strings.Contains(err.Error(), "percent sign") {
			t.Errorf("Ensure of %q: %v", name, err)
		}
		p := port(0)
		p.Name = name
		if err := n.conn.Enslave(t.Context(), p); !errors.Is(err, bridge.ErrInvalid) {
			t.Errorf("Enslave of %q: %v", name, err)
		}
		if _, err := n.conn.Attach(t.Context(), nstest.New(t), p); !errors.Is(err, bridge.ErrInvalid) {
			t.Errorf("Attach as %q: %v", name, err)
		}
		p.Name, p.Peer = port(0).Name, name
		if _, err := n.conn.Attach(t.Context(), nstest.New(t), p); !errors.Is(err, bridge.ErrInvalid) {
			t.Errorf("Attach to %q: %v", name, err)
		}
	}
	if links() != before {
		t.Errorf("%d links, where there were %d", links(), before)
	}
}
