package cni

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/ident"
	"github.com/tombolo-cni/tombolo/internal/nl"
	"github.com/tombolo-cni/tombolo/internal/state"
	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nltest"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
	"github.com/tombolo-cni/tombolo/netns"
	"github.com/tombolo-cni/tombolo/nft"
)

// belongings are what attachments have, wherever it is kept. The bridge and the
// rules are the network's, and stay.
type belongings struct {
	Ports        []string // veth ends and ifbs on the host
	Interfaces   []string // in the pod
	Elements     []string // owner and addresses
	Reservations []string // addresses
	Records      []string // files
}

func (n *node) belongings(t *testing.T) belongings {
	t.Helper()
	return belongings{
		Ports: n.ports(t), Interfaces: linkNames(t, n.pod), Elements: n.elements(t),
		Reservations: slices.DeleteFunc(fileNames(t, filepath.Join(n.stateDir, "ipam", "pods")), func(name string) bool {
			_, err := netip.ParseAddr(name)
			return err != nil // the allocator's own
		}),
		Records: fileNames(t, filepath.Join(n.stateDir, "attachments", "pods")),
	}
}

// nothing is what there is before the first ADD.
func nothing() belongings { return belongings{Interfaces: []string{"lo"}} }

func (n *node) ports(t *testing.T) []string {
	t.Helper()
	names := slices.DeleteFunc(linkNames(t, n.host), func(name string) bool {
		return !strings.HasPrefix(name, "veth") && !strings.HasPrefix(name, "ifb")
	})
	slices.Sort(names)
	return names
}

// everything is what a pod may have besides an interface and addresses.
func everything() map[string]any {
	return map[string]any{"guard": true, "runtimeConfig": map[string]any{
		"portMappings": []any{
			map[string]any{"hostPort": 8080, "containerPort": 80, "protocol": "tcp"},
			map[string]any{"hostPort": 5300, "containerPort": 53, "protocol": "udp"},
		},
		"bandwidth": map[string]any{"ingressRate": 1e6, "egressRate": 1e6},
	}}
}

func linkNames(t *testing.T, ns *netns.NS) []string {
	t.Helper()
	var names []string
	for line := range strings.Lines(nstest.Run(t, ns, "ip", "-o", "link", "show")) {
		name, _, _ := strings.Cut(strings.Fields(line)[1], "@")
		names = append(names, strings.TrimSuffix(name, ":"))
	}
	return names
}

func (n *node) elements(t *testing.T) []string {
	t.Helper()
	fw := n.firewall(t)
	endpoints, err := fw.Endpoints(t.Context(), "")
	must.Succeed(t, err)
	var list []string
	for _, e := range endpoints {
		published := nstest.Run(t, n.host, "nft", "list", "map", "inet", "tombolo", "hostports4")
		list = append(list, fmt.Sprintf("%s %s %v, ports %d", e.Owner, e.Network, e.Addrs, strings.Count(published, ":"+string(e.Owner)+":")))
	}
	slices.Sort(list)
	return list
}

func (n *node) firewall(t *testing.T) *nft.Conn {
	t.Helper()
	fw, err := nft.Dial(&nft.Config{NetNS: n.host})
	must.Succeed(t, err)
	t.Cleanup(func() { fw.Close() })
	return fw
}

// fileNames are those of a directory, which need not be there.
func fileNames(t *testing.T, dir string) []string {
	t.Helper()
	entries, err := os.ReadDir(dir)
	must.That(t, err == nil || errors.Is(err, os.ErrNotExist), "%v", err)
	var names []string
	for _, e := range entries {
		names = append(names, e.Name())
	}
	return names
}

// addNeighbour attaches another pod, whose belongings no failure may touch.
func addNeighbour(t *testing.T, n *node) {
	t.Helper()
	env := attachmentEnv("ADD", nstest.Path(t, nstest.New(t)))
	env["CNI_CONTAINERID"] = "neighbour"
	n.runWith(t, n.plugin(), env, nil).must(t)
}

// mustRollBack runs an ADD that is to fail with a code and words in its message,
// and then shows that it left nothing, and that the next one succeeds.
func (n *node) mustRollBack(t *testing.T, p *Plugin, code uint, words ...string) {
	t.Helper()
	before := n.belongings(t)
	a := n.run(t, p, "ADD", everything())
	mustHaveFailed(t, a, []uint{code}, words...)
	n.mustHave(t, before)
	n.run(t, n.plugin(), "ADD", everything()).must(t)
}

func (n *node) mustHave(t *testing.T, want belongings) {
	t.Helper()
	expect.NoDiff(t, cmp.Diff(want, n.belongings(t), cmpopts.EquateEmpty()), "belongings of attachments")
}

func mustHaveFailed(t *testing.T, a answer, codes []uint, words ...string) {
	t.Helper()
	must.That(t, a.err != nil, "ADD succeeded: %s", a.stdout)
	expect.That(t, slices.Contains(codes, a.err.Code), "code %d, want %d: %s", a.err.Code, codes, a.err.Msg)
	for _, w := range words {
		expect.Contains(t, a.err.Msg, w, "the message")
	}
}

// steps of an ADD, in their order.
func steps() []string {
	return []string{"open", "record", "ipam", "network", "bandwidth", "link", "firewall", "commit"}
}

func TestADDTakesItsSteps(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	p := n.plugin()
	var got []string
	p.After = func(step string) error { got = append(got, step); return nil }
	n.run(t, p, "ADD", everything()).must(t)
	expect.NoDiff(t, cmp.Diff(steps(), got), "steps")
	hash := ident.Hash("pods", "c1", "eth0")
	want := belongings{
		Ports: []string{"ifb" + hash, "veth" + hash}, Interfaces: []string{"lo", "eth0"},
		Elements:     []string{hash + " pods [10.61.0.2 fd61::2], ports 2"},
		Reservations: []string{"10.61.0.2", "fd61::2"}, Records: []string{hash + ".json"},
	}
	n.mustHave(t, want)
	n.run(t, n.plugin(), "DEL", nil).must(t)
	n.mustHave(t, nothing())
}

func TestADDThatFailsAfterAStepLeavesNothing(t *testing.T) {
	t.Parallel()
	for i, step := range steps() {
		for _, pods := range []string{"first pod", "next to another"} {
			nstest.RunParallel(t, step+", "+pods, func(t *testing.T) {
				n := newNode(t)
				if pods != "first pod" {
					addNeighbour(t, n)
				}
				p := n.plugin()
				var taken []string
				p.After = func(s string) error {
					taken = append(taken, s)
					if s == step {
						return fmt.Errorf("failed on purpose after %s", s)
					}
					return nil
				}
				n.mustRollBack(t, p, codeKernel, "failed on purpose after "+step)
				expect.NoDiff(t, cmp.Diff(steps()[:i+1], taken), "steps")
			})
		}
	}
}

// faulty puts a fault between the plugin and rtnetlink, on the host's or the pod's
// side of the veth, or between it and its firewall.
func (n *node) faulty(side string, fault *nltest.Fault) *Plugin {
	p := n.plugin()
	p.Dial = func(protocol int, inPod bool) (*nl.Conn, error) {
		on := "host"
		switch {
		case protocol == unix.NETLINK_NETFILTER:
			on = "firewall"
		case inPod:
			on = "pod"
		}
		t, err := nl.Open(protocol, nil)
		if err != nil {
			return nil, err
		}
		if side == on {
			t = nltest.NewFaulty(t, fault)
		}
		return nl.New(t), nil
	}
	return p
}

// Each request that an ADD makes fails in turn: on the host, where the bridge is
// built too if this is the first pod, and in the pod.
func TestADDThatTheKernelRefusesLeavesNothing(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		pods    string
		side    string
		request string
		typ     uint16
		atLeast int // how many such requests there are
		errno   unix.Errno
	}{
		{"first pod", "host", "RTM_GETLINK", unix.RTM_GETLINK, 2, unix.ENOMEM},
		{"first pod", "host", "RTM_NEWLINK", unix.RTM_NEWLINK, 4, unix.ENOBUFS},
		{"first pod", "host", "RTM_GETADDR", unix.RTM_GETADDR, 1, unix.ENOMEM},
		{"first pod", "host", "RTM_NEWADDR", unix.RTM_NEWADDR, 2, unix.ENOBUFS},
		{"first pod", "host", "RTM_GETROUTE", unix.RTM_GETROUTE, 1, unix.ENOMEM},
		{"next to another", "host", "RTM_GETLINK", unix.RTM_GETLINK, 1, unix.ENOMEM},
		{"next to another", "host", "RTM_NEWLINK", unix.RTM_NEWLINK, 2, unix.ENOBUFS},
		{"next to another", "host", "RTM_GETROUTE", unix.RTM_GETROUTE, 1, unix.ENOMEM},
		{"next to another", "pod", "RTM_GETLINK", unix.RTM_GETLINK, 1, unix.EPERM},
		{"next to another", "pod", "RTM_NEWLINK", unix.RTM_NEWLINK, 2, unix.EPERM},
		{"next to another", "pod", "RTM_NEWADDR", unix.RTM_NEWADDR, 3, unix.ENOBUFS},
		{"next to another", "pod", "RTM_NEWROUTE", unix.RTM_NEWROUTE, 2, unix.ENETUNREACH},
		{"first pod", "firewall", "NFT_MSG_NEWCHAIN", nftType(unix.NFT_MSG_NEWCHAIN), 8, unix.ENOMEM},
		{"first pod", "firewall", "NFT_MSG_NEWSET", nftType(unix.NFT_MSG_NEWSET), 8, unix.ENOMEM},
		{"first pod", "firewall", "NFT_MSG_GETGEN", nftType(unix.NFT_MSG_GETGEN), 1, unix.EPERM},
		{"next to another", "firewall", "NFT_MSG_GETCHAIN", nftType(unix.NFT_MSG_GETCHAIN), 5, unix.ENOMEM},
		{"next to another", "firewall", "NFT_MSG_NEWSETELEM", nftType(unix.NFT_MSG_NEWSETELEM), 10, unix.ENOMEM},
	} {
		nstest.RunParallel(t, fmt.Sprintf("%s, %s in the %s", tt.pods, tt.request, tt.side), func(t *testing.T) {
			for nth := 1; ; nth++ {
				n := newNode(t)
				if tt.pods != "first pod" {
					addNeighbour(t, n)
				}
				fault := &nltest.Fault{Type: tt.typ, Nth: nth, Errno: tt.errno, Text: "on purpose"}
				before := n.belongings(t)
				a := n.run(t, n.faulty(tt.side, fault), "ADD", everything())
				if fault.Fired() == 0 {
					a.must(t)
					expect.That(t, nth > tt.atLeast,
						"an ADD makes %d such requests, where there should be at least %d", nth-1, tt.atLeast)
					return
				}
				mustHaveFailed(t, a, []uint{codeKernel, codeTryAgainLater}, tt.errno.Error(), "(kernel: on purpose)")
				n.mustHave(t, before)
			}
		})
	}
}

// What the kernel's terse errnos mean is said in words, and has codes of its own.
func TestADDThatCannotTakeTheNameLeavesNothing(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		name  string
		fault *nltest.Fault
		code  uint
		want  string
	}{
		{"bridge is full", &nltest.Fault{Type: unix.RTM_NEWLINK, Match: isCreation("veth"), Errno: unix.EXFULL}, codeNotAttachable,
			"the bridge holds 1023 ports, the most that Linux allows"},
		{"interface is there", &nltest.Fault{Type: unix.RTM_NEWLINK, Match: isCreation("veth"), Errno: unix.EEXIST}, codeExists,
			"the pod has an interface of this name already"},
	} {
		nstest.RunParallel(t, tt.name, func(t *testing.T) {
			n := newNode(t)
			nltest.MustHaveFired(t, tt.fault)
			n.mustRollBack(t, n.faulty("host", tt.fault), tt.code, tt.want)
		})
	}
}

func nftType(msg uint16) uint16 { return unix.NFNL_SUBSYS_NFTABLES<<8 | msg }

// isCreation matches requests that make a link of a kind.
func isCreation(kind string) func(netlink.Message) bool {
	return func(m netlink.Message) bool {
		return m.Header.Flags&unix.NLM_F_CREATE != 0 && strings.Contains(string(m.Data), kind)
	}
}

func TestADDWhoseUndoFailsSaysSo(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	fault := &nltest.Fault{Type: unix.RTM_DELLINK, Errno: unix.EBUSY, Text: "on purpose"}
	nltest.MustHaveFired(t, fault)
	p := n.faulty("host", fault)
	p.After = func(step string) error {
		if step == "firewall" {
			return newError(codeConflict, "the cause")
		}
		return nil
	}
	a := n.run(t, p, "ADD", nil)
	must.That(t, a.err != nil && a.err.Code == codeConflict, "got %s, want the cause's code", a.stdout)
	port := "veth" + ident.Hash("pods", "c1", "eth0")
	want := "the cause; delete link " + port + ": device or resource busy (kernel: on purpose)"
	expect.NoDiff(t, cmp.Diff(want, a.err.Msg), "message")
	// The other steps were undone all the same, and the DEL that runtimes send after
	// a failed ADD finds the link by its name.
	left := nothing()
	left.Ports, left.Interfaces = []string{port}, []string{"lo", "eth0"}
	n.mustHave(t, left)
	n.run(t, n.plugin(), "DEL", nil).must(t)
	n.mustHave(t, nothing())
}

// An ADD that finds a port of its own name, which a killed ADD left, replaces it.
func TestADDReplacesThePortOfAKilledOne(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	n.run(t, n.plugin(), "ADD", nil).must(t)
	hash := ident.Hash("pods", "c1", "eth0")
	must.Succeed(t, os.Remove(filepath.Join(n.stateDir, "attachments", "pods", hash+".json")))
	for _, ip := range []string{"10.61.0.2", "fd61::2"} {
		must.Succeed(t, os.Remove(filepath.Join(n.stateDir, "ipam", "pods", ip)))
	}
	n.run(t, n.plugin(), "ADD", nil).must(t)
	got := n.ports(t)
	expect.That(t, len(got) == 1, "ports: %v", got)
}

// Elements of nf_tables that carry another owner's name are not taken over while
// that owner lives.
func TestADDWhoseElementsAreAnothersLeavesNothing(t *testing.T) {
	t.Parallel()
	other := &state.Attachment{Network: "pods", ContainerID: "other", IfName: "eth0", HostIf: "veth-other", Bridge: "cbr0"}
	for _, tt := range []struct {
		name  string
		alive bool
	}{{"the owner lives", true}, {"the owner is gone", false}} {
		nstest.RunParallel(t, tt.name, func(t *testing.T) {
			n := newNode(t)
			p := n.plugin()
			p.After = func(step string) error {
				if step != "network" {
					return nil
				}
				rec := *other
				if tt.alive {
					d, err := state.Open(n.stateDir)
					if err != nil {
						return err
					}
					pending, err := d.Create(&rec)
					if err != nil {
						return err
					}
					if err := pending.Close(); err != nil {
						return err
					}
				}
				return n.firewall(t).Add(context.Background(), nft.Endpoint{
					Owner: nft.Owner(rec.Hash()), Network: "pods", Bridge: "cbr0", Addrs: nstest.Addrs("10.61.0.2"),
				})
			}
			a := n.run(t, p, "ADD", nil)
			if !tt.alive {
				a.must(t)
				expect.NoDiff(t, cmp.Diff([]string{ident.Hash("pods", "c1", "eth0") + " pods [10.61.0.2 fd61::2], ports 0"}, n.elements(t)), "elements")
				return
			}
			expect.That(t, a.err != nil && a.err.Code == codeConflict && strings.Contains(a.err.Msg, other.Hash()),
				"got %s, want code %d and the owner's name", a.stdout, codeConflict)
			left := nothing()
			left.Elements, left.Records = []string{other.Hash() + " pods [10.61.0.2], ports 0"}, []string{other.Hash() + ".json"}
			n.mustHave(t, left)
		})
	}
}

// A set of the right name and of another type is an error of the kernel's.
func TestADDThatTheFirewallRefusesLeavesNothing(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	p := n.plugin()
	p.After = func(step string) error {
		if step == "link" {
			nstest.Run(t, n.host, "nft", "delete table inet tombolo; add table inet tombolo; "+
				"add set inet tombolo pods4 { type ether_addr; }; add set inet tombolo pods6 { type ether_addr; }")
		}
		return nil
	}
	n.mustRollBack(t, p, codeKernel, "pods4", unix.EINVAL.Error())
}

// A runtime may give up an ADD that takes long, delete the attachment and add it again, while
// the first ADD is still at work: what that one then does and undoes has the same names.
func TestADDThatGoesOnBehindADELAndAnotherADDLeavesThatOneAlone(t *testing.T) {
	t.Parallel()
	guarded := map[string]any{"guard": true, "deadline": "10s"}
	for _, step := range steps()[1 : len(steps())-1] {
		nstest.RunParallel(t, step, func(t *testing.T) {
			n := newNode(t)
			neighbour := attachmentEnv("ADD", nstest.Path(t, nstest.New(t)))
			neighbour["CNI_CONTAINERID"] = "neighbour"
			n.runWith(t, n.plugin(), neighbour, guarded).must(t)
			later := attachmentEnv("ADD", nstest.Path(t, nstest.New(t)))
			var want belongings
			p := n.plugin()
			p.After = func(s string) error {
				if s != step {
					return nil
				}
				done := make(chan struct{})
				go func() {
					defer close(done)
					n.run(t, n.plugin(), "DEL", nil).must(t)
					n.runWith(t, n.plugin(), later, guarded).must(t)
					want = n.belongings(t)
				}()
				<-done
				return nil
			}
			a := n.run(t, p, "ADD", guarded)
			mustHaveFailed(t, a, []uint{codeTryAgainLater}, "was deleted")
			got := n.belongings(t)
			// What the first one made after that goes with the attachment.
			want.Interfaces, got.Interfaces = nil, nil
			expect.NoDiff(t, cmp.Diff(want, got, cmpopts.EquateEmpty()), "belongings of attachments")
		})
	}
}

// So that the next ADD finds nothing of it.
func TestDELReturnsWhenTheADDThatItEndsHasEnded(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	p := n.plugin()
	var ended atomic.Bool
	deleted := make(chan bool, 1)
	p.After = func(step string) error {
		if step != "link" {
			return nil
		}
		go func() {
			n.run(t, n.plugin(), "DEL", nil)
			deleted <- ended.Load()
		}()
		record := filepath.Join(n.stateDir, "attachments", "pods", ident.Hash("pods", "c1", "eth0")+".json")
		for {
			if _, err := os.Stat(record); errors.Is(err, os.ErrNotExist) {
				break
			}
			time.Sleep(time.Millisecond)
		}
		time.Sleep(200 * time.Millisecond) // in which DEL does all else
		ended.Store(true)
		return nil
	}
	mustHaveFailed(t, n.run(t, p, "ADD", nil), []uint{codeTryAgainLater}, "was deleted")
	expect.That(t, <-deleted, "DEL did not wait for the ADD")
	n.mustHave(t, nothing())
}

// Another program may delete the port, and the record along with it.
func TestADDFromUnderWhichEverythingIsTakenIsToBeTriedAgain(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	p := n.plugin()
	remove := false
	p.After = func(step string) error {
		if step != "bandwidth" { // its port is there, and not up yet
			return nil
		}
		hash := ident.Hash("pods", "c1", "eth0")
		nstest.Run(t, n.host, "ip", "link", "del", "veth"+hash)
		if !remove {
			return nil
		}
		d, err := state.Open(n.stateDir)
		if err != nil {
			return err
		}
		return d.Remove("pods", hash)
	}
	limited := map[string]any{"ingressRate": 1000000, "ingressBurst": 1000000}
	for code, removed := range map[uint]bool{codeTryAgainLater: true, codeKernel: false} {
		remove = removed
		a := n.run(t, p, "ADD", limited)
		expect.That(t, a.err != nil && a.err.Code == code, "removed %t: got %s, want code %d", remove, a.stdout, code)
		n.mustHave(t, nothing())
	}
}
