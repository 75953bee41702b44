package bridge

import (
	"context"
	"errors"
	"io/fs"
	"net/netip"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/addr"
	"github.com/tombolo-cni/tombolo/internal/link"
	"github.com/tombolo-cni/tombolo/internal/nl"
	"github.com/tombolo-cni/tombolo/internal/sysctl"
	"github.com/tombolo-cni/tombolo/netns"
	"github.com/tombolo-cni/tombolo/route"
)

// inPod is what is open in a pod's namespace.
type inPod struct {
	conn *nl.Conn
	// usable hears of the pod's addresses: nil if none has to be waited for.
	usable *addr.Watch
	// The parameters of the pod's links; nil where they are not needed, or the kernel
	// has no IPv6.
	ipv4, ipv6 *sysctl.Dir

	link      int // of the pod's interface
	addresses []netip.Addr
}

// entered is an inPod that is on its way.
type entered <-chan entry

type entry struct {
	in  *inPod
	err error
}

// enter opens, at the same time as others work, what Attach needs in a pod: to enter it
// costs a thread, and to find its parameters takes some time, as do the host's. The caller
// has to wait for what comes.
func (c *Conn) enter(pod *netns.NS, p *Port) entered {
	done := make(chan entry, 1)
	ipv6, redirects := p.usesIPv6(), p.NoRedirects
	go func() {
		_, _ = c.hostIPv6() // Attach meets the same error, and says it.
		in := &inPod{}
		err := pod.Do(func() error { return in.open(c.dialPod, ipv6, redirects) })
		if err != nil {
			in.close()
		}
		done <- entry{in, err}
	}()
	return done
}

func (e entered) wait() (*inPod, error) {
	got := <-e
	return got.in, got.err
}

// abandon is wait for a caller that does not use it any more.
func (e entered) abandon() {
	if in, err := e.wait(); err == nil {
		in.close()
	}
}

// open is called in the pod's namespace.
func (in *inPod) open(dial func() (*nl.Conn, error), ipv6, redirects bool) error {
	var err error
	if in.conn, err = dial(); err != nil {
		return err
	}
	if in.ipv6, err = sysctl.OpenDir("net/ipv6/conf"); err != nil && (ipv6 || !errors.Is(err, fs.ErrNotExist)) {
		return err
	}
	if redirects {
		if in.ipv4, err = sysctl.OpenDir("net/ipv4/conf"); err != nil {
			return err
		}
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
	for _, d := range [...]*sysctl.Dir{in.ipv4, in.ipv6} {
		if d != nil {
			_ = d.Close()
		}
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
	if err := c.usable(ctx); err != nil {
		return err
	}

	c.nl.RefreshCarrier(port)
	in := c.take(port)
	if in == nil {
		return nil
	}
	defer in.close()
	return in.usable.Wait(ctx, addr.On(in.conn), in.link, in.addresses...)
}

// Restore puts back what a pod's interface has lost of what Attach gave it: that it is up, its
// MTU if it is larger, its addresses, its routes, and the parameters that Check compares. More
// than the port has is left alone, and so are the MAC and the host's end (Enslave).
//
// An error that the kernel has for one part does not keep the others from being put back. It
// needs CAP_NET_ADMIN in the pod's namespace, and CAP_SYS_ADMIN to enter it.
func (c *Conn) Restore(ctx context.Context, pod *netns.NS, port Port) error {
	if err := c.usablePod(ctx, pod, true); err != nil {
		return err
	}
	if err := port.validate(); err != nil {
		return err
	}
	if port.Down {
		return nil
	}
	podConn, err := c.enterPod(pod, nil)
	if err != nil {
		return err
	}
	defer podConn.Close()
	l, err := link.Find(podConn, port.Peer)
	if err != nil {
		return err
	}
	// /proc/sys does not know a link by its alternative names.
	errs := []error{pod.Do(func() error { return port.restoreParameters(l.Name) })}
	var b nl.Batch
	if port.MTU != 0 && l.MTU > port.MTU {
		setMTU(&b, port.Peer, port.MTU)
	}
	link.Request{Index: loopbackIndex, Flags: unix.IFF_UP, Change: unix.IFF_UP}.Set(&b, "set link up", "lo")
	link.Request{Index: l.Index, Flags: unix.IFF_UP, Change: unix.IFF_UP}.Set(&b, "set link up", port.Peer)
	errs = append(errs, podConn.Execute(&b))
	if port.PeerMAC == nil {
		port.PeerMAC = l.MAC // the link-local address goes by it
	}
	for _, p := range port.podAddresses() {
		one := addr.Address{Prefix: p, Link: l.Index}
		if p.Addr().Is6() && !port.DAD {
			one.Flags = unix.IFA_F_NODAD
		}
		_, err := addr.On(podConn).Ensure(ctx, one)
		errs = append(errs, err)
	}
	return errors.Join(append(errs, port.restoreRoutes(ctx, podConn, l.Index))...)
}

// restoreRoutes adds those that are nowhere, in whichever table: a program may have moved one.
func (p *Port) restoreRoutes(ctx context.Context, podConn *nl.Conn, index int) error {
	if len(p.Routes) == 0 {
		return nil
	}
	routes := route.On(podConn)
	missing, err := missingRoutes(ctx, routes, p.podRoutes(index))
	if err != nil {
		return err
	}
	var errs []error
	for _, want := range missing {
		// One that leads elsewhere may be in its place.
		errs = append(errs, routes.Replace(ctx, want))
	}
	return errors.Join(errs...)
}

// restoreParameters is called in the pod's namespace, where the interface has a name of its own.
func (p *Port) restoreParameters(name string) error {
	var errs []error
	ensure := func(path, value string) {
		if sysctl.Exists(path) {
			_, err := sysctl.Ensure(path, value)
			errs = append(errs, err)
		}
	}
	if p.usesIPv6() {
		ensure(sysctl.Link("ipv6", name, "disable_ipv6"), "0")
	}
	if p.Autoconf != nil {
		for _, one := range p.hearing() {
			ensure(sysctl.Link("ipv6", name, one.name), one.value())
		}
	}
	if p.NoRedirects {
		ensure(allRedirects, "0")
		ensure(sysctl.Link("ipv4", name, "accept_redirects"), "0")
		if p.usesIPv6() {
			ensure(sysctl.Link("ipv6", name, acceptRedirects().name), acceptRedirects().value())
		}
	}
	return errors.Join(errs...)
}
