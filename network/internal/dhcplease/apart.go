package dhcplease

import (
	"context"
	"errors"
	"io/fs"
	"net/netip"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/dhcpc"
	"github.com/tombolo-cni/tombolo/dhcpc/transport"
	"github.com/tombolo-cni/tombolo/internal/lease"
	"github.com/tombolo-cni/tombolo/internal/link"
	"github.com/tombolo-cni/tombolo/internal/lockorder"
	"github.com/tombolo-cni/tombolo/internal/nl"
	"github.com/tombolo-cni/tombolo/netns"
	"github.com/tombolo-cni/tombolo/network/internal/fail"
)

// Apart leases for an interface of a pod's that another program made.
type Apart struct {
	Dir *lease.Dir
	// Record has the names of the interface, the namespace's path, the client and the policy.
	Record  *lease.Record
	Timeout time.Duration // 0 is dhcpc's
	Warn    func(string)
}

// again is when a DISCOVER is repeated for the first time: the other program may have made the
// interface this moment, and a bridge that it is behind may not forward yet.
const again = time.Second

// Lease gets a lease on the interface itself, which it sets up. One that the interface has already is
// given again, and another interface of the same name asks for the address of the one before.
func (a *Apart) Lease(ctx context.Context) (*dhcpc.Lease, error) {
	rec := a.Record
	pod, err := netns.Open(rec.NetNS)
	if err != nil {
		return nil, err
	}
	defer pod.Close()
	if rec.NetNSCookie, err = pod.Cookie(); err != nil {
		return nil, err
	}
	if rec.Boot, err = lease.Boot(); err != nil {
		return nil, err
	}
	held, err := a.Dir.Lock(ctx, rec.Hash())
	if err != nil {
		return nil, fail.Errorf(fail.ErrTryAgain, "%w", err)
	}
	defer held.Close()
	in, err := a.setUp(pod)
	if err != nil {
		return nil, err
	}
	last, err := a.last(held)
	if err != nil {
		return nil, err
	}
	if last != nil {
		if l := last.Lease; last.State == lease.Bound && l.Left(time.Now()) != 0 && last.Boot == rec.Boot &&
			last.NetNSCookie == rec.NetNSCookie && slices.Equal(last.Client.MAC, rec.Client.MAC) {
			return l, nil
		}
		rec.Lease = last.Lease
	} else if rec.Client.Sticky {
		if last, err := a.Dir.Recall(rec.Network, rec.Client.ClientID); err == nil && last != nil {
			rec.Lease = last.Lease
		}
	}
	rec.State, rec.Apart, rec.Created = lease.Adding, true, time.Now().UTC()
	if err := held.Create(rec); err != nil {
		return nil, fail.State(err)
	}
	sockets := &transport.Config{NetNS: pod, Link: in.Index, MAC: in.MAC, ARP: rec.Client.DetectConflicts}
	got, err := a.acquire(ctx, sockets)
	if err != nil {
		return nil, errors.Join(err, held.Remove())
	}
	rec.State, rec.Lease, rec.Applied = lease.Bound, got, rec.Policy.Apply(got)
	if err := held.Replace(rec); err != nil {
		ctx := context.WithoutCancel(ctx)
		return nil, errors.Join(fail.State(err), releaseFromPod(ctx, sockets, got), held.Remove())
	}
	return got, nil
}

// last is what is on record of the interface; nil if nothing is.
func (a *Apart) last(held *lease.Held) (*lease.Record, error) {
	last, err := held.Load()
	var damaged *lease.RecordError
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil, nil
	case errors.As(err, &damaged):
		a.Warn(err.Error())
		_, err := held.SetAside()
		return nil, err
	case err != nil:
		return nil, fail.State(err)
	case !last.Apart:
		return nil, fail.Errorf(fail.ErrExists, "container %s has an attachment %s to network %q, which has a lease of its own", last.ContainerID, last.IfName, last.Network)
	}
	return last, nil
}

// setUp finds the interface, sets it up, and notes what the record says of it.
func (a *Apart) setUp(pod *netns.NS) (*link.Link, error) {
	conn, err := nl.Dial(unix.NETLINK_ROUTE, &nl.Config{NetNS: pod})
	if err != nil {
		return nil, err
	}
	defer conn.Close()
	in, err := readLink(conn, a.Record.IfName, 0)
	if err != nil {
		return nil, err
	}
	if !in.Up() {
		var b nl.Batch
		link.Request{Index: in.Index, Flags: unix.IFF_UP, Change: unix.IFF_UP}.Set(&b, "set up link", in.Name)
		if err := conn.Execute(&b); err != nil {
			return nil, err
		}
	}
	conn.RefreshCarrier(in.Name)
	a.Record.Client.MAC = dhcpc.Hex(in.MAC)
	a.Record.Bridge = below(conn, in)
	return in, nil
}

func readLink(conn *nl.Conn, name string, index int) (*link.Link, error) {
	var l link.Link
	var b nl.Batch
	link.Get(&b, name, index, &l)
	return &l, conn.Execute(&b)
}

// below names the host's link that an interface rests on, or the bridge that it is behind: what is
// sent there comes to the servers too. It is empty where the host has none.
func below(pod *nl.Conn, in *link.Link) string {
	if onHost, err := in.RestsHere(pod); err != nil || !onHost {
		return ""
	}
	host, err := nl.Dial(unix.NETLINK_ROUTE, nil)
	if err != nil {
		return ""
	}
	defer host.Close()
	l, err := readLink(host, "", in.Lower)
	if err != nil || in.Kind != "veth" {
		return l.Name
	}
	if l.Master == 0 {
		return ""
	}
	host.RefreshCarrier(l.Name)
	master, err := readLink(host, "", l.Master)
	if err != nil {
		return ""
	}
	return master.Name
}

// acquire asks for a lease, and hears answers in the pod: by what they say nothing but the pod goes.
func (a *Apart) acquire(ctx context.Context, sockets *transport.Config) (*dhcpc.Lease, error) {
	cfg := a.Record.Client.Config(a.Record.Lease)
	cfg.Timeout, cfg.Retransmit = a.Timeout, again
	cfg.Refuse = func(l, _ *dhcpc.Lease) error { return lease.Impossible(l) }
	cfg.Dial = func(context.Context, netip.Addr) (dhcpc.Transport, error) { return transport.DialRaw(sockets) }
	client, err := dhcpc.New(cfg)
	if err != nil {
		return nil, err
	}
	lockorder.Slow("a DHCP server")
	got, err := client.Acquire(ctx)
	if err != nil {
		return nil, fail.Errorf(fail.ErrTryAgain, "%w", err)
	}
	for _, why := range got.Ignored {
		a.Warn("lease of " + got.Address.String() + ": " + why)
	}
	return got, nil
}
