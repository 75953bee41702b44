package cni

import (
	"context"
	"errors"
	"fmt"
	"net"
	"slices"
	"strings"

	"github.com/containernetworking/cni/pkg/types"
	current "github.com/containernetworking/cni/pkg/types/100"

	"github.com/tombolo-cni/tombolo/internal/printable"
	"github.com/tombolo-cni/tombolo/network"
)

// check runs the verb CHECK. It compares the attachment in the kernel with its record and with prevResult, the result
// of the whole plugin chain. It returns all differences in one error.
func (c *call) check(ctx context.Context, node *network.Node, conf *NetConf) error {
	prev, err := conf.resultToCheck()
	if err != nil {
		return err
	}

	s, pod := conf.settings(), c.pod()
	if pod.NetNS, err = c.openPod(); err != nil {
		return err
	}
	defer pod.NetNS.Close()
	if pod.Lease, err = c.allocator(conf, &s); err != nil {
		return err
	}

	var found []string
	if pod.Reported, found, err = c.reported(prev); err != nil {
		return err
	}

	diffs, err := node.Check(ctx, &s, &pod)
	if err != nil {
		return c.explain(err)
	}

	found = append(found, printable.Texts(diffs)...)
	if len(found) == 0 {
		return nil
	}

	return newError(codeDiffers, "container %s, attachment %s to network %q: %s: %s", c.containerID, c.ifName,
		conf.Name, printable.Count(len(found), "difference", "differences"), strings.Join(found, "; "))
}

// reported converts prevResult for node.Check, which compares it with the kernel. It leaves out the MACs of the pod's
// other interfaces. The returned list describes faults of prevResult. An invalid route is an error.
func (c *call) reported(prev *current.Result) (*network.Reported, []string, error) {
	r := &network.Reported{HostMACs: map[string]string{}}
	var wrong []string
	if !slices.ContainsFunc(prev.Interfaces, c.isPods) {
		wrong = append(wrong, fmt.Sprintf("prevResult has no interface %s of the pod", c.ifName))
	}

	inPod := 0
	for _, iface := range prev.Interfaces {
		if iface.Sandbox == "" {
			r.HostMACs[iface.Name] = iface.Mac
			continue
		}

		inPod++
		if iface.Name != c.ifName || iface.Mac == "" {
			continue
		}

		mac, err := net.ParseMAC(iface.Mac)
		if err != nil || len(mac) != 6 {
			wrong = append(wrong, fmt.Sprintf("prevResult gives the interface %s the MAC %.40q, which is invalid",
				iface.Name, iface.Mac))
			continue
		}

		r.MAC = mac
	}

	for _, ip := range prev.IPs {
		p, ok := prefixOf(ip.Address)
		switch {
		case !ok:
		// An address without an interface belongs to the pod's interface for certain only if the pod has no other
		// interface.
		case ip.Interface == nil && inPod <= 1, ip.Interface != nil && c.isPods(prev.Interfaces[*ip.Interface]):
			r.Addresses = append(r.Addresses, p)
		case ip.Interface == nil:
			r.Unplaced = append(r.Unplaced, p)
		default:
			r.Others = append(r.Others, p)
		}
	}

	var err error
	r.Routes, err = routesOf(prev.Routes)
	return r, wrong, err
}

// status runs the verb STATUS. It returns an error if no ADD can succeed now. It changes nothing, with the exception
// that network.Node.Ready describes.
func (c *call) status(ctx context.Context, node *network.Node, conf *NetConf) error {
	s := conf.settings()
	leases, err := c.allocator(conf, &s)
	if err != nil {
		return err
	}

	err = node.Ready(ctx, &s, leases)

	// All errors of Ready get code 50, the specification's code for a plugin that cannot serve an ADD now. The
	// exceptions are network.ErrConflict, and errors that contain a *types.Error.
	if err == nil || errors.As(err, new(*types.Error)) || errors.Is(err, network.ErrConflict) {
		return err
	}

	return newError(codeNotAvailable, "%v", err)
}
