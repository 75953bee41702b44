package teardown_test

import (
	"io/fs"
	"log/slog"
	"net/netip"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/tombolo-cni/tombolo/bridge"
	"github.com/tombolo-cni/tombolo/internal/lockorder"
	"github.com/tombolo-cni/tombolo/internal/state"
	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
	"github.com/tombolo-cni/tombolo/ipam"
	"github.com/tombolo-cni/tombolo/network"
	"github.com/tombolo-cni/tombolo/network/internal/session"
	"github.com/tombolo-cni/tombolo/network/internal/teardown"
	"github.com/tombolo-cni/tombolo/nft"
)

func TestMain(m *testing.M) {
	os.Setenv(lockorder.Variable, "1")
	nstest.Main(m)
}

// Collect lists first, and gives others their turn before it looks at each.
func TestCollectLeavesAloneWhatCameSinceItsList(t *testing.T) {
	t.Parallel()
	host, pod := nstest.New(t), nstest.New(t)
	path := filepath.Join(t.TempDir(), "state")
	node, err := network.Open(t.Context(), &network.Config{StateDir: path})
	must.Succeed(t, err)
	nw := &network.Network{Name: "pods", Bridge: "cbr0", Gateway: true}
	p := &network.Pod{
		ContainerID: "c1", IfName: "eth0", NetNS: pod, Path: nstest.Path(t, pod),
		Addresses: []ipam.Address{{Prefix: netip.MustParsePrefix("10.61.0.2/24"), Gateway: netip.MustParseAddr("10.61.0.1")}},
	}
	inHost := func(do func() error) {
		t.Helper()
		must.Succeed(t, host.Do(do))
	}
	inside := func(do func(*session.Session) error) {
		t.Helper()
		inHost(func() error { return withSession(path, do) })
	}
	add := func() (made *network.Attachment) {
		t.Helper()
		inHost(func() (err error) { made, err = node.Add(t.Context(), nw, p); return err })
		return made
	}
	mustBeAsMade := func() {
		t.Helper()
		inHost(func() error {
			diffs, err := node.Check(t.Context(), nw, p)
			if len(diffs) > 0 {
				t.Errorf("it differs: %v", diffs)
			}
			return err
		})
	}
	made := add()
	hash := made.Port[len("veth"):]
	began := time.Now()
	collect := func(r *teardown.Listed) {
		t.Helper()
		inside(func(s *session.Session) error {
			gone := &teardown.Teardown{
				Session: s, Network: "pods", Step: func(string) error { return nil },
				Allocator: func(*teardown.Origin) (ipam.Allocator, error) { return nil, nil },
			}
			return gone.CollectOne(t.Context(), r, began)
		})
	}
	list := func() (found map[string]*teardown.Listed) {
		t.Helper()
		inside(func(s *session.Session) (err error) { found, err = teardown.List(t.Context(), s, "pods"); return err })
		return found
	}
	listed := list()
	if listed[hash] == nil {
		t.Fatalf("listed %v", listed)
	}
	inHost(func() error { return node.Del(t.Context(), made.Key, nil) })
	add()
	collect(listed[hash])
	mustBeAsMade()
	// What had no record then has one now.
	collect(teardown.Unlisted(hash))
	mustBeAsMade()
	// And what it listed as it is, goes.
	collect(list()[hash])
	inside(func(s *session.Session) error {
		expect.Is(t, expect.Err(s.Links.Link(t.Context(), made.Port)), fs.ErrNotExist, "its port is left")
		return nil
	})
}

// withSession opens the node in the namespace of the caller's thread.
func withSession(path string, do func(*session.Session) error) error {
	dir, err := state.Open(path)
	if err != nil {
		return err
	}
	s, err := session.Open(session.Config{
		Dir: dir, Log: slog.New(slog.DiscardHandler), DialFirewall: nft.Dial,
		DialBridge: func() (*bridge.Conn, error) { return bridge.Dial(nil) },
	})
	if err != nil {
		return err
	}
	defer s.Close()
	return do(s)
}
