package bridge

import (
	"context"
	"errors"
	"net/netip"

	"github.com/tombolo-cni/tombolo/addr"
	"github.com/tombolo-cni/tombolo/internal/nl"
)

// unsettled hears of what the kernel has still to do in a pod.
type unsettled struct {
	pod       *nl.Conn
	usable    *addr.Watch // nil if no address has to be waited for
	link      int         // the pod's interface
	addresses []netip.Addr
}

// close leaves the pod as it is.
func (u *unsettled) close() {
	var errs []error
	if u.usable != nil {
		errs = append(errs, u.usable.Close())
	}
	if u.pod != nil {
		errs = append(errs, u.pod.Close())
	}
	_ = errors.Join(errs...) // what was to be written has been answered
}

// settleLater keeps what Settle waits with.
func (c *Conn) settleLater(port string, u *unsettled) {
	c.forget(port)
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.unsettled == nil {
		c.unsettled = map[string]*unsettled{}
	}
	c.unsettled[port] = u
}

// take gives what settleLater has kept, which is nil where there is nothing to wait for.
func (c *Conn) take(port string) *unsettled {
	c.mu.Lock()
	defer c.mu.Unlock()
	u := c.unsettled[port]
	delete(c.unsettled, port)
	return u
}

// forget ends the wait for a port that goes.
func (c *Conn) forget(port string) {
	if u := c.take(port); u != nil {
		u.close()
	}
}

// Settle waits until a port forwards, and the pod's IPv6 addresses are usable. The
// kernel leaves both to its workers, which takes them milliseconds on a busy machine: a
// packet that is sent before is lost, and sent again a second later. The error matches
// addr.ErrDuplicate where duplicate address detection found another node, and that of
// ctx when it is done.
//
// Attach calls Settle, unless Port.Unsettled: then the caller does, on the same Conn,
// which has sockets open for it until then, or until a Detach or Close. A second Settle
// has nothing to wait for.
func (c *Conn) Settle(ctx context.Context, port string) error {
	c.nl.SettleCarrier(port)
	u := c.take(port)
	if u == nil {
		return nil
	}
	defer u.close()
	return u.usable.Settled(ctx, addr.On(u.pod), u.link, u.addresses...)
}
