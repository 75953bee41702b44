package ipam

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/containernetworking/cni/pkg/types"
	current "github.com/containernetworking/cni/pkg/types/100"
	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"
)

// A node is a machine with one network: what the requests of a test have in common.
type node struct {
	t       *testing.T
	dataDir string
	conf    string
	epoch   Epoch
	live    func() ([]Live, error)

	mu       sync.Mutex
	warnings []string
}

// ranged is a netconf of host-local with these range sets.
func ranged(sets string) string {
	return `{"cniVersion":"1.1.0","name":"lan","type":"tombolo","ipam":{"type":"host-local","ranges":[` + sets + `]}}`
}

// small is a range of four addresses: 10.1.0.2 to .5, as .1 is the gateway.
const small = `[{"subnet":"10.1.0.0/29","rangeEnd":"10.1.0.5"}]`

func newNode(t *testing.T, conf string) *node {
	t.Helper()
	return &node{t: t, dataDir: t.TempDir(), conf: conf}
}

// dir is the directory of the network's reservations.
func (n *node) dir() string { return filepath.Join(n.dataDir, "lan") }

// request is one of interface eth0 of this container.
func (n *node) request(id string) *Request {
	return &Request{
		Network:        "lan",
		ContainerID:    id,
		IfName:         "eth0",
		Stdin:          []byte(n.conf),
		DefaultDataDir: n.dataDir,
		Strict:         true,
		Epoch:          n.epoch,
		Live:           n.live,
		OwnerHash:      hashOf,
		Warn:           n.warn,
		LockWait:       time.Hour, // however busy the machine is
	}
}

func (n *node) warn(message string) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.warnings = append(n.warnings, message)
}

// warned reports whether a warning holds text, and forgets all warnings.
func (n *node) warned(text string) bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	found := strings.Contains(strings.Join(n.warnings, "\n"), text)
	n.warnings = nil
	return found
}

// hashOf is an OwnerHash.
func hashOf(o Owner) string {
	return fmt.Sprintf("%x", sha256.Sum256([]byte("lan "+o.ContainerID+" "+o.IfName)))[:11]
}

// allocator calls New and fails the test where that fails.
func (n *node) allocator(r *Request) Allocator {
	n.t.Helper()
	a, err := New(r)
	if err != nil {
		n.t.Fatalf("New: %v", err)
	}
	return a
}

// add gives the container its addresses, and returns them with commas between.
func (n *node) add(id string) string {
	n.t.Helper()
	result, err := n.tryAdd(n.request(id))
	if err != nil {
		n.t.Fatalf("Add(%s): %v", id, err)
	}
	return addressesOf(result)
}

func (n *node) tryAdd(r *Request) (*current.Result, error) {
	n.t.Helper()
	return n.allocator(r).Add(context.Background())
}

// del releases the container's addresses, without a hint.
func (n *node) del(id string) {
	n.t.Helper()
	r := n.request(id)
	r.Strict = false
	if err := n.allocator(r).Del(context.Background(), nil); err != nil {
		n.t.Fatalf("Del(%s): %v", id, err)
	}
}

func addressesOf(result *current.Result) string {
	var texts []string
	for _, addr := range resultAddrs(result) {
		texts = append(texts, addr.String())
	}
	return strings.Join(texts, ",")
}

// files reads the network's directory: name and content of each file, without the lock and the marker.
func (n *node) files() map[string]string {
	n.t.Helper()
	entries, err := os.ReadDir(n.dir())
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		n.t.Fatal(err)
	}
	files := map[string]string{}
	for _, entry := range entries {
		if entry.IsDir() {
			files[entry.Name()] = "directory"
			continue
		}
		data, err := os.ReadFile(filepath.Join(n.dir(), entry.Name()))
		if err != nil {
			n.t.Fatal(err)
		}
		if entry.Name() != lockName && entry.Name() != markerName {
			files[entry.Name()] = string(data)
		}
	}
	return files
}

// expect compares the directory's files with want.
func (n *node) expect(want map[string]string) {
	n.t.Helper()
	if diff := cmp.Diff(want, n.files()); diff != "" {
		n.t.Errorf("files (-want +got)\n%s", diff)
	}
}

// put writes a file into the network's directory, as of long ago if old.
func (n *node) put(name, content string, old ...time.Time) {
	n.t.Helper()
	if err := os.MkdirAll(n.dir(), 0o755); err != nil {
		n.t.Fatal(err)
	}
	path := filepath.Join(n.dir(), name)
	if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
		n.t.Fatal(err)
	}
	for _, when := range old {
		if err := os.Chtimes(path, when, when); err != nil {
			n.t.Fatal(err)
		}
	}
}

// wantError checks an error's code, what it matches (nil for nothing), and that its message holds text.
func wantError(t *testing.T, err error, code uint, sentinel error, text string) {
	t.Helper()
	var object *types.Error
	if !errors.As(err, &object) {
		t.Errorf("got %v, which holds no CNI error object", err)
		return
	}
	if object.Code != code {
		t.Errorf("code %d, want %d: %v", object.Code, code, err)
	}
	if sentinel != nil && !errors.Is(err, sentinel) {
		t.Errorf("%v does not match %q", err, sentinel)
	}
	if !strings.Contains(object.Msg, text) {
		t.Errorf("message %q does not hold %q", object.Msg, text)
	}
}

func addrs(texts ...string) []netip.Addr {
	var list []netip.Addr
	for _, text := range texts {
		list = append(list, netip.MustParseAddr(text))
	}
	return list
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
