package bridge_test

import (
	"errors"
	"io/fs"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/bridge"
	"github.com/tombolo-cni/tombolo/internal/nl/nltest"
	"github.com/tombolo-cni/tombolo/internal/nstest"
)

func TestRenameKeepsALinkAsItIs(t *testing.T) {
	t.Parallel()
	for name, faults := range map[string][]*nltest.Fault{
		"at once":             nil,
		"before Linux 6.2":    {{Type: unix.RTM_NEWLINK, Nth: 1, Errno: unix.EBUSY}},
		"before 6.2, and not": {{Type: unix.RTM_NEWLINK, Nth: 1, Errno: unix.EBUSY}, {Type: unix.RTM_NEWLINK, Nth: 2, Errno: unix.EEXIST}},
	} {
		t.Run(name, func(t *testing.T) {
			n := newNode(t)
			nstest.Run(t, n.ns, "sh", "-ec", "ip link add x type bridge; ip link set x up; ip addr add 10.1.0.1/24 dev x")
			conn := faultyConn(t, n, faults, nil)
			x, err := conn.Link(t.Context(), "x")
			if err != nil {
				t.Fatal(err)
			}
			err = conn.Rename(t.Context(), x.Index, "y")
			nltest.MustHaveFired(t, faults...)
			want := "y"
			if len(faults) == 2 {
				want = "x"
			}
			if (want == "y") != (err == nil) {
				t.Errorf("renamed: %v", err)
			}
			l, err := n.conn.Link(t.Context(), want)
			if err != nil || l.Index != x.Index || !l.Up {
				t.Fatalf("link %+v, %v", l, err)
			}
		})
	}
}

func TestRenameRefusesWhatCannotBe(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	for _, tt := range []struct {
		index int
		name  string
		cause error
	}{{0, "x", bridge.ErrInvalid}, {1, "a/b", bridge.ErrInvalid}, {1, "", bridge.ErrInvalid}, {99999, "x", fs.ErrNotExist}} {
		if err := n.conn.Rename(t.Context(), tt.index, tt.name); !errors.Is(err, tt.cause) {
			t.Errorf("link %d to %q: %v, want %v", tt.index, tt.name, err, tt.cause)
		}
	}
}
