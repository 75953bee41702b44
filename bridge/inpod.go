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

// inPod is what is open in a pod's namespace.
type inPod struct {
	conn *nl.Conn
	// usable hears of the pod's addresses: nil if none has to be waited for.
	usable *addr.Watch
	ipv6   *sysctl.Dir // the parameters of the pod's links; nil if the kernel has no IPv6

	link      int // of the pod's interface
	addresses []netip.Addr
}

// enter opens, at the same time as others work, what Attach needs in a pod: to enter it costs a thread, and to find its
// parameters takes some time, as do the host's. The caller has to call wait.
func (c *Conn) enter(pod *netns.NS, p *Port) (wait func() (*inPod, error)) {
	in, done := &inPod{}, make(chan error, 1)
	ipv6 := p.usesIPv6()
	go func() {
		_, _ = c.hostIPv6() // Attach meets the same error, and says it.
		done <- pod.Do(func() error { return in.open(c.dialPod, ipv6) })
	}()
	return func() (*inPod, error) { err := <-done; return in, err }
}

// open is called in the pod's namespace.
func (in *inPod) open(dial func() (*nl.Conn, error), ipv6 bool) error {
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

// close leaves the pod as it is.
func (in *inPod) close() {
	// An error loses nothing: the kernel has answered all requests.
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

// waitLater keeps what Wait waits with.
func (c *Conn) waitLater(port string, in *inPod) {
	c.forget(port)
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.waiting == nil {
		c.waiting = map[string]*inPod{}
	}
	c.waiting[port] = in
}

// take gives what waitLater has kept, which is nil where there is nothing to wait for.
func (c *Conn) take(port string) *inPod {
	c.mu.Lock()
	defer c.mu.Unlock()
	in := c.waiting[port]
	delete(c.waiting, port)
	return in
}

// forget ends the wait for a port that goes.
func (c *Conn) forget(port string) {
	if in := c.take(port); in != nil {
		in.close()
	}
}

// Wait waits until a port forwards, and the pod's IPv6 addresses are usable. The
// kernel leaves both to its workers, which takes them milliseconds on a busy machine: a
// packet that is sent before is lost, and sent again a second later. The error matches
// addr.ErrDuplicate where duplicate address detection found another node, and that of
// ctx when it is done.
//
// Attach calls Wait, unless Port.NoWait: then the caller does, on the same Conn,
// which has sockets open for it until then, or until a Detach or Close. A second Wait
// has nothing to wait for.
func (c *Conn) Wait(ctx context.Context, port string) error {
	c.nl.RefreshCarrier(port)
	in := c.take(port)
	if in == nil {
		return nil
	}
	defer in.close()
	return in.usable.Wait(ctx, addr.On(in.conn), in.link, in.addresses...)
}
