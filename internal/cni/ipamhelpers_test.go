package cni

import (
	"context"
	"errors"
	"net/netip"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/containernetworking/cni/pkg/types"
	current "github.com/containernetworking/cni/pkg/types/100"
	"github.com/google/go-cmp/cmp"

	"github.com/tombolo-cni/tombolo/internal/ipam/delegate"
	"github.com/tombolo-cni/tombolo/internal/strict"
	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
	"github.com/tombolo-cni/tombolo/ipam"
)

// An ipamNode is a machine with one network: what the requests of a test have in common.
type ipamNode struct {
	t       *testing.T
	dataDir string
	conf    string

	nstest.Warnings
}

// ranged is a netconf of host-local with these range sets.
func ranged(sets string) string {
	return `{"cniVersion":"1.1.0","name":"lan","type":"tombolo","ipam":{"type":"host-local","ranges":[` + sets + `]}}`
}

// small is a range of four addresses: 10.1.0.2 to .5, as .1 is the gateway.
const small = `[{"subnet":"10.1.0.0/29","rangeEnd":"10.1.0.5"}]`

func newIPAMNode(t *testing.T, conf string) *ipamNode {
	t.Helper()
	return &ipamNode{t: t, dataDir: t.TempDir(), conf: conf}
}

// dir is the directory of the network's reservations.
func (n *ipamNode) dir() string { return filepath.Join(n.dataDir, "lan") }

// fill fills in what a caller of newAllocator reads of a netconf, as far as it can be read.
func (r *ipamRequest) fill(conf string) *ipamRequest {
	var c struct {
		IPAM          Section            `json:"ipam"`
		Capabilities  map[string]bool    `json:"capabilities"`
		RuntimeConfig RequestedAddresses `json:"runtimeConfig"`
		Args          struct {
			CNI struct {
				IPs []string `json:"ips"`
			} `json:"cni"`
		} `json:"args"`
	}
	strict.Unmarshal([]byte(conf), &c, strict.Everything)
	r.Name, r.Section, r.RequestedAddresses, r.RangesLater, r.Stdin = c.IPAM.Type, c.IPAM, c.RuntimeConfig, c.Capabilities["ipRanges"], []byte(conf)
	r.ArgIPs = c.Args.CNI.IPs
	return r
}

// request is one of interface eth0 of this container.
func (n *ipamNode) request(id string) *ipamRequest {
	r := &ipamRequest{
		Plugin:         delegate.Plugin{ContainerID: id, IfName: "eth0"},
		Network:        "lan",
		DefaultDataDir: n.dataDir,
		Strict:         true,
		Warn:           n.Warn,
		LockWait:       time.Hour, // however busy the machine is
	}
	return r.fill(n.conf)
}

// An asker is an allocator with the attachment that it is asked for, and results as the
// plugin prints them.
type asker struct {
	*allocator
	owner ipam.Owner
}

func (a asker) Add(ctx context.Context) (*current.Result, error) {
	given, err := &ipam.Allocation{Addresses: slices.Clone(a.given), Routes: a.routes}, a.noRanges
	slices.SortStableFunc(given.Addresses, func(a, b ipam.Address) int { // as package network does
		return a.Prefix.Addr().BitLen() - b.Prefix.Addr().BitLen()
	})
	if a.Allocator != nil {
		given, err = a.allocator.Bind(ipam.Node{}).Add(ctx, a.owner)
	}
	if err != nil {
		return nil, err
	}
	result := &current.Result{CNIVersion: current.ImplementedSpecVersion, DNS: a.dns}
	addIPAM(result, a.ordered(given.Addresses), given.Routes, nil)
	return result, nil
}

func (a asker) Del(ctx context.Context, hint []netip.Addr) error {
	return a.allocator.Del(ctx, a.owner, hint)
}

func (a asker) Check(ctx context.Context, prev *current.Result) error {
	var held []ipam.Address
	if prev != nil {
		for _, ip := range prev.IPs {
			prefix, _ := prefixOf(ip.Address)
			gateway, _ := netip.AddrFromSlice(ip.Gateway)
			held = append(held, ipam.Address{Prefix: prefix, Gateway: gateway.Unmap()})
		}
	}
	if a.Allocator == nil {
		return a.checkGiven(held)
	}
	return a.allocator.Check(ctx, a.owner, held)
}

func (a asker) GC(ctx context.Context, valid []ipam.Owner) error {
	return a.Collect(ctx, valid)
}

func open(r *ipamRequest) (asker, error) {
	a, err := newAllocator(r)
	return asker{a, ipam.Owner{ContainerID: r.ContainerID, IfName: r.IfName}}, err
}

// allocator calls newAllocator and fails the test where that fails.
func (n *ipamNode) allocator(r *ipamRequest) asker {
	n.t.Helper()
	return must.Of(open(r)).Get(n.t, "newAllocator")
}

func (n *ipamNode) tryAdd(r *ipamRequest) (*current.Result, error) {
	n.t.Helper()
	return n.allocator(r).Add(context.Background())
}

// del releases the container's addresses, without a hint.
func (n *ipamNode) del(id string) {
	n.t.Helper()
	r := n.request(id)
	r.Strict = false
	must.Succeed(n.t, n.allocator(r).Del(context.Background(), nil), "Del(%s)", id)
}

func resultAddrs(result *current.Result) []netip.Addr {
	var list []netip.Addr
	for _, ip := range result.IPs {
		prefix, _ := prefixOf(ip.Address)
		list = append(list, prefix.Addr())
	}
	return list
}

func addressesOf(result *current.Result) string {
	var texts []string
	for _, addr := range resultAddrs(result) {
		texts = append(texts, addr.String())
	}
	return strings.Join(texts, ",")
}

// wantError checks an error's code, what it matches (nil for nothing), and that its message holds text.
func wantError(t *testing.T, err error, code uint, sentinel error, text string) {
	t.Helper()
	var object *types.Error
	if !errors.As(err, &object) {
		t.Errorf("got %v, which holds no CNI error object", err)
		return
	}
	expect.Equal(t, object.Code, code, "code %d, want %d: %v", object.Code, code, err)
	expect.That(t, sentinel == nil || errors.Is(err, sentinel), "%v does not match %q", err, sentinel)
	expect.Contains(t, object.Msg, text, "message")
}

// files reads the network's directory, without the lock and the marker.
func (n *ipamNode) files() map[string]string {
	n.t.Helper()
	return nstest.Files(n.t, n.dir(), "lock", ".tombolo-epoch")
}

// expect compares the directory's files with want.
func (n *ipamNode) expect(want map[string]string) {
	n.t.Helper()
	expect.Equal(n.t, cmp.Diff(want, n.files()), "", "files (-want +got)")
}

// put writes a file into the network's directory, as of long ago if old.
func (n *ipamNode) put(name, content string, old ...time.Time) {
	n.t.Helper()
	nstest.PutFile(n.t, n.dir(), name, content, old...)
}
