package cni

import (
	"context"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/ipam/delegate"
	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
)

func makeFIFO(path string) error { return unix.Mkfifo(path, 0o600) }

// reference is the directory with the reference plugins, of containernetworking/plugins v1.9.1.
func reference(t *testing.T) string {
	t.Helper()
	dir := os.Getenv("TOMBOLO_PEERS")
	if dir == "" {
		t.Skip("peers not built: set TOMBOLO_PEERS to a directory with host-local of containernetworking/plugins v1.9.1")
	}
	must.Succeed(t, expect.Err(delegate.Find("host-local", dir)), "TOMBOLO_PEERS")
	return dir
}

// shared is a node whose config names its dataDir, so that the reference uses the same.
func shared(t *testing.T, sets string) *ipamNode {
	t.Helper()
	n := newIPAMNode(t, "")
	n.conf = `{"cniVersion":"1.1.0","name":"lan","type":"tombolo","ipam":{"type":"host-local","dataDir":"` + n.dataDir + `","ranges":[` + sets + `]}}`
	return n
}

func TestTheReferenceCanBeDelegatedTo(t *testing.T) {
	t.Parallel()
	dir := reference(t)
	n := shared(t, `[{"subnet":"fd00::/64"}],[{"subnet":"10.1.0.0/24"}]`)
	// host-local itself is served in process, so the reference goes by another name here.
	path := t.TempDir()
	must.Succeed(t, os.Symlink(filepath.Join(dir, "host-local"), filepath.Join(path, "theirs")))
	n.conf = strings.Replace(n.conf, `"host-local"`, `"theirs"`, 1)
	r := n.request("a")
	r.Path, r.Environ, r.NetNS = path, os.Environ(), "/run/netns/a"
	a := n.allocator(r)
	ctx := context.Background()
	result, err := a.Add(ctx)
	must.Succeed(t, err)
	expect.Equal(t, addressesOf(result), "fd00::2,10.1.0.2")
	for verb, err := range map[string]error{"Check": a.Check(ctx, result), "Status": a.Status(ctx), "GC": a.GC(ctx, nil)} {
		expect.Success(t, err, "%s", verb)
	}
	expect.Says(t, expect.Err(a.Add(ctx)), "duplicate allocation", "the second ADD")
	expect.Success(t, a.Del(ctx, nil))
	n.expect(map[string]string{"last_reserved_ip.0": "fd00::2", "last_reserved_ip.1": "10.1.0.2"})
}
