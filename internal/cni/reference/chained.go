package reference

import (
	"fmt"
	"net/netip"

	"github.com/containernetworking/cni/pkg/types"
	current "github.com/containernetworking/cni/pkg/types/100"

	"github.com/tombolo-cni/tombolo"
	"github.com/tombolo-cni/tombolo/network"
)

// Addresses are the pod's as a result has them, but for those that it gives to another interface.
func (c *Call) Addresses(r *current.Result) []netip.Addr {
	var list []netip.Addr
	for _, ip := range r.IPs {
		if i := ip.Interface; i != nil && (r.Interfaces[*i].Name != c.IfName || r.Interfaces[*i].Sandbox == "") {
			continue
		}
		if a, ok := netip.AddrFromSlice(ip.Address.IP); ok {
			list = append(list, a.Unmap())
		}
	}
	return list
}

// Key names the attachment.
func (c *Call) Key() network.Key {
	return network.Key{Network: c.Network, ContainerID: c.ContainerID, IfName: c.IfName}
}

// Chained reads the result of the plugins before, which is needed.
func (c *Call) Chained() (*current.Result, error) {
	prev, err := c.Prev()
	if err == nil && prev == nil {
		err = Errorf(types.ErrInvalidNetworkConfig, "%s needs prevResult: %s works on an interface that a plugin before it made", c.Verb, c.Name)
	}
	return prev, err
}

// TakenBack ends the DEL of a plugin that took back what it gave to a pod. What kept it from that, such as a
// record that cannot be read, or not be written on a full disk, is a warning: with an error, the runtime would not get to the
// DEL of bridge, which comes next and takes down all that the pod has, by the kernel's marks if need be.
func (c *Call) TakenBack(err error) error {
	if err != nil {
		c.Warn(err.Error())
	}
	return nil
}

// Differ is the error by which CHECK gives differences; nil if there are none.
func Differ(diffs []tombolo.Difference, err error) error {
	if err == nil && len(diffs) > 0 {
		err = Errorf(CodeDiffers, "%s", fmt.Sprint(diffs))
	}
	return err
}
