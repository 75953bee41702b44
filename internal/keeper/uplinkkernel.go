package keeper

import (
	"context"
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo"
	"github.com/tombolo-cni/tombolo/addr"
	"github.com/tombolo-cni/tombolo/bridge"
	"github.com/tombolo-cni/tombolo/bridge/uplink"
	"github.com/tombolo-cni/tombolo/internal/lease"
)

// kernelUplinks works on the uplinks of the host that the keeper runs on. It opens what
// it needs each time, since that is seldom.
type kernelUplinks struct{ *Keeper }

// onUplinks does something on a connection of its own.
func onUplinks[T any](k kernelUplinks, do func(*uplink.Conn) (T, error)) (result T, _ error) {
	conn, err := uplink.Dial(&uplink.Config{NetNS: k.host})
	if err != nil {
		return result, err
	}
	result, err = do(conn)
	return result, errors.Join(err, conn.Close())
}

func (k kernelUplinks) check(ctx context.Context, rec *uplink.Record) ([]tombolo.Difference, error) {
	return onUplinks(k, func(c *uplink.Conn) ([]tombolo.Difference, error) { return c.Check(ctx, rec) })
}

func (k kernelUplinks) mend(ctx context.Context, rec *uplink.Record, j uplink.Journal) (changed bool, _ error) {
	return onUplinks(k, func(c *uplink.Conn) (bool, error) { return c.Mend(ctx, rec, j) })
}

func (k kernelUplinks) present(ctx context.Context, rec *uplink.Record) (*uplink.Record, error) {
	return onUplinks(k, func(c *uplink.Conn) (*uplink.Record, error) { return c.Present(ctx, rec) })
}

func (k kernelUplinks) finish(ctx context.Context, rec *uplink.Record, j uplink.Journal) (*uplink.Record, error) {
	return onUplinks(k, func(c *uplink.Conn) (*uplink.Record, error) { return c.Recover(ctx, rec, j) })
}

func (k kernelUplinks) adopt(ctx context.Context, rec *uplink.Record) error {
	a, err := k.adoption(ctx, rec)
	if err != nil {
		return fmt.Errorf("adopt DHCP lease of %s: %w", rec.NIC, err)
	}
	_, err = lease.Adopt(ctx, k.leases, a)
	return err
}

// adoption says what there is to adopt.
func (k kernelUplinks) adoption(ctx context.Context, rec *uplink.Record) (*lease.Adoption, error) {
	conn, err := bridge.Dial(&bridge.Config{NetNS: k.host})
	if err != nil {
		return nil, err
	}
	defer conn.Close()
	nic, err := conn.Link(ctx, rec.NIC)
	if err != nil {
		return nil, err
	}
	br, err := conn.Link(ctx, rec.Bridge)
	if err != nil {
		return nil, err
	}
	list, err := conn.Addresses().List(addr.Filter{Link: br.Index, Family: unix.AF_INET})
	if err != nil {
		return nil, err
	}
	name, err := os.Hostname()
	if err != nil {
		return nil, err
	}
	return &lease.Adoption{
		NIC: rec.NIC, MAC: nic.MAC, ClientID: rec.ClientID, Bridge: rec.Bridge, Addresses: list, HostName: name, NetNS: k.host,
		Wanted: func() (bool, error) { return k.isTaken(rec) },
	}, nil
}

// isTaken says whether a takeover is still the one that was looked at.
func (k kernelUplinks) isTaken(rec *uplink.Record) (bool, error) {
	data, err := k.state.Uplink(rec.NIC).Load()
	if err != nil {
		return false, err
	}
	now, err := uplink.ParseRecord(data)
	return err == nil && now.State == uplink.Taken && now.Bridge == rec.Bridge, err
}

func (k kernelUplinks) disown(ctx context.Context, nic string, give func() error) error {
	return lease.HandBack(ctx, k.leases, nic, give)
}

func (k kernelUplinks) links(rec *uplink.Record) (found [2]int) {
	for i, name := range []string{rec.NIC, rec.Bridge} {
		// What is not there is for check to say.
		if index, err := (kernel{k.host}).link(name); err == nil {
			found[i] = index
		}
	}
	return found
}
