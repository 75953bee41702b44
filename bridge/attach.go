package bridge

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/netip"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo"
	"github.com/tombolo-cni/tombolo/addr"
	"github.com/tombolo-cni/tombolo/internal/ident"
	"github.com/tombolo-cni/tombolo/internal/link"
	"github.com/tombolo-cni/tombolo/internal/nl"
	"github.com/tombolo-cni/tombolo/internal/sysctl"
	"github.com/tombolo-cni/tombolo/netns"
)

// Attachment describes the veth pair that Attach created: the port, which is the host's end on the bridge, and the
// pod's interface.
type Attachment struct {
	// Index and MAC belong to the port, and PeerIndex and PeerMAC to the pod's interface, in the pod's namespace.
	Index     int
	MAC       net.HardwareAddr
	PeerIndex int
	PeerMAC   net.HardwareAddr
	MTU       int // MTU of both ends, in bytes
	// NetNSCookie identifies the pod's network namespace: see netns.NS.Cookie.
	NetNSCookie uint64
}

// ErrPeerExists is wrapped by the error of Attach if the pod already has an interface named Port.Peer.
var ErrPeerExists = errors.New("the pod has an interface of this name already")

// ErrBridgeFull is wrapped by the error of Attach if the bridge cannot have another port.
var ErrBridgeFull = errors.New("the bridge holds 1023 ports, the most that Linux allows")

// ErrNoIPv6 is wrapped by an error about a port that needs IPv6 (IPv6 addresses or Autoconf) if the kernel has none.
var ErrNoIPv6 = errors.New("IPv6 is switched off in this kernel (ipv6.disable=1 on its command line, or built without)")

// Attach connects a pod to a bridge. It creates a veth pair, with one end as a port of the bridge. The other end is the
// pod's interface with its addresses and routes. Attach also sets the pod's loopback interface up. When Attach returns,
// the pod's addresses are usable and the port forwards, unless port.NoWait or port.Down is set (see Wait). If the
// bridge runs the spanning tree protocol, the port forwards later, after BridgeState.PortDelay.
//
// If Attach fails, it deletes its veth pair. If a link named port.Name already exists, the error matches fs.ErrExist.
// If the pod already has an interface named port.Peer, the error matches ErrPeerExists.
//
// Attach needs CAP_NET_ADMIN in both network namespaces, and CAP_SYS_ADMIN to enter the pod's.
func (c *Conn) Attach(ctx context.Context, pod *netns.NS, port Port) (*Attachment, error) {
	if err := cmp.Or(ctx.Err(), c.checkPod(pod, port.SameNetNS)); err != nil {
		return nil, err
	}

	if err := port.validate(); err != nil {
		return nil, &tombolo.OpError{Op: "attach", Object: port.Name, Err: err}
	}

	if err := port.fillIn(ctx, c); err != nil {
		return nil, err
	}

	pending := c.enter(pod, &port)
	var b nl.Batch
	port.create(&b, port.BridgeIndex, pod.FD())
	err := c.configure(ctx, &b, &port, true)
	if err == nil {
		err = c.refuseIPv6(port.Name)
	}

	if err == nil {
		err = c.setUp(ctx, &port, port.BeforeUp)
	}

	inPod, enterErr := pending()
	if err = cmp.Or(err, enterErr); err == nil {
		var a *Attachment
		if a, err = c.setUpPod(ctx, inPod, &port); err == nil {
			return a, nil
		}
	} else {
		inPod.close()
	}

	if b.Err(0) != nil {
		return nil, c.explain(&port, err)
	}

	return nil, c.undo(&port, err)
}

// configure appends the requests that configure the port to b and sends the batch. A kernel without IPv6 rejects the
// IPv6 settings (EAFNOSUPPORT). Then configure sends its own requests again without these settings, or returns
// ErrNoIPv6 if the port needs IPv6. fresh states that b creates the port.
func (c *Conn) configure(ctx context.Context, b *nl.Batch, p *Port, fresh bool) error {
	p.configure(b, fresh)
	err := c.nl.Do(ctx, b)
	if !errors.Is(err, unix.EAFNOSUPPORT) || p.noIPv6 || b.Err(b.Len()-1) == nil {
		return err
	}

	if p.usesIPv6() {
		return &tombolo.OpError{Op: "attach", Object: p.Name, Err: ErrNoIPv6}
	}

	p.noIPv6 = true
	var again nl.Batch
	p.configure(&again, fresh)
	return c.nl.Do(ctx, &again)
}

// fillIn sets MTU, MAC and PeerMAC if the caller left them zero. If BridgeIndex or MTU is zero, it looks up the link
// p.Bridge by name and sets BridgeIndex. It then returns an error if the link is not a bridge.
func (p *Port) fillIn(ctx context.Context, c *Conn) error {
	if p.BridgeIndex == 0 || p.MTU == 0 {
		l, err := c.bridgeNamed(ctx, p.Bridge)
		if err != nil {
			return err
		}
		if l.Kind != "bridge" {
			return &tombolo.OpError{Op: "attach", Object: p.Name,
				Err: fmt.Errorf("%w: %s is not a bridge but %s", tombolo.ErrInvalid, p.Bridge, describeKind(l))}
		}
		p.BridgeIndex = l.Index
		p.MTU = cmp.Or(p.MTU, l.MTU)
	}

	if p.MAC == nil {
		p.MAC = ident.RandomMAC()
	}

	if p.PeerMAC == nil {
		p.PeerMAC = ident.RandomMAC()
	}

	return nil
}

// explain returns a clearer error for two errno values of a failed Attach. For EEXIST, it returns ErrPeerExists if no
// link has the port's name. For EXFULL, it returns ErrBridgeFull. It returns any other err unchanged.
func (c *Conn) explain(p *Port, err error) error {
	switch {
	case errors.Is(err, fs.ErrExist):
		if _, lookErr := c.Link(context.Background(), p.Name); errors.Is(lookErr, fs.ErrNotExist) {
			return &tombolo.OpError{Op: "add link", Object: p.Peer, Err: ErrPeerExists}
		}
	case errors.Is(err, unix.EXFULL):
		return &tombolo.OpError{Op: "add port", Object: p.Name + " to " + p.Bridge, Err: ErrBridgeFull}
	}

	return err
}

// undo deletes the veth pair, and with it all that Attach has added to its ends. undo takes no context, since it must
// run in any case. It returns cause, joined with its own error if it fails.
func (c *Conn) undo(p *Port, cause error) error {
	c.closeWaiting(p.Name)
	var b nl.Batch
	link.Request{Name: p.Name}.Delete(&b, p.Name)
	if err := nl.PassAbsent(c.nl.Execute(&b)); err != nil {
		return errors.Join(cause, fmt.Errorf("undo: %w", err))
	}
	return cause
}

// setUpPod configures the pod's interface and waits until it is usable, unless p.NoWait is set. It closes inPod after
// an error, or if the pod has no address to wait for. In other cases Conn.Wait, Detach or Close closes inPod.
func (c *Conn) setUpPod(ctx context.Context, inPod *podNamespace, p *Port) (_ *Attachment, err error) {
	a := &Attachment{MAC: p.MAC, PeerMAC: p.PeerMAC, MTU: p.MTU}
	if err = c.configurePod(ctx, inPod, p, a); err == nil {
		a.NetNSCookie, err = inPod.conn.NetNSCookie()
	}

	if err != nil || inPod.usable == nil {
		inPod.close()
	} else {
		inPod.link = a.PeerIndex
		for _, own := range p.podAddresses() {
			inPod.addresses = append(inPod.addresses, own.Addr())
		}
		c.waitLater(p.Name, inPod)
	}

	if err != nil || p.NoWait {
		return a, err
	}

	return a, c.Wait(ctx, p.Name)
}

// configurePod configures the pod's interface as p describes, and sets it up unless p.Down is set. It also adds the
// pod's static entry to the bridge's forwarding database, if p.StaticFDB is set. It stores the indexes of both ends in
// a.
func (c *Conn) configurePod(ctx context.Context, inPod *podNamespace, p *Port, a *Attachment) error {
	var peerErr, indexErr error
	err := p.writeSysctls(inPod)
	a.PeerIndex, peerErr = link.IndexOf(inPod.conn, p.Peer)
	a.Index, indexErr = link.IndexOf(c.nl, p.Name)
	if err = cmp.Or(err, peerErr, indexErr); err == nil && p.NoTxOffload {
		err = errors.Join(inPod.conn.StopTxOffload(p.Peer), c.nl.StartGRO(p.Name))
	}

	if err = cmp.Or(err, ctx.Err()); err != nil {
		return err
	}

	var b nl.Batch
	p.podLinkUp(&b, a.PeerIndex)
	if err := inPod.conn.Execute(&b); err != nil {
		return err
	}

	if p.usesIPv6() {
		// Make the kernel notice the interface's carrier now, since it starts IPv6 only afterwards.
		inPod.conn.RefreshCarrier(p.Peer)
	}

	if p.Announce && !p.Down {
		c.nl.RefreshCarrier(p.Name)
		b.Reset()
		p.announce(&b, a.PeerIndex)
		p.addNeighbours(&b, a.PeerIndex)
		if err := inPod.conn.Execute(&b); err != nil {
			return err
		}
	}

	if !p.StaticFDB {
		return nil
	}

	return c.addStaticFDB(ctx, p, a.Index)
}

// SetPortMTU sets the MTU of a port in bytes. It does not change the peer. It is no error if the port does not exist.
func (c *Conn) SetPortMTU(ctx context.Context, port string, mtu int) error {
	if err := (link.Request{Name: port, MTU: &mtu}).Apply(ctx, c.nl, "set MTU of link", port); err != nil {
		return nl.PassAbsent(err)
	}

	// If the MTU was below 1280, the kernel had dropped the port's IPv6 sysctls, so write them again.
	return c.refuseIPv6(port)
}

// writeSysctls writes the sysctls of the pod's interface and loopback that have no netlink attribute. It must run
// before the interface comes up.
func (p *Port) writeSysctls(inPod *podNamespace) error {
	var errs []error
	if inPod.ipv6 != nil && !p.LeaveIPv6 {
		// Ignore router advertisements. They would add addresses and routes that the caller did not choose.
		err := inPod.ipv6.Prefer(p.Peer+"/accept_ra", "0")
		if p.usesIPv6() || !errors.Is(err, fs.ErrNotExist) { // the file is missing if the MTU is too small for IPv6
			errs = append(errs, err)
		}
	}

	if p.usesIPv6() {
		errs = append(errs, inPod.ipv6.Prefer(p.Peer+"/keep_addr_on_down", "1"))

		// Some runtimes create network namespaces with IPv6 disabled, so enable it. Write only if the value differs,
		// since a write takes the kernel's global lock for links (RTNL). A writer that does not get the lock spins.
		for _, name := range []string{p.Peer, "lo"} {
			_, err := inPod.ipv6.Ensure(name+"/disable_ipv6", "0")
			errs = append(errs, err)
		}
	}

	return errors.Join(errs...)
}

// setUp sets up a port that configure has left down: a port with VLANs, or one for which before is not nil. For other
// ports it does nothing. First it calls before, unless that is nil, with the port's index, and puts the port into its
// VLANs. A port that was up earlier would be in the bridge's default VLAN while the pod may already send.
func (c *Conn) setUp(ctx context.Context, p *Port, before func(context.Context, int) error) error {
	if before == nil && p.VLAN.IsZero() {
		return nil
	}

	index, err := link.IndexOf(c.nl, p.Name)
	if err == nil && before != nil {
		err = before(ctx, index)
	}

	if err == nil && !p.VLAN.IsZero() {
		_, err = c.VLANs().Ensure(ctx, index, p.VLAN)
	}

	if err != nil {
		return err
	}

	r := link.Request{Index: index, Flags: unix.IFF_UP, Change: unix.IFF_UP}
	return r.Apply(ctx, c.nl, "set port up", p.Name)
}

// setDownUnlessPort appends a request to b that sets the link p.Name down, before it becomes a port with VLANs. If p
// has no VLANs, or the link is on its bridge already, it appends nothing. setUp sets the link up again.
func (c *Conn) setDownUnlessPort(ctx context.Context, b *nl.Batch, p *Port) error {
	if p.VLAN.IsZero() {
		return nil
	}
	l, err := c.Link(ctx, p.Name)
	if err == nil && l.Master != p.BridgeIndex {
		link.Request{Name: p.Name, Change: unix.IFF_UP}.Set(b, "set port down", p.Name)
	}
	return err
}

// podNamespace holds what Attach opened inside the pod's network namespace: a netlink socket, the directory of the IPv6
// sysctls, and a Watch of the pod's addresses. Wait uses them later.
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
		_, _ = c.hostIPv6() // open it now; on an error, Attach gets the same error later
		done <- pod.Do(func() error { return inPod.open(c.dialPod, ipv6) })
	}()
	return func() (*podNamespace, error) { err := <-done; return inPod, err }
}

// open opens a netlink socket with dial, and the directory of the IPv6 sysctls if the kernel has IPv6. If ipv6 is set,
// the kernel must have IPv6, and open also starts to watch the pod's addresses (usable). open must run in the pod's
// network namespace.
func (inPod *podNamespace) open(dial func() (*nl.Conn, error), ipv6 bool) (err error) {
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

// close closes the netlink socket, the Watch and the sysctl directory, as far as they are open. It changes nothing in
// the pod.
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

// waitLater stores the podNamespace of a port for a later call of Wait. It closes one that was stored earlier.
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

// closeWaiting closes the podNamespace that waitLater stored for the port, if there is one.
func (c *Conn) closeWaiting(port string) {
	if inPod := c.takeWaiting(port); inPod != nil {
		inPod.close()
	}
}

// Wait waits until the kernel has noticed a port's carrier and the pod's IPv6 addresses are usable. The port then
// forwards, unless the bridge runs the spanning tree protocol (see BridgeState.PortDelay). The kernel notices the
// carrier in the background, some milliseconds late on a busy machine. Before Linux 6.8, Wait waits for this at most
// 100 ms. A packet that is sent earlier gets lost, and its sender repeats it about a second later. If duplicate address
// detection finds another node with one of the addresses, the error matches addr.ErrDuplicate. If an address disappears
// first, the error matches fs.ErrNotExist. If ctx ends first, the error matches ctx's error.
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
