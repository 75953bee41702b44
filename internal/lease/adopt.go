package lease

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"time"

	"github.com/tombolo-cni/tombolo/addr"
	"github.com/tombolo-cni/tombolo/dhcpc"
	"github.com/tombolo-cni/tombolo/internal/file"
	"github.com/tombolo-cni/tombolo/internal/ident"
	"github.com/tombolo-cni/tombolo/internal/state"
)

// Adoption is what Adopt has to know about a NIC that became a port of a bridge.
type Adoption struct {
	// NIC is the port's name.
	NIC string
	// MAC is the NIC's: the hardware address that its client leased with.
	MAC net.HardwareAddr
	// ClientID is the identity that a server has confirmed the lease to: see ClientID.
	// Empty: the NIC had no lease.
	ClientID string
	// Lease is what the server said then; nil is what the kernel knows of the address.
	Lease *dhcpc.Lease
	// Bridge is the link that has the NIC's addresses now.
	Bridge string
	// Addresses are those that were the NIC's. Others than IPv4 are disregarded.
	Addresses []addr.Address
	// Priority is the metric of the host's default route.
	Priority int
	// Wanted is asked under the lock of the record: where it says no, the NIC has been given
	// back meanwhile, and nothing is written.
	Wanted func() (bool, error)
}

// Adopt makes the keeper responsible for the lease that a NIC had before it was taken
// over: it writes a record (Record.Host) of a lease that is due, for the keeper to renew. Call it right after the takeover, and again whenever the
// takeover is found in place: a record of this boot, bridge and address stays as it is.
//
// Where nothing was leased it does nothing. That no keeper runs is no error: see
// HostTrouble. After a boot the keeper drops the record, without a RELEASE, since the
// host's own client has begun anew.
func Adopt(ctx context.Context, dir *Dir, a *Adoption) error {
	r, err := a.record(time.Now())
	if r == nil && err == nil {
		return nil
	}
	var held *Held
	if err == nil {
		held, err = dir.Lock(ctx, r.Hash())
	}
	if err == nil {
		err = errors.Join(held.adopt(r, a), held.Close())
	}
	if err != nil {
		return fmt.Errorf("adopt DHCP lease of %s: %w", a.NIC, err)
	}
	return nil
}

// adopt writes a record unless the one that there is says the same.
func (h *Held) adopt(r *Record, a *Adoption) error {
	if wanted, err := a.Wanted(); !wanted || err != nil {
		return err
	}
	have, err := h.Load()
	if err == nil && have.Host != nil && have.Boot == r.Boot && have.NetNSCookie == r.NetNSCookie && have.Bridge == r.Bridge &&
		have.Client.MAC.String() == r.Client.MAC.String() && a.find(have.Lease.Address.Addr()) != nil {
		return nil
	}
	if err != nil && !errors.Is(err, os.ErrNotExist) && !errors.Is(err, file.ErrDamaged) {
		return err
	}
	return h.Create(r)
}

// record makes the record of a lease that the NIC had; nil if it had none.
func (a *Adoption) record(now time.Time) (*Record, error) {
	at := a.leased()
	if a.ClientID == "" || at == nil {
		return nil, nil
	}
	id, err := ClientID(a.ClientID, a.MAC)
	if err != nil {
		return nil, err
	}
	boot, err := state.BootID()
	if err != nil {
		return nil, err
	}
	cookie, err := state.NetNSCookie()
	if err != nil {
		return nil, err
	}
	name, _ := os.Hostname() // for the server's table (option 12)
	l := a.Lease
	if l == nil {
		l = leaseOf(at, now.Round(0).UTC())
	}
	l.MAC, l.ClientID = dhcpc.Hex(a.MAC), id
	if !l.Infinite() {
		l.Renew = l.Obtained // the server is to be asked at once
	}
	r := &Record{
		State: Bound, Network: hostName, ContainerID: hostName, IfName: a.NIC, NetNSCookie: cookie, Boot: boot, Bridge: a.Bridge,
		Client: ClientOf(&dhcpc.Config{MAC: a.MAC, ClientID: id, HostName: name}), Lease: l,
		Policy: Policy{Priority: a.Priority},
		Host:   &Host{NIC: a.NIC, Permanent: at.Valid == nil},
	}
	r.Applied = Applied{Addresses: []netip.Prefix{at.Prefix}, Routes: r.Policy.Apply(l).Routes}
	return r, nil
}

// leaseOf is the lease that an address tells of: it ends with the address. Which server gave it is not known, so
// that all are to be asked.
func leaseOf(at *addr.Address, now time.Time) *dhcpc.Lease {
	return &dhcpc.Lease{Address: at.Prefix, Server: netip.IPv4Unspecified(), Obtained: now, Renew: now, Rebind: now, Expire: now.Add(*at.Valid)}
}

// find gives the IPv4 address that is as one of the NIC's; nil if none is.
func (a *Adoption) find(want netip.Addr) *addr.Address {
	for i := range a.Addresses {
		if one := &a.Addresses[i]; one.Prefix.Addr() == want && want.Is4() {
			return one
		}
	}
	return nil
}

// leased gives the address that was leased: the lease's, or the first that has an end.
func (a *Adoption) leased() *addr.Address {
	if a.Lease != nil {
		return a.find(a.Lease.Address.Addr())
	}
	return FirstLeased(a.Addresses)
}

// FirstLeased gives the first IPv4 address that the kernel will end; nil where there is none.
func FirstLeased(list []addr.Address) *addr.Address {
	for i := range list {
		if list[i].Prefix.Addr().Is4() && list[i].Valid != nil {
			return &list[i]
		}
	}
	return nil
}

// HandBack ends the keeper's part in the lease of a NIC that was given back: nothing is released, and the address
// keeps the lifetime that the kernel gives it. It is no error if there is no record.
func HandBack(ctx context.Context, dir *Dir, nic string) error {
	if _, err := dir.Load(HostHash(nic)); errors.Is(err, os.ErrNotExist) {
		return nil
	}
	held, err := dir.Lock(ctx, HostHash(nic))
	if err == nil {
		err = errors.Join(held.Remove(), held.Close())
	}
	if err != nil {
		return fmt.Errorf("hand DHCP lease of %s back: %w", nic, err)
	}
	return nil
}

// HostTrouble tells what is wrong with the host's own leases; without an entry all is
// well. It is for CHECK and STATUS: it reads, and sends nothing.
func HostTrouble(dir *Dir) ([]string, error) {
	records, err := dir.Hosts()
	if err != nil || len(records) == 0 {
		return nil, err
	}
	kept := dir.CheckKeeper()
	var list []string
	for _, r := range records {
		if why := r.trouble(time.Now(), kept); why != "" {
			list = append(list, fmt.Sprintf("the host's own DHCP lease of %s, of %s and on %s now, time left: %s: %s",
				r.Lease.Address, r.Host.NIC, r.Bridge, TimeLeft(r.Lease, time.Now()), why))
		}
	}
	return list, nil
}

// TimeLeft says how long a lease of either family runs.
func TimeLeft(l interface {
	Infinite() bool
	Left(time.Time) time.Duration
}, now time.Time) string {
	if l.Infinite() {
		return "for ever"
	}
	if d := l.Left(now); d > 0 {
		return d.Truncate(time.Second).String()
	}
	return "ended"
}

// trouble says what is wrong with the host's own lease, if anything is; kept is what
// Dir.CheckKeeper says.
func (r *Record) trouble(now time.Time, kept error) string {
	switch {
	case kept != nil:
		return kept.Error()
	case r.Error != "":
		return r.Error
	case r.State == Expired || r.Lease.Left(now) == 0:
		return "it ran out, and the keeper asks for another"
	case !r.Lease.Infinite() && now.After(r.Lease.Rebind) && r.Lease.Rebind.After(r.Lease.Obtained):
		return "no server has renewed it yet, though it is time"
	}
	return ""
}

// hostName is what the record of a lease of the host's own has for a network and for a
// container. No network and no container can have a bracket in its name.
const hostName = "(host)"

// Host is what a record has if its lease is the host's own: the one that the NIC had when
// it became a port of the bridge. A client on a port hears no answer, so the keeper renews
// the lease on the bridge, from its own network namespace. It is never released.
type Host struct {
	// NIC is the port. The link that has the address is Record.Bridge and, where the
	// takeover leaves addresses behind, the NIC.
	NIC string `json:"nic"`
	// Permanent says that the kernel was given no lifetime of the address, and is to be
	// given none: some clients do it so.
	Permanent bool `json:"permanent,omitempty"`
}

// HostHash is the hash of the record of the lease that a NIC of the host had.
func HostHash(nic string) string { return ident.Hash(hostName, hostName, nic) }

// check refuses what the keeper could not work with.
func (h *Host) check(r *Record) error {
	switch ours := r.Network == hostName; {
	case h == nil && !ours:
		return nil
	case h == nil || !ours || r.ContainerID != hostName || r.IfName != h.NIC || r.Bridge == "" || r.State != Bound && r.State != Expired:
		return errors.New("it is of the host's own lease, and not in all that it says")
	}
	return nil
}

// Hosts reads the records of the host's own leases: of all the others, no more than the
// bytes. Files that cannot be read are left out.
func (d *Dir) Hosts() ([]*Record, error) {
	return d.having(hostName, func(r *Record) bool { return r.Host != nil })
}
