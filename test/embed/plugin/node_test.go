package main

import (
	"context"
	"errors"
	"net/netip"
	"os"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/bridge"
	"github.com/tombolo-cni/tombolo/dhcpc"
	"github.com/tombolo-cni/tombolo/ipam"
	"github.com/tombolo-cni/tombolo/netns"
	"github.com/tombolo-cni/tombolo/network"
)

// onNode calls do on a machine of its own, with a pod.
func onNode(t *testing.T, do func(pod network.Pod) error) {
	t.Helper()
	host, pod := newNS(t), newNS(t)
	err := host.Do(func() error { return do(network.Pod{ContainerID: "c1", IfName: "eth0", NetNS: pod}) })
	if err != nil {
		t.Errorf("%v (needs root)", err)
	}
}

func newNS(t *testing.T) *netns.NS {
	t.Helper()
	ns, err := netns.New()
	if err != nil {
		t.Fatalf("%v (needs root)", err)
	}
	t.Cleanup(func() { ns.Close() })
	return ns
}

// onlyOne gives one address, and then no more.
func onlyOne(dir string) (*ipam.HostLocal, error) {
	one := ipam.Range{Subnet: netip.MustParsePrefix("10.22.0.0/24"), RangeStart: netip.MustParseAddr("10.22.0.2"), RangeEnd: netip.MustParseAddr("10.22.0.2")}
	return ipam.NewHostLocal(&ipam.Config{Network: "pods", Dir: dir, Ranges: []ipam.RangeSet{{Ranges: []ipam.Range{one}}}})
}

// ownAllocator is one of the program's own.
type ownAllocator struct{ ipam.Allocator }

func TestDelGivesTheAddressBackOrSaysWhatItNeeds(t *testing.T) {
	t.Parallel()
	hostLocal := network.Origin{Type: "host-local"}
	for name, tc := range map[string]struct {
		origin      network.Origin
		own, knows  bool // the allocator is the program's own; Config.Allocators says what takes addresses back
		needsToKnow bool
	}{
		"by its origin":                      {origin: hostLocal},
		"by Allocators":                      {knows: true},
		"by both":                            {origin: hostLocal, knows: true},
		"without an origin":                  {needsToKnow: true},
		"an allocator of its own":            {own: true, needsToKnow: true},
		"one of its own that Allocators has": {own: true, knows: true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			state := t.TempDir()
			onNode(t, func(pod network.Pod) error {
				pool, err := onlyOne(state + "/ipam")
				if err != nil {
					return err
				}
				pods := network.Network{Name: "pods", Bridge: "cbr0", Gateway: true, Allocator: pool, Origin: tc.origin}
				if tc.own {
					pods.Allocator = ownAllocator{pool}
				}
				back := func(string, *network.Origin) (ipam.Allocator, error) { return pool, nil }
				cfg := &network.Config{StateDir: state}
				if tc.knows {
					cfg.Allocators = back
				}
				for range 2 {
					node, err := network.Open(t.Context(), cfg)
					if err != nil {
						return err
					}
					made, err := node.Add(t.Context(), &pods, &pod)
					if err != nil {
						return err
					}
					err = node.Del(t.Context(), made.Key, nil)
					if tc.needsToKnow {
						if !errors.Is(err, network.ErrInvalid) || !strings.Contains(err.Error(), "Config.Allocators") {
							t.Errorf("Del: %v", err)
						}
						if node, err = network.Open(t.Context(), &network.Config{StateDir: state, Allocators: back}); err != nil {
							return err
						}
						err = node.Del(t.Context(), made.Key, nil)
					}
					if err != nil {
						return err
					}
				}
				return nil
			})
		})
	}
}

func TestErrorsOfANodeMatchTheirCauses(t *testing.T) {
	t.Parallel()
	leased := network.Lease{KeeperOptional: true}
	leased.Client.Timeout = time.Second
	full := func(t *testing.T, state string) error {
		if err := os.WriteFile(state+"/filler", make([]byte, 1<<20), 0o600); !errors.Is(err, unix.ENOSPC) {
			t.Errorf("the disk is not full: %v", err)
		}
		return nil
	}
	// Another program has the lock of the lease.
	locked := func(t *testing.T, state string) error {
		f, err := os.Create(state + "/" + strings.TrimPrefix(bridge.HostName("pods", "c1", "eth0"), "veth") + ".lock")
		if err != nil {
			return err
		}
		t.Cleanup(func() { f.Close() })
		return unix.Flock(int(f.Fd()), unix.LOCK_EX)
	}
	noDirectory := func(_ *testing.T, state string) error {
		if err := os.RemoveAll(state + "/attachments/pods"); err != nil {
			return err
		}
		return os.WriteFile(state+"/attachments/pods", nil, 0o600)
	}
	for name, tc := range map[string]struct {
		harm        func(t *testing.T, state string) error
		lease       *network.Lease
		kind, cause error
	}{
		"a deadline":                     {locked, &leased, network.ErrTryAgain, context.DeadlineExceeded},
		"no answer":                      {nil, &leased, network.ErrTryAgain, dhcpc.ErrTimeout},
		"a full disk":                    {full, nil, network.ErrState, unix.ENOSPC},
		"a file in place of a directory": {noDirectory, nil, network.ErrState, unix.ENOTDIR},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			state := t.TempDir()
			onNode(t, func(pod network.Pod) error {
				if err := unix.Mount("none", state, "tmpfs", 0, "size=64k"); err != nil {
					return err
				}
				t.Cleanup(func() { unix.Unmount(state, unix.MNT_DETACH) })
				node, err := network.Open(t.Context(), &network.Config{StateDir: state, LeaseDir: state})
				if err != nil {
					return err
				}
				pods := network.Network{Name: "pods", Bridge: "cbr0"}
				first := network.Pod{ContainerID: "c0", IfName: "eth0", NetNS: newNS(t)}
				if _, err := node.Add(t.Context(), &pods, &first); err != nil {
					return err
				}
				if tc.harm != nil {
					if err := tc.harm(t, state); err != nil {
						return err
					}
				}
				ctx := t.Context()
				if tc.cause == context.DeadlineExceeded {
					var cancel context.CancelFunc
					ctx, cancel = context.WithTimeout(ctx, 100*time.Millisecond)
					defer cancel()
				}
				pod.Lease = tc.lease
				_, err = node.Add(ctx, &pods, &pod)
				if !errors.Is(err, tc.kind) || !errors.Is(err, tc.cause) {
					t.Errorf("%v is not both %v and %v", err, tc.kind, tc.cause)
				}
				return nil
			})
		})
	}
}
