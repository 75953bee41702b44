package demo

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/addr"
	"github.com/tombolo-cni/tombolo/bridge"
	"github.com/tombolo-cni/tombolo/internal/icmp"
	"github.com/tombolo-cni/tombolo/netns"
)

// The families, as indexes.
const (
	v4 = iota
	v6
	families
)

// familiesHere counts the families that the kernel has: all, or IPv4 alone, as with
// ipv6.disable=1.
func familiesHere() int {
	if _, err := os.Stat("/proc/self/net/if_inet6"); errors.Is(err, fs.ErrNotExist) {
		return v4 + 1
	}
	return families
}

const (
	outsideBridge = "outside0" // of the node, to the host outside
	outsidePort   = "veth-outside"
)

// nodeAddresses are the node's towards the outside (documentation prefixes, RFC 5737
// and RFC 3849), and outsideAddresses those of the host there. It has no others, and
// no route but that to its own network: it can answer the node, and nobody behind it.
func nodeAddresses() []netip.Prefix {
	return []netip.Prefix{netip.MustParsePrefix("192.0.2.1/24"), netip.MustParsePrefix("2001:db8::1/64")}
}

func outsideAddresses() []netip.Prefix {
	return []netip.Prefix{netip.MustParsePrefix("192.0.2.2/24"), netip.MustParsePrefix("2001:db8::2/64")}
}

// sandbox is a node to put pods on, and a host outside.
type sandbox struct {
	outside  *netns.NS
	heard    *icmp.Listener // outside
	families int            // how many of them there are
	stateDir string
	links    []string // what the node has before its first pod
	pods     []*pod
}

// inSandbox runs fn on a thread in the sandbox's node: what fn opens there, and the
// programs that it starts, are in the node's network namespace, and see a
// directory for state that no one else does.
func inSandbox(ctx context.Context, plugin string, fn func(*sandbox) error) error {
	node, err := netns.New()
	if errors.Is(err, fs.ErrPermission) {
		return fmt.Errorf("demo needs root, for a sandbox of network and mount namespaces: use sudo, or unshare --map-root-user --net: %w", err)
	}
	if err != nil {
		return err
	}
	defer node.Close()
	done := make(chan error)
	go func() {
		done <- node.Do(func() error {
			// Once more than Do undoes. The thread must not be put to other use with its
			// own view of the file system: it ends with this goroutine, and its mounts too.
			runtime.LockOSThread()
			box := &sandbox{}
			defer box.close()
			if err := box.open(ctx, plugin); err != nil {
				return fmt.Errorf("build the sandbox: %w", err)
			}
			return fn(box)
		})
	}()
	return <-done
}

func (b *sandbox) open(ctx context.Context, plugin string) error {
	b.families = familiesHere()
	var err error
	if b.stateDir, err = privateDir(plugin); err != nil {
		return err
	}
	if b.outside, err = netns.New(); err != nil {
		return err
	}
	if err := b.connectOutside(ctx); err != nil {
		return err
	}
	if b.heard, err = icmp.Listen(b.outside); err != nil {
		return err
	}
	b.links, err = linkNames()
	return err
}

func (b *sandbox) close() {
	for _, p := range b.pods {
		p.ns.Close()
	}
	if b.heard != nil {
		b.heard.Close()
	}
	if b.outside != nil {
		b.outside.Close()
	}
}

// privateDir gives the calling thread a mount namespace, and in it an empty
// directory in memory, which does not hide the plugin.
func privateDir(plugin string) (string, error) {
	if err := unix.Unshare(unix.CLONE_NEWNS); err != nil {
		return "", fmt.Errorf("create mount namespace: %w", err)
	}
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return "", fmt.Errorf("keep mounts from spreading: %w", err)
	}
	var errs []error
	// An image with nothing but this program in it may lack the first two.
	for _, dir := range []string{"/run", "/tmp", "/dev/shm"} {
		if strings.HasPrefix(plugin, dir+"/") {
			continue
		}
		err := unix.Mount("tombolo-demo", dir, "tmpfs", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, "mode=700")
		if err == nil {
			return filepath.Join(dir, "tombolo"), nil
		}
		errs = append(errs, fmt.Errorf("mount a tmpfs at %s: %w", dir, err))
	}
	return "", errors.Join(errs...)
}

// connectOutside ties the host outside to the node as any program can that embeds
// Tombolo, without CNI.
func (b *sandbox) connectOutside(ctx context.Context) error {
	node, err := bridge.Dial(nil)
	if err != nil {
		return err
	}
	defer node.Close()
	link, _, err := node.Ensure(ctx, bridge.Bridge{Name: outsideBridge})
	if err != nil {
		return err
	}
	for _, prefix := range nodeAddresses()[:b.families] {
		if err := node.Addresses().Add(addr.Address{Prefix: prefix, Link: link.Index, Flags: addr.NoDAD}); err != nil {
			return err
		}
	}
	_, err = node.Attach(ctx, b.outside, bridge.Port{
		Bridge: outsideBridge, BridgeIndex: link.Index,
		Name: outsidePort, Peer: podInterface,
		Addresses: outsideAddresses()[:b.families],
	})
	if err != nil {
		return err
	}
	return b.awaitOutside(ctx)
}

// awaitOutside waits until the host outside and the node reach each other: the kernel
// leaves some of what an IPv6 address needs to a worker, and on a busy machine neighbours
// give up before that is done.
func (b *sandbox) awaitOutside(ctx context.Context) error {
	deadline := time.Now().Add(patience)
	for _, prefix := range nodeAddresses()[:b.families] {
		for {
			_, err := icmp.Ping(ctx, b.outside, prefix.Addr(), icmp.Echo{Wait: time.Second})
			if err == nil {
				break
			}
			if ctx.Err() != nil || time.Now().After(deadline) {
				return fmt.Errorf("reach the node from the host outside: %w", err)
			}
		}
	}
	return nil
}
