package cni

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/ident"
	"github.com/tombolo-cni/tombolo/internal/state"
	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nltest"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
)

// Whichever step of a DEL fails, the record stays: by it a later DEL or GC finds the rest.
func TestDELThatFailsIsFinishedByTheNextDELOrGC(t *testing.T) {
	t.Parallel()
	for name, tt := range map[string]struct {
		side  string
		typ   uint16 // of the requests that fail
		spoil func(*testing.T, *node) (mend func())
	}{
		"the firewall": {side: "firewall", typ: nftType(unix.NFT_MSG_DELSETELEM)},
		"the port":     {side: "host", typ: unix.RTM_DELLINK},
		"the reservation": {spoil: func(t *testing.T, n *node) func() {
			return replaceByDirectory(t, filepath.Join(n.stateDir, "ipam", "pods", "lock"))
		}},
	} {
		for _, verb := range []string{"DEL", "GC"} {
			nstest.RunParallel(t, name+", then "+verb, func(t *testing.T) {
				n := newNode(t)
				addNeighbour(t, n)
				before := n.belongings(t)
				n.run(t, n.plugin(), "ADD", everything()).must(t)
				p, mend := n.plugin(), func() {}
				if tt.spoil != nil {
					mend = tt.spoil(t, n)
				} else {
					fault := &nltest.Fault{Type: tt.typ, Errno: unix.ENOBUFS}
					nltest.MustHaveFired(t, fault)
					p = n.faulty(tt.side, fault)
				}
				a := n.run(t, p, "DEL", everything())
				must.That(t, a.err != nil, "DEL succeeded")
				hash := ident.Hash("pods", "c1", "eth0")
				left := n.belongings(t).Records
				expect.That(t, strings.Contains(strings.Join(left, " "), hash), "the record is gone: %v", left)
				mend()
				if verb == "DEL" {
					n.run(t, n.plugin(), "DEL", everything()).must(t)
				} else {
					n.runWith(t, n.plugin(), map[string]string{"CNI_COMMAND": "GC", "CNI_PATH": "/opt/cni/bin"}, map[string]any{
						"cni.dev/valid-attachments": []any{map[string]any{"containerID": "neighbour", "ifname": "eth0"}},
					}).must(t)
				}
				n.mustHave(t, before)
			})
		}
	}
}

// replaceByDirectory puts a directory in a file's place, and gives what takes it away.
func replaceByDirectory(t *testing.T, path string) func() {
	t.Helper()
	must.Succeed(t, errors.Join(os.Rename(path, path+".aside"), os.Mkdir(path, 0o755)))
	return func() {
		must.Succeed(t, errors.Join(os.Remove(path), os.Rename(path+".aside", path)))
	}
}

// After a boot no ADD comes before STATUS says that there can be one.
func TestSTATUSAfterABootIsReady(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	n.run(t, n.plugin(), "ADD", nil).must(t)
	dir, err := state.Open(n.stateDir)
	must.Succeed(t, err)
	epoch, err := dir.Epoch()
	must.Succeed(t, err)
	path := filepath.Join(n.stateDir, "epoch")
	content, err := os.ReadFile(path)
	must.Succeed(t, err)
	for content, want := range map[string]error{
		strings.ReplaceAll(string(content), epoch.Boot, "00000000-1111-2222-3333-444444444444"): state.ErrStale,
		"{": state.ErrDamaged, // by a power failure
	} {
		must.Succeed(t, os.WriteFile(path, []byte(content), 0o600))
		expect.Is(t, expect.Err(dir.Epoch()), want, "the epoch is read with")
		n.run(t, n.plugin(), "STATUS", nil).must(t)
	}
}
