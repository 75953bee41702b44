package ipam

import (
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
)

// A node is a machine with one network: what the requests of a test have in common.
type node struct {
	t       *testing.T
	dataDir string
	sets    string // as in a netconf
	epoch   Epoch
	live    func(context.Context) ([]Live, error)
	inUse   func(hash string) bool

	nstest.Warnings
}

// rangesOf reads range sets as the ipam section of a netconf has them.
func rangesOf(t testing.TB, sets string) []RangeSet {
	t.Helper()
	var confs [][]struct {
		Subnet                        netip.Prefix
		RangeStart, RangeEnd, Gateway netip.Addr
	}
	must.Succeed(t, json.Unmarshal([]byte("["+sets+"]"), &confs), "%s", sets)
	var list []RangeSet
	for _, conf := range confs {
		var set RangeSet
		for _, r := range conf {
			set.Ranges = append(set.Ranges, Range{Subnet: r.Subnet, RangeStart: r.RangeStart, RangeEnd: r.RangeEnd, Gateway: r.Gateway})
		}
		list = append(list, set)
	}
	return list
}

// small is a range of four addresses: 10.1.0.2 to .5, as .1 is the gateway.
const small = `[{"subnet":"10.1.0.0/29","rangeEnd":"10.1.0.5"}]`

func newNode(t *testing.T, sets string) *node {
	t.Helper()
	return &node{t: t, dataDir: t.TempDir(), sets: sets}
}

// dir is the directory of the network's reservations.
func (n *node) dir() string { return filepath.Join(n.dataDir, "lan") }

// A request is one attachment's, with what the node knows.
type request struct {
	Config
	Owner
	Node
	want []netip.Addr
}

// request is one of interface eth0 of this container.
func (n *node) request(id string) *request {
	return &request{
		Config: Config{
			Network:  "lan",
			Dir:      n.dataDir,
			Ranges:   rangesOf(n.t, n.sets),
			LockWait: time.Hour, // however busy the machine is
		},
		Owner: Owner{ContainerID: id, IfName: "eth0"},
		Node:  Node{Epoch: n.epoch, Live: n.live, InUse: n.inUse, Hash: hashOf, Warn: n.Warn},
	}
}

// An asker is an allocator with the attachment that it is asked for.
type asker struct {
	Allocator
	owner Owner
}

func (a asker) Add(ctx context.Context) (*Allocation, error) { return a.Allocator.Add(ctx, a.owner) }
func (a asker) Del(ctx context.Context, hint []netip.Addr) error {
	return a.Allocator.Del(ctx, a.owner, hint)
}
func (a asker) Check(ctx context.Context, held []Address) error {
	return a.Allocator.Check(ctx, a.owner, held)
}

func (r *request) open() (asker, error) {
	h, err := NewHostLocal(&r.Config)
	if err == nil && r.want != nil {
		h, err = h.Want(r.want...)
	}
	if err != nil {
		return asker{}, err
	}
	return asker{h.Bind(r.Node), r.Owner}, nil
}

func (r *request) store() *store {
	a, err := r.open()
	if err != nil {
		panic(err)
	}
	return &a.Allocator.(*HostLocal).store
}

func hashOf(o Owner) string {
	return fmt.Sprintf("%x", sha256.Sum256([]byte("lan "+o.ContainerID+" "+o.IfName)))[:11]
}

// allocator opens the reservations and fails the test where that fails.
func (n *node) allocator(r *request) asker {
	n.t.Helper()
	return must.Of(r.open()).Get(n.t, "NewHostLocal")
}

// add gives the container its addresses, and returns them with commas between.
func (n *node) add(id string) string {
	n.t.Helper()
	result := must.Of(n.tryAdd(n.request(id))).Get(n.t, "Add(%s)", id)
	return addressesOf(result)
}

func (n *node) tryAdd(r *request) (*Allocation, error) {
	n.t.Helper()
	return n.allocator(r).Add(context.Background())
}

// del releases the container's addresses, without a hint.
func (n *node) del(id string) {
	n.t.Helper()
	must.Succeed(n.t, n.allocator(n.request(id)).Del(context.Background(), nil), "Del(%s)", id)
}

func addressesOf(given *Allocation) string {
	var texts []string
	for _, addr := range resultAddrs(given) {
		texts = append(texts, addr.String())
	}
	return strings.Join(texts, ",")
}

func resultAddrs(given *Allocation) []netip.Addr {
	var list []netip.Addr
	for _, a := range given.Addresses {
		list = append(list, a.Prefix.Addr())
	}
	return list
}

// wantError checks what an error matches, and that its message holds text.
func wantError(t *testing.T, err error, sentinel error, text string) {
	t.Helper()
	expect.That(t, errors.Is(err, sentinel), "%v does not match %q", err, sentinel)
	expect.That(t, err != nil && strings.Contains(err.Error(), text), "message %v does not hold %q", err, text)
}

// wantIOError checks that an error is of a file, as well.
func wantIOError(t *testing.T, err error, sentinel error, text string) {
	t.Helper()
	expect.That(t, errors.As(err, new(*fs.PathError)), "%v holds no fs.PathError", err)
	wantError(t, err, sentinel, text)
}

// onThread runs f on a thread of its own, which then ends: what f changes of it (capabilities, mounts) goes with it.
func onThread(t *testing.T, f func()) {
	t.Helper()
	done := make(chan struct{})
	go func() {
		defer close(done)
		// Never unlocked, so that the thread ends with the goroutine.
		runtime.LockOSThread()
		f()
	}()
	<-done
}

// dropFileCapabilities takes the calling thread root's right to pass over file permissions.
func dropFileCapabilities() error {
	header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var data [2]unix.CapUserData
	if err := unix.Capget(&header, &data[0]); err != nil {
		return err
	}
	data[0].Effective &^= 1<<unix.CAP_DAC_OVERRIDE | 1<<unix.CAP_DAC_READ_SEARCH
	return unix.Capset(&header, &data[0])
}

// files reads the network's directory, without the lock and the marker.
func (n *node) files() map[string]string {
	n.t.Helper()
	return nstest.Files(n.t, n.dir(), lockName, markerName)
}

func (n *node) expect(want map[string]string) {
	n.t.Helper()
	expect.Equal(n.t, cmp.Diff(want, n.files()), "", "files (-want +got)")
}

// put writes a file into the network's directory, as of long ago if old.
func (n *node) put(name, content string, old ...time.Time) {
	n.t.Helper()
	nstest.PutFile(n.t, n.dir(), name, content, old...)
}
