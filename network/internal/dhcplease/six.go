package dhcplease

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"slices"
	"time"

	"github.com/tombolo-cni/tombolo/bridge"
	"github.com/tombolo-cni/tombolo/dhcpc/dhcp6"
	"github.com/tombolo-cni/tombolo/dhcpc/transport"
	"github.com/tombolo-cni/tombolo/internal/lease"
	"github.com/tombolo-cni/tombolo/internal/lease/giveback"
	"github.com/tombolo-cni/tombolo/internal/state"
	"github.com/tombolo-cni/tombolo/ipam"
	"github.com/tombolo-cni/tombolo/network/internal/fail"
	"github.com/tombolo-cni/tombolo/network/internal/recorded"
)

// end6 ends what a pod has by DHCPv6. The record has the RELEASE, which the keeper has made. It is sent from the
// pod's interface as long as that is there, else from the host: servers go by its content, and not by its sender.
// Its destination is a multicast group, so no neighbour has to be found.
func end6(ctx context.Context, links *bridge.Conn, rec *lease.Record) error {
	if !rec.Releases6(time.Now()) {
		return nil
	}
	if pod, err := recorded.OpenPod(rec.NetNS, rec.NetNSCookie); err == nil {
		defer pod.Close()
		if index, err := recorded.InterfaceIn(ctx, pod, rec.IfName); err == nil {
			return transport.Send6(&transport.Config{NetNS: pod, Link: index}, rec.Six.Release)
		}
	}
	return giveback.Release6(ctx, rec, links, nil)
}

// awaitPause is the time between two looks for the address that the keeper gets.
const awaitPause = 5 * time.Millisecond

// Await6 waits until the keeper has leased an address for a pod, and the attachment has it on
// record: then the pod, and the firewall, have it. The state's lock must not be held.
func Await6(ctx context.Context, dir *state.Dir, path string, a *state.Attachment) (*state.Attachment, *dhcp6.Lease, error) {
	leases, err := lease.Open(path)
	if err != nil {
		return nil, nil, err
	}
	for {
		rec, err := leases.Load(a.Hash())
		if err != nil {
			return nil, nil, deleted(err)
		}
		if own := rec.Leased6(); own.IsValid() && !rec.Six.Checking {
			now, err := dir.Load(a.Network, a.Hash())
			if err != nil {
				return nil, nil, deleted(err)
			}
			if !now.Moving && slices.ContainsFunc(now.Addresses, func(one ipam.Address) bool { return one.Prefix == own }) {
				return now, rec.Six.Lease, nil
			}
		}
		select {
		case <-ctx.Done():
			why := "tombolod has not said why: see its log"
			if rec.Six != nil && rec.Six.Error != "" {
				why = rec.Six.Error
			}
			return nil, nil, fail.Errorf(fail.ErrTryAgain, `ipv6 "dhcp": %s (%w)`, why, context.Cause(ctx))
		case <-time.After(awaitPause):
		}
	}
}

// dnsWait is how long an ADD waits for DNS, without which it succeeds too. The keeper asks a server three times
// in it.
const dnsWait = 4 * time.Second

// AwaitDNS waits until the keeper has asked for a pod's DNS.
func AwaitDNS(ctx context.Context, path, hash string) (servers []netip.Addr, search []string, _ error) {
	ctx, cancel := context.WithTimeout(ctx, dnsWait)
	defer cancel()
	leases, err := lease.Open(path)
	if err != nil {
		return nil, nil, err
	}
	for {
		rec, err := leases.Load(hash)
		switch {
		case err != nil:
			return nil, nil, deleted(err)
		case rec.Six == nil:
			return nil, nil, nil
		case rec.Six.Information != nil:
			return rec.Six.Information.DNS, rec.Six.Information.Search, nil
		}
		select {
		case <-ctx.Done():
			return nil, nil, fmt.Errorf("no DNS by DHCPv6, although routers say that there is (%w)", context.Cause(ctx))
		case <-time.After(awaitPause):
		}
	}
}

// deleted is the error where a record went meanwhile.
func deleted(err error) error {
	if errors.Is(err, fs.ErrNotExist) {
		return fail.Errorf(fail.ErrTryAgain, `ipv6 "dhcp": the attachment was deleted meanwhile`)
	}
	return fail.State(err)
}
