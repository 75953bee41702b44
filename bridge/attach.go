package bridge

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo"
	"github.com/tombolo-cni/tombolo/internal/ident"
	"github.com/tombolo-cni/tombolo/internal/link"
	"github.com/tombolo-cni/tombolo/internal/nl"
	"github.com/tombolo-cni/tombolo/netns"
)

// Attachment describes the result of Attach.
type Attachment struct {
	// Index and MAC belong to the port, and PeerIndex and PeerMAC to the pod's interface, in the pod's namespace.
	Index     int
	MAC       net.HardwareAddr
	PeerIndex int
	PeerMAC   net.HardwareAddr
	MTU       int // of both ends, in bytes
	// NetNSCookie identifies the pod's namespace: see netns.NS.Cookie.
	NetNSCookie uint64
}

// ErrPeerExists is the cause of an error of Attach if the pod already has an interface with the peer's name.
var ErrPeerExists = errors.New("the pod has an interface of this name already")

// ErrBridgeFull is the cause of an error of Attach if the bridge has no room for another port.
var ErrBridgeFull = errors.New("the bridge holds 1023 ports, the most that Linux allows")

// ErrNoIPv6 is the cause of an error of Attach with IPv6 addresses or Autoconf if the kernel has no IPv6.
var ErrNoIPv6 = errors.New("IPv6 is switched off in this kernel (ipv6.disable=1 on its command line, or built without)")

// Attach connects a pod to a bridge. It creates a veth pair: one end is a port of the bridge and up, and the other is
// created in the pod's namespace, and gets addresses and routes. Attach also sets the pod's loopback interface up. When
// Attach returns, the pod's addresses are usable and the port forwards.
//
// After an error nothing remains of the attachment. If a port of this name exists already, the error matches
// fs.ErrExist. If the pod has an interface with the peer's name, it matches ErrPeerExists.
//
// Attach needs CAP_NET_ADMIN in both namespaces and CAP_SYS_ADMIN to enter the pod's.
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

	in, enterErr := pending()
	if err = cmp.Or(err, enterErr); err == nil {
		var a *Attachment
		if a, err = c.setUpPod(ctx, in, &port); err == nil {
			return a, nil
		}
	} else {
		in.close()
	}

	if b.Err(0) != nil {
		return nil, c.explain(&port, err)
	}

	return nil, c.undo(&port, err)
}

// configure appends a port's configuration to a batch and sends it. A kernel without IPv6 refuses the IPv6 settings
// (EAFNOSUPPORT). Then configure sends the configuration again without them. So other kernels need no extra request
// to learn their abilities.
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

// fillIn chooses values for the fields that the caller left open.
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

// explain replaces two errno values of a failed Attach by clear errors. For EEXIST it finds out whether the name in the
// host or the name in the pod is taken. EXFULL means that the bridge has no free port number.
func (c *Conn) explain(p *Port, err error) error {
	switch {
	case errors.Is(err, fs.ErrExist):
		if _, lookErr := c.Link(context.WithoutCancel(context.Background()), p.Name); errors.Is(lookErr,
			fs.ErrNotExist) {
			return &tombolo.OpError{Op: "add link", Object: p.Peer, Err: ErrPeerExists}
		}
	case errors.Is(err, unix.EXFULL):
		return &tombolo.OpError{Op: "add port", Object: p.Name + " to " + p.Bridge, Err: ErrBridgeFull}
	}

	return err
}

// undo deletes the veth pair, and everything else goes with it. It ignores the context, since it must run in any
// case.
func (c *Conn) undo(p *Port, cause error) error {
	c.forget(p.Name)
	var b nl.Batch
	link.Request{Name: p.Name}.Delete(&b, p.Name)
	if err := nl.PassAbsent(c.nl.Execute(&b)); err != nil {
		return errors.Join(cause, fmt.Errorf("undo: %w", err))
	}
	return cause
}

// setUpPod configures the pod's interface, and waits until it is usable, unless the caller waits (Port.NoWait). It
// closes in.
func (c *Conn) setUpPod(ctx context.Context, in *podNamespace, p *Port) (_ *Attachment, err error) {
	a := &Attachment{MAC: p.MAC, PeerMAC: p.PeerMAC, MTU: p.MTU}
	if err = c.configurePod(ctx, in, p, a); err == nil {
		a.NetNSCookie, err = in.conn.NetNSCookie()
	}

	if err != nil || in.usable == nil {
		in.close()
	} else {
		in.link = a.PeerIndex
		for _, own := range p.podAddresses() {
			in.addresses = append(in.addresses, own.Addr())
		}
		c.waitLater(p.Name, in)
	}

	if err != nil || p.NoWait {
		return a, err
	}

	return a, c.Wait(ctx, p.Name)
}

// configurePod adds addresses, routes and neighbours in the pod, and sets the interface up.
func (c *Conn) configurePod(ctx context.Context, in *podNamespace, p *Port, a *Attachment) error {
	err := p.writeSysctls(in)
	if err != nil {
		return err
	}

	if a.PeerIndex, err = link.IndexOf(in.conn, p.Peer); err != nil {
		return err
	}

	if a.Index, err = link.IndexOf(c.nl, p.Name); err != nil {
		return err
	}

	if p.NoTxOffload {
		if err := errors.Join(in.conn.StopTxOffload(p.Peer), c.nl.StartGRO(p.Name)); err != nil {
			return err
		}
	}

	if err := ctx.Err(); err != nil {
		return err
	}

	var b nl.Batch
	p.podLinkUp(&b, a.PeerIndex)
	if err := in.conn.Execute(&b); err != nil {
		return err
	}

	if p.usesIPv6() {
		// IPv6 starts only when the interface is ready.
		in.conn.RefreshCarrier(p.Peer)
	}

	if p.Announce && !p.Down {
		c.nl.RefreshCarrier(p.Name)
		b.Reset()
		p.announce(&b, a.PeerIndex)
		p.addNeighbours(&b, a.PeerIndex)
		if err := in.conn.Execute(&b); err != nil {
			return err
		}
	}

	if !p.StaticFDB {
		return nil
	}

	return c.addStaticFDB(ctx, p, a.Index)
}

// SetPortMTU sets the MTU of a port, in bytes, and not of its peer. A missing port is no error.
func (c *Conn) SetPortMTU(ctx context.Context, port string, mtu int) error {
	var b nl.Batch
	setMTU(&b, port, mtu)
	if err := c.nl.Do(ctx, &b); err != nil {
		return nl.PassAbsent(err)
	}

	// While the MTU was below 1280 the kernel dropped the IPv6 settings, so write them again.
	return c.refuseIPv6(port)
}

func setMTU(b *nl.Batch, name string, mtu int) {
	link.Request{Name: name, MTU: &mtu}.Set(b, "set MTU of link", name)
}

// writeSysctls sets the parameters without a netlink attribute before the interface comes up.
func (p *Port) writeSysctls(in *podNamespace) error {
	var errs []error
	if in.ipv6 != nil && !p.LeaveIPv6 {
		// A router advertisement would add addresses and routes that the caller did not choose.
		err := in.ipv6.Prefer(p.Peer+"/accept_ra", "0")
		if p.usesIPv6() || !errors.Is(err, fs.ErrNotExist) { // the file is missing if the MTU is too small for IPv6
			errs = append(errs, err)
		}
	}

	if p.usesIPv6() {
		errs = append(errs, in.ipv6.Prefer(p.Peer+"/keep_addr_on_down", "1"))

		// Some runtimes create namespaces with IPv6 switched off, so switch it on. Write only if the value differs: for
		// a write the kernel takes its lock on all links, and a writer that fails to get the lock spins.
		for _, name := range []string{p.Peer, "lo"} {
			_, err := in.ipv6.Ensure(name+"/disable_ipv6", "0")
			errs = append(errs, err)
		}
	}

	return errors.Join(errs...)
}

// setUp completes a port that was left down, and sets it up. It calls before, if there is one, with the port's index,
// and puts the port into its VLANs. A port that is up earlier would be in the bridge's default VLAN, and the pod may
// send at once. Without both, the port is up already.
func (c *Conn) setUp(ctx context.Context, p *Port, before func(context.Context, int) error) error {
	if before == nil && p.VLAN.IsZero() {
		return nil
	}

	index, err := link.IndexOf(c.nl, p.Name)
	if err != nil {
		return err
	}

	if before != nil {
		if err := before(ctx, index); err != nil {
			return err
		}
	}

	if !p.VLAN.IsZero() {
		if _, err := c.VLANs().Ensure(ctx, index, p.VLAN); err != nil {
			return err
		}
	}

	var b nl.Batch
	link.Request{Index: index, Flags: unix.IFF_UP, Change: unix.IFF_UP}.Set(&b, "set port up", p.Name)
	return c.nl.Do(ctx, &b)
}

// downUnlessPort sets a port down that is to be in VLANs and is not on its bridge yet. setUp sets it up again.
func (c *Conn) downUnlessPort(ctx context.Context, b *nl.Batch, p *Port) error {
	if p.VLAN.IsZero() {
		return nil
	}
	l, err := c.Link(ctx, p.Name)
	if err == nil && l.Master != p.BridgeIndex {
		link.Request{Name: p.Name, Change: unix.IFF_UP}.Set(b, "set port down", p.Name)
	}
	return err
}
