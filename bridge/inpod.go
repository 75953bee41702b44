package bridge

import (
	"context"
	"errors"
	"io/fs"
	"net/netip"

	"github.com/tombolo-cni/tombolo/addr"
	"github.com/tombolo-cni/tombolo/internal/nl"
	"github.com/tombolo-cni/tombolo/internal/sysctl"
	"github.com/tombolo-cni/tombolo/netns"
)

// podNamespace holds the netlink socket and the sysctl directories that Attach opened inside the pod's network
// namespace.
type podNamespace struct {
	conn *nl.Conn
	// usable receives announcements about the pod's addresses. It is nil if no addresses need to be waited for.
	usable *addr.Watch
	ipv6   *sysctl.Dir // parameters of the pod's links; nil if the kernel has no IPv6

	link      int // index of the pod's interface
	addresses []netip.Addr
}

// enter opens a podNamespace in another goroutine, so that the caller can continue in the meantime. Entering a
// network namespace needs an OS thread of its own. The caller must call wait, which returns the result.
func (c *Conn) enter(pod *netns.NS, p *Port) (wait func() (*podNamespace, error)) {
	inPod, done := &podNamespace{}, make(chan error, 1)
	ipv6 := p.usesIPv6()
	go func() {
		_, _ = c.hostIPv6() // on an error, Attach gets the same error and returns it
		done <- pod.Do(func() error { return inPod.open(c.dialPod, ipv6) })
	}()
	return func() (*podNamespace, error) { err := <-done; return inPod, err }
}

// open opens the socket and the directory. It must run in the pod's network namespace.
func (inPod *podNamespace) open(dial func() (*nl.Conn, error), ipv6 bool) error {
	var err error
	if inPod.conn, err = dial(); err != nil {
		return err
	}

	if inPod.ipv6, err = sysctl.OpenDir("net/ipv6/conf"); err != nil && (ipv6 || !errors.Is(err, fs.ErrNotExist)) {
		return err
	}

	if ipv6 {
		inPod.usable, err = addr.Listen(nil)
		return err
	}
	return nil
}

// close closes the socket and the directory. It changes nothing in the pod.
func (inPod *podNamespace) close() {
	// Ignore errors of Close, since the kernel has answered all requests.
	if inPod.conn != nil {
		_ = inPod.conn.Close()
	}
	if inPod.usable != nil {
		_ = inPod.usable.Close()
	}
	if inPod.ipv6 != nil {
		_ = inPod.ipv6.Close()
	}
}

// waitLater stores the podNamespace of a port for a later call of Wait.
func (c *Conn) waitLater(port string, inPod *podNamespace) {
	c.closeWaiting(port)
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.waiting == nil {
		c.waiting = map[string]*podNamespace{}
	}
	c.waiting[port] = inPod
}

// takeWaiting removes and returns the podNamespace that waitLater stored for the port. It returns nil if there is none.
func (c *Conn) takeWaiting(port string) *podNamespace {
	c.mu.Lock()
	defer c.mu.Unlock()
	inPod := c.waiting[port]
	delete(c.waiting, port)
	return inPod
}

// closeWaiting cancels a stored wait for a port that is being deleted.
func (c *Conn) closeWaiting(port string) {
	if inPod := c.takeWaiting(port); inPod != nil {
		inPod.close()
	}
}

// Wait waits until a port forwards and the pod's IPv6 addresses are usable. The kernel works on this in the
// background, and needs some milliseconds on a busy machine. A packet that is sent earlier gets lost, and its sender
// repeats it about a second later. If duplicate address detection finds another node with an address, the error
// matches addr.ErrDuplicate. If ctx ends first, Wait returns ctx's error.
//
// Attach calls Wait itself, unless Port.NoWait is set. With NoWait, call Wait on the same Conn, which keeps sockets
// open until Wait, Detach or Close. A second Wait for the port returns at once.
func (c *Conn) Wait(ctx context.Context, port string) error {
	c.nl.RefreshCarrier(port)
	inPod := c.takeWaiting(port)
	if inPod == nil {
		return nil
	}
	defer inPod.close()
	return inPod.usable.Wait(ctx, addr.On(inPod.conn), inPod.link, inPod.addresses...)
}
