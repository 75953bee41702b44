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
	// usable receives announcements about the pod's addresses; nil if there is nothing to wait for.
	usable *addr.Watch
	ipv6   *sysctl.Dir // parameters of the pod's links; nil if the kernel has no IPv6

	link      int // index of the pod's interface
	addresses []netip.Addr
}

// enter opens a podNamespace on another goroutine, while the caller works on. Entering a namespace costs a thread,
// and finding the parameters takes some time. The caller must call wait.
func (c *Conn) enter(pod *netns.NS, p *Port) (wait func() (*podNamespace, error)) {
	in, done := &podNamespace{}, make(chan error, 1)
	ipv6 := p.usesIPv6()
	go func() {
		_, _ = c.hostIPv6() // on an error, Attach gets the same error and returns it
		done <- pod.Do(func() error { return in.open(c.dialPod, ipv6) })
	}()
	return func() (*podNamespace, error) { err := <-done; return in, err }
}

// open opens the socket and the directories. It must run in the pod's namespace.
func (in *podNamespace) open(dial func() (*nl.Conn, error), ipv6 bool) error {
	var err error
	if in.conn, err = dial(); err != nil {
		return err
	}

	if in.ipv6, err = sysctl.OpenDir("net/ipv6/conf"); err != nil && (ipv6 || !errors.Is(err, fs.ErrNotExist)) {
		return err
	}

	if ipv6 {
		in.usable, err = addr.Listen(nil)
		return err
	}
	return nil
}

// close closes them, and leaves the pod as it is.
func (in *podNamespace) close() {
	// An error does not matter, since the kernel has answered all requests.
	if in.conn != nil {
		_ = in.conn.Close()
	}
	if in.usable != nil {
		_ = in.usable.Close()
	}
	if in.ipv6 != nil {
		_ = in.ipv6.Close()
	}
}

// waitLater stores a podNamespace for Wait.
func (c *Conn) waitLater(port string, in *podNamespace) {
	c.forget(port)
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.waiting == nil {
		c.waiting = map[string]*podNamespace{}
	}
	c.waiting[port] = in
}

// take returns the podNamespace that waitLater stored, or nil if there is nothing to wait for.
func (c *Conn) take(port string) *podNamespace {
	c.mu.Lock()
	defer c.mu.Unlock()
	in := c.waiting[port]
	delete(c.waiting, port)
	return in
}

// forget drops the wait for a port that is being deleted.
func (c *Conn) forget(port string) {
	if in := c.take(port); in != nil {
		in.close()
	}
}

// Wait waits until a port forwards and the pod's IPv6 addresses are usable. The kernel works on both in the background,
// for milliseconds on a busy machine. A packet sent earlier is lost and repeated a second later. The error matches
// addr.ErrDuplicate if duplicate address detection found another node with the address, and the error of ctx when ctx
// ends.
//
// Attach calls Wait, unless Port.NoWait is set: then the caller calls it on the same Conn, which keeps sockets open
// for it until Wait, Detach or Close. A second Wait returns at once.
func (c *Conn) Wait(ctx context.Context, port string) error {
	c.nl.RefreshCarrier(port)
	in := c.take(port)
	if in == nil {
		return nil
	}
	defer in.close()
	return in.usable.Wait(ctx, addr.On(in.conn), in.link, in.addresses...)
}
