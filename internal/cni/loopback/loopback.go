// Package loopback is the plugin that containerd up to 1.7 runs for each pod before its networks,
// by the name "loopback": it sets a pod's lo up. It does as the reference plugin does.
package loopback

import (
	"fmt"
	"net/netip"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/addr"
	"github.com/tombolo-cni/tombolo/internal/cni/reference/podlink"
	"github.com/tombolo-cni/tombolo/internal/link"
	"github.com/tombolo-cni/tombolo/internal/nl"
	"github.com/tombolo-cni/tombolo/netns"
)

// Name is that of the pod's interface, and index is the same in every namespace (LOOPBACK_IFINDEX).
const (
	Name  = "lo"
	index = 1
)

// Add sets lo up, and gives its first address of each family, IPv4 first. An address that is
// not within 127.0.0.0/8, and not ::1, is an error. It needs CAP_NET_ADMIN in the pod's
// namespace at path, and CAP_SYS_ADMIN to enter it.
func Add(path string) (addresses []netip.Prefix, _ error) {
	err := podlink.Within(path, func(conn *nl.Conn, _ *netns.NS) error {
		if err := set(conn, unix.IFF_UP); err != nil {
			return err
		}
		list, err := addr.On(conn).List(addr.Filter{Link: index})
		if err != nil {
			return err
		}
		var first [2]netip.Prefix
		for _, a := range list {
			family := &first[0]
			if a.Prefix.Addr().Is6() {
				family = &first[1]
			}
			if !a.Prefix.Addr().IsLoopback() {
				return fmt.Errorf("%s has %s, which is no loopback address", Name, a.Prefix)
			}
			if !family.IsValid() {
				*family = a.Prefix
			}
		}
		for _, p := range first {
			if p.IsValid() {
				addresses = append(addresses, p)
			}
		}
		return nil
	})
	return addresses, err
}

// Del sets lo down. A namespace that is gone, or that nobody names, is success, and so is the
// caller's own: the host's lo stays up.
func Del(path string) error {
	return podlink.WithinPod(path, func(conn *nl.Conn, _ *netns.NS) error { return set(conn, 0) })
}

// Check says that lo is down.
func Check(path string) error {
	return podlink.Within(path, func(conn *nl.Conn, _ *netns.NS) error {
		var l link.Link
		var b nl.Batch
		link.Get(&b, Name, index, &l)
		if err := conn.Execute(&b); err != nil {
			return err
		}
		if !l.Up() {
			return fmt.Errorf("%s is down", Name)
		}
		return nil
	})
}

func set(conn *nl.Conn, flags uint32) error {
	var b nl.Batch
	link.Request{Index: index, Flags: flags, Change: unix.IFF_UP}.Set(&b, "set link", Name)
	return conn.Execute(&b)
}
