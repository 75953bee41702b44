// Package leftover deletes what a reference plugin made for a pod that the program has no record of:
// the node was changed over to this program, or is about to be changed back.
package leftover

import (
	"context"
	"crypto/sha512"
	"encoding/hex"
	"errors"
	"io/fs"
	"net/netip"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/cni/reference"
	"github.com/tombolo-cni/tombolo/internal/ident"
	"github.com/tombolo-cni/tombolo/internal/link"
	"github.com/tombolo-cni/tombolo/internal/nl"
	"github.com/tombolo-cni/tombolo/nft/foreign"
)

// IsNewer says that the reference's plugin bridge made the pod's link, by the result of the last ADD.
// A record is then of an ADD before, whose DEL was the reference's.
func IsNewer(c *reference.Call) bool {
	prev, err := c.Prev()
	if err != nil || prev == nil {
		return false
	}
	port, host := "veth"+ident.Hash(c.Network, c.ContainerID, c.IfName), 0
	for _, in := range prev.Interfaces {
		if in.Name == port {
			return false
		}
		if in.Sandbox == "" {
			host++
		}
	}
	return host > 1 // the bridge, and the port: plugins like ptp have no bridge
}

// Masquerade deletes the rules of the plugins bridge and ptp.
func Masquerade(ctx context.Context, c *reference.Call) error {
	return rules(ctx, c, foreign.ReferenceMasquerade)
}

// HostPorts deletes the rules of the plugin portmap.
func HostPorts(ctx context.Context, c *reference.Call) error {
	return rules(ctx, c, foreign.ReferenceHostPorts)
}

// Forward deletes the rules of the plugin firewall, which go by the addresses that prevResult names;
// without one it deletes none, as the plugin itself.
func Forward(ctx context.Context, c *reference.Call) error {
	return rules(ctx, c, foreign.ReferenceForward)
}

func rules(ctx context.Context, c *reference.Call, part foreign.ReferencePart) error {
	pod := &foreign.ReferencePod{Network: c.Network, ContainerID: c.ContainerID, IfName: c.IfName}
	if prev, err := c.Prev(); err == nil && prev != nil {
		for _, ip := range prev.IPs {
			if a, ok := netip.AddrFromSlice(ip.Address.IP); ok {
				pod.Addresses = append(pod.Addresses, a.Unmap())
			}
		}
	}
	conn, err := foreign.Dial(nil)
	if err != nil {
		return err
	}
	defer conn.Close()
	_, err = conn.RemoveReference(ctx, pod, part)
	return err
}

// Limits deletes the link by which the plugin bandwidth limits what a pod sends. What it limits of
// what a pod receives is gone with the pod's link.
func Limits(c *reference.Call) error {
	const length = 12 // of what follows the prefix, in a name of 15 bytes
	sum := sha512.Sum512([]byte(c.Network + c.ContainerID))
	name := "bwp" + hex.EncodeToString(sum[:])[:length]
	conn, err := nl.Dial(unix.NETLINK_ROUTE, nil)
	if err != nil {
		return err
	}
	defer conn.Close()
	var there link.Link
	var look nl.Batch
	link.Get(&look, name, 0, &there)
	if err = conn.Execute(&look); err == nil && there.Kind == "ifb" {
		var del nl.Batch
		link.Request{Index: there.Index}.Delete(&del, name)
		err = conn.Execute(&del)
	}
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ENODEV) {
		return nil
	}
	return err
}
