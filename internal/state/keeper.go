package state

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/file"
)

// The following records carry information between the plugin and the keeper (tombolod).

// Contested describes a conflict: another program undoes tombolod's repairs of the firewall again and again.
type Contested struct {
	Version int       `json:"version,omitempty"`
	At      time.Time `json:"at,omitzero"`     // the time of the last repair
	Times   int       `json:"times,omitempty"` // the number of repairs in this conflict
	What    string    `json:"what,omitempty"`  // the change that was last repaired
	// By is the process name of the program that undoes the repairs. It is empty if the program is not known for
	// certain.
	By string `json:"by,omitempty"`
}

func (d *Dir) contestedPath() string { return d.path + "/contested.json" }

// SetContested records that another program undoes tombolod's repairs of the firewall. If f is nil, it removes the
// record. Only tombolod calls it.
func (d *Dir) SetContested(f *Contested) error {
	var err error
	if f == nil {
		err = file.Remove(d.contestedPath())
	} else {
		err = d.replaceFile(d.contestedPath(), Encode(&f.Version, f))
	}
	return WithOperation(err, "write down who changes the firewall")
}

// Contested reads the record that SetContested has written. If there is none, it returns nil.
func (d *Dir) Contested() (*Contested, error) {
	data, err := readFile(d.contestedPath())
	if err != nil {
		return nil, WithOperation(Ignore(err, os.ErrNotExist), "read who changes the firewall")
	}
	f := new(Contested)
	return f, WithOperation(Decode(data, &f.Version, f), "read who changes the firewall")
}

// Zones lists the links that tombolod has put into firewalld's zone trusted. It also lists the links for which an
// operator or another program chose another zone. For these links an ADD does not wait for tombolod. From this record,
// a restarted tombolod knows which links to remove from the zone.
type Zones struct {
	Version int      `json:"version,omitempty"`
	Joined  []string `json:"joined,omitempty"` // links that tombolod put into the zone
	Left    []string `json:"left,omitempty"`   // links for which somebody else chose another zone
}

func (d *Dir) zonesPath() string { return d.path + "/firewalld" }

func (d *Dir) zonesLockPath() string { return d.path + "/firewalld.lock" }

// Zones reads the record that SetZones has written. A missing or damaged record is no error and counts as empty. Links
// that were in the zone then stay there, and the firewall no longer drops their new connections to links of others.
func (d *Dir) Zones() (Zones, error) {
	var z Zones
	data, err := readFile(d.zonesPath())
	if err == nil {
		err = Decode(data, &z.Version, &z)
	}
	return z, WithOperation(Ignore(err, os.ErrNotExist, ErrDamaged), "read firewalld's links")
}

// SetZones replaces the record of the zones. Only the process that called AttendZones calls it.
func (d *Dir) SetZones(z Zones) error {
	return WithOperation(d.replaceFile(d.zonesPath(), Encode(&z.Version, &z)), "write firewalld's links")
}

// AttendZones announces to ADDs that this process adds the link of each newly recorded network to firewalld's zone
// trusted. The announcement ends when the caller closes the returned file. If another process has announced this
// already, the error matches ErrLocked.
func (d *Dir) AttendZones() (*os.File, error) {
	// An ADD that looks for this announcement holds the lock for the time of one system call. So wait briefly.
	ctx, cancel := context.WithTimeout(context.Background(), 100*time.Millisecond)
	defer cancel()
	fd := -1
	err := file.Await(ctx, d.zonesLockPath(), func() (_ bool, err error) {
		fd, err = file.TryLock(d.zonesLockPath(), unix.O_RDWR|unix.O_CREAT)
		return fd >= 0, err
	})
	if err != nil {
		return nil, err
	}
	return os.NewFile(uintptr(fd), d.zonesLockPath()), nil
}

// ZonesAttended reports whether a process now manages zones (see AttendZones) and Zones.Left does not list the link. If
// the record of the zones cannot be read, it counts as empty, and an ADD may wait in vain.
func (d *Dir) ZonesAttended(link string) bool {
	fd, err := file.Open(d.zonesLockPath(), unix.O_RDONLY)
	if err != nil {
		return false
	}

	defer unix.Close(fd)
	free, err := file.TryFlock(fd, unix.LOCK_SH)
	if free || err != nil {
		return false
	}

	z, _ := d.Zones()
	return !slices.Contains(z.Left, link)
}

// ForwardedLinks returns the links through which the host forwards packets of pods. These are the links with gateway
// addresses in the networks of the present epoch. ForwardedLinks leaves out bridges with an uplink. Such a bridge
// belongs to the NIC's zone, which the operator chooses. If the records of some networks cannot be read, it returns an
// error together with the links of the other networks. It needs no lock, since a network's record is replaced as a
// whole.
func (d *Dir) ForwardedLinks() (links []string, _ error) {
	epoch, err := d.Epoch()
	if err != nil {
		return nil, Ignore(err, os.ErrNotExist, ErrStale)
	}

	records, bad, err := d.ListNetworks()
	errs := []error{err}
	for _, b := range bad {
		errs = append(errs, b)
	}

	for _, n := range records {
		if n.Epoch == epoch.Token() && n.Bridge != "" && n.Uplink == "" && len(n.Gateways) > 0 {
			links = append(links, n.GatewayLink())
		}
	}

	slices.Sort(links)
	return slices.Compact(links), errors.Join(errs...)
}

// NetworksChanged returns a number that changes whenever a network's record is written or removed. It is 0 before the
// first record. Before Linux 6.13, a second change within one tick of the kernel's clock (up to 10 ms) may leave the
// number as it is.
func (d *Dir) NetworksChanged() int64 {
	info, err := os.Stat(d.networksPath())
	if err != nil {
		return 0
	}
	return info.ModTime().UnixNano()
}

// Failures is the number of failed calls of one CNI verb, such as ADD, with one error code.
type Failures struct {
	Verb  string
	Code  uint
	Count uint64
}

// lastCode stands for itself and for all larger codes, which other plugins may return.
const lastCode = uint(999)

func (d *Dir) failuresPath() string { return d.path + "/failures" }

// CountFailure counts a failed call of a CNI verb for tombolod's metrics. Each verb and code has a file, with one byte
// for each call. If there is no state directory, CountFailure returns an error and creates none. It needs no lock.
func (d *Dir) CountFailure(verb string, code uint) error {
	path := fmt.Sprintf("%s/%s.%d", d.failuresPath(), verb, min(code, lastCode))
	const flags = unix.O_WRONLY | unix.O_APPEND | unix.O_CREAT
	fd, err := file.Open(path, flags)
	if errors.Is(err, os.ErrNotExist) && unix.Mkdir(d.failuresPath(), 0o700) != unix.ENOENT {
		fd, err = file.Open(path, flags)
	}
	if err == nil {
		err = errors.Join(file.WriteAll(fd, path, []byte{'.'}), unix.Close(fd))
	}
	return WithOperation(err, "count a %s that failed with code %d", verb, code)
}

// Failures returns the numbers of failed calls that CountFailure has counted.
func (d *Dir) Failures() ([]Failures, error) {
	entries, err := file.ReadDir(d.failuresPath())
	if err != nil {
		return nil, fmt.Errorf("read which calls failed: %w", err)
	}

	var list []Failures
	for _, e := range entries {
		verb, digits, _ := strings.Cut(e.Name(), ".")
		code, err := strconv.ParseUint(digits, 10, 16)
		info, statErr := e.Info()
		if err == nil && statErr == nil && info.Mode().IsRegular() {
			list = append(list, Failures{verb, uint(code), uint64(info.Size())})
		}
	}

	return list, nil
}
