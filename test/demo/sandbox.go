package main

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
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

const (
	outsideBridge = "outside0" // of the node, to the host outside
	outsidePort   = "veth-outside"
)

// sandbox is a node to put pods on, and a host outside.
type sandbox struct {
	outside  *netns.NS
	families int // 2, or 1 where the kernel has IPv4 alone, as with ipv6.disable=1
	stateDir string
}

// prefixes are an address of each family in the network between the node and the host outside, with the host part
// given by the number (documentation prefixes, RFC 5737 and RFC 3849). The host outside has no others, and no route
// but that to this network: it can answer the node, but not pods behind it.
func (b *sandbox) prefixes(number int) []netip.Prefix {
	return []netip.Prefix{
		netip.MustParsePrefix(fmt.Sprintf("192.0.2.%d/24", number)), netip.MustParsePrefix(fmt.Sprintf("2001:db8::%d/64", number)),
	}[:b.families]
}

const theNode, theOutside = 1, 2

func (b *sandbox) addresses(number int) []netip.Addr {
	var list []netip.Addr
	for _, p := range b.prefixes(number) {
		list = append(list, p.Addr())
	}
	return list
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
			box := &sandbox{families: 2}
			if err := box.open(ctx, plugin); err != nil {
				return fmt.Errorf("build the sandbox: %w", err)
			}
			defer box.outside.Close()
			return fn(box)
		})
	}()
	return <-done
}

func (b *sandbox) open(ctx context.Context, plugin string) error {
	if _, err := os.Stat("/proc/self/net/if_inet6"); errors.Is(err, fs.ErrNotExist) {
		b.families = 1
	}
	var err error
	if b.stateDir, err = privateDir(plugin); err != nil {
		return err
	}
	if b.outside, err = netns.New(); err != nil {
		return err
	}
	if err := b.connectOutside(ctx); err != nil {
		return errors.Join(err, b.outside.Close())
	}
	return nil
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
	// An image with nothing but our programs in it may lack the first two.
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

// connectOutside connects the host outside to the node as any program can that embeds Tombolo, without CNI, and
// waits until they reach each other: the kernel leaves some of what an IPv6 address needs to a worker.
func (b *sandbox) connectOutside(ctx context.Context) error {
	node, err := bridge.Dial(nil)
	if err != nil {
		return err
	}
	defer node.Close()
	if _, err := node.Ensure(ctx, bridge.Bridge{Name: outsideBridge}); err != nil {
		return err
	}
	link, err := node.Link(ctx, outsideBridge)
	if err != nil {
		return err
	}
	for _, prefix := range b.prefixes(theNode) {
		if err := node.Addresses().Add(ctx, addr.Address{Prefix: prefix, Link: link.Index, Flags: unix.IFA_F_NODAD}); err != nil {
			return err
		}
	}
	_, err = node.Attach(ctx, b.outside, bridge.Port{
		Bridge: outsideBridge, BridgeIndex: link.Index, Name: outsidePort, Peer: podInterface, Addresses: b.prefixes(theOutside),
	})
	for _, address := range b.addresses(theNode) {
		if err == nil {
			err = icmp.Ping(ctx, b.outside, address, icmp.Echo{Wait: pingTimeout})
		}
	}
	return err
}

// sourceOutside sends datagrams to the host outside until one comes, and gives the address that it comes from.
func (b *sandbox) sourceOutside(from *netns.NS, to netip.Addr) (netip.Addr, error) {
	at := net.UDPAddrFromAddrPort(netip.AddrPortFrom(to, 9)) // discard
	var ear, mouth *net.UDPConn
	err := b.outside.Do(func() (err error) { ear, err = net.ListenUDP("udp", at); return err })
	if err != nil {
		return netip.Addr{}, err
	}
	defer ear.Close()
	if err := from.Do(func() (err error) { mouth, err = net.DialUDP("udp", nil, at); return err }); err != nil {
		return netip.Addr{}, err
	}
	defer mouth.Close()
	for deadline := time.Now().Add(pingTimeout); ; {
		_, err := mouth.Write([]byte("tombolo"))
		if err == nil {
			err = ear.SetReadDeadline(time.Now().Add(pingTimeout / 100))
		}
		if err != nil {
			return netip.Addr{}, err
		}
		_, source, err := ear.ReadFromUDPAddrPort(make([]byte, 16))
		if err == nil || time.Now().After(deadline) {
			return source.Addr().Unmap(), err
		}
	}
}
