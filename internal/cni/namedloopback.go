package cni

import (
	"context"
	"net/netip"
	"slices"

	current "github.com/containernetworking/cni/pkg/types/100"
	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/addr"
	"github.com/tombolo-cni/tombolo/internal/link"
	"github.com/tombolo-cni/tombolo/internal/nl"
	"github.com/tombolo-cni/tombolo/netns"
)

// The loopback interface has this name and this index in all network namespaces (LOOPBACK_IFINDEX).
const (
	loopbackName  = "lo"
	loopbackIndex = 1
)

// loopbackConf is the configuration of the plugin loopback, which sets a pod's interface lo up, like the reference
// plugin of this name. containerd runs it for each pod before the plugins of the pod's networks, unless its option
// use_internal_loopback is set. DEL sets lo down, but never in the host's namespace.
type loopbackConf struct{ Common }

func (f *loopbackConf) run(ctx context.Context, c *call) (*current.Result, error) {
	switch c.verb {
	case "ADD":
		return c.addLoopback(ctx)
	case "DEL":
		return nil, inPodNamespace(c.netns, func(conn *nl.Conn, _ *netns.NS) error { return setLoopback(conn, 0) })
	case "CHECK":
		return nil, inNamespace(c.netns, func(conn *nl.Conn, _ *netns.NS) error {
			l, err := findLink(conn, loopbackName)
			if err == nil && !l.Up() {
				err = newError(codeDiffers, "%s is down", loopbackName)
			}
			return err
		})
	}

	return nil, nil
}

// addLoopback sets lo up. It returns prevResult, or without one, a result with lo's first address of each family, IPv4
// first. If lo has an address that is not a loopback address, it returns an error.
func (c *call) addLoopback(ctx context.Context) (*current.Result, error) {
	prev, err := c.conf.prevResult()
	if err != nil {
		return nil, err
	}

	var list []netip.Prefix
	err = inNamespace(c.netns, func(conn *nl.Conn, _ *netns.NS) error {
		if err := setLoopback(conn, unix.IFF_UP); err != nil {
			return err
		}

		addresses, err := addr.On(conn).List(ctx, addr.Filter{Link: loopbackIndex})
		for _, a := range addresses {
			if !a.Prefix.Addr().IsLoopback() {
				return newError(codeKernel, "%s has %s, which is no loopback address", loopbackName, a.Prefix)
			}
			list = append(list, a.Prefix)
		}
		return err
	})
	if err != nil || prev != nil {
		return prev, err
	}

	result := &current.Result{Interfaces: []*current.Interface{
		{Name: loopbackName, Mac: "00:00:00:00:00:00", Sandbox: c.netns},
	}}
	for _, is4 := range []bool{true, false} {
		if i := slices.IndexFunc(list, func(p netip.Prefix) bool { return p.Addr().Is4() == is4 }); i >= 0 {
			result.IPs = append(result.IPs, &current.IPConfig{Interface: new(int), Address: ipNet(list[i])})
		}
	}

	return result, nil
}

// setLoopback sets lo up if flags is IFF_UP, and down if flags is 0.
func setLoopback(conn *nl.Conn, flags uint32) error {
	r := link.Request{Index: loopbackIndex, Flags: flags, Change: unix.IFF_UP}
	return r.Apply(context.Background(), conn, "set link", loopbackName)
}
