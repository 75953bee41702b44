package bridge

import (
	"context"
	"errors"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/addr"
	"github.com/tombolo-cni/tombolo/internal/link"
	"github.com/tombolo-cni/tombolo/internal/nl"
	"github.com/tombolo-cni/tombolo/internal/sysctl"
	"github.com/tombolo-cni/tombolo/netns"
	"github.com/tombolo-cni/tombolo/route"
)

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
	l, err := podLink(podConn, port.Peer)
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
			one.Flags = addr.NoDAD
		}
		_, err := addr.On(podConn).Ensure(one)
		errs = append(errs, err)
	}
	return errors.Join(append(errs, port.restoreRoutes(podConn, l.Index))...)
}

// restoreRoutes adds those that are nowhere, in whichever table: a program may have moved one.
func (p *Port) restoreRoutes(podConn *nl.Conn, index int) error {
	if len(p.Routes) == 0 {
		return nil
	}
	routes := route.On(podConn)
	missing, err := missingRoutes(routes, p.podRoutes(index))
	if err != nil {
		return err
	}
	var errs []error
	for _, want := range missing {
		// One that leads elsewhere may be in its place.
		errs = append(errs, routes.Replace(want))
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
