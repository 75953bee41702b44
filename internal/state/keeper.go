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

// These files tell the plugin about the keeper, and the reverse.

// Contested says that another program undoes again and again tombolod's repairs of the firewall.
type Contested struct {
	Version int       `json:"version,omitempty"`
	At      time.Time `json:"at,omitzero"`     // when it was put right last
	Times   int       `json:"times,omitempty"` // how often it was, since it began
	What    string    `json:"what,omitempty"`  // what was undone last
	By      string    `json:"by,omitempty"`    // the program that changed the firewall last, as the kernel calls it
}

func (d *Dir) contestedPath() string { return d.path + "/contested.json" }

// SetContested writes down that the firewall is contested; nil is that it is not. It is for the
// keeper alone.
func (d *Dir) SetContested(f *Contested) error {
	var err error
	if f == nil {
		err = file.Remove(d.contestedPath())
	} else {
		err = d.replaceFile(d.contestedPath(), Encode(&f.Version, f))
	}
	return doing(err, "write down who changes the firewall")
}

// Contested reads what SetContested wrote, nil if there is nothing.
func (d *Dir) Contested() (*Contested, error) {
	data, err := readFile(d.contestedPath())
	if errors.Is(err, os.ErrNotExist) {
		return nil, nil
	}
	f := new(Contested)
	if err == nil {
		err = Decode(data, &f.Version, f)
	}
	if err != nil {
		return nil, fmt.Errorf("read who changes the firewall: %w", err)
	}
	return f, nil
}

// Zones is what became of links where firewalld runs: tombolod has them join a zone of it. It says
// in the state directory that it does, so that an ADD waits for that, and what it has done, so that
// the next tombolod can undo it.
type Zones struct {
	Version int      `json:"version,omitempty"`
	Joined  []string `json:"joined,omitempty"` // those that are in firewalld's zone by tombolod's doing
	Left    []string `json:"left,omitempty"`   // those that an operator put into another zone
}

func (d *Dir) zonesPath() string { return d.path + "/firewalld" }

func (d *Dir) zonesLockPath() string { return d.path + "/firewalld.lock" }

// Zones reads what SetZones wrote. One that cannot be read is empty: all that this causes is that
// a link stays in a zone.
func (d *Dir) Zones() (Zones, error) {
	var z Zones
	data, err := readFile(d.zonesPath())
	if err == nil {
		err = Decode(data, &z.Version, &z)
	}
	if err != nil && !errors.Is(err, os.ErrNotExist) && !errors.Is(err, ErrDamaged) {
		return Zones{}, fmt.Errorf("read firewalld's links: %w", err)
	}
	return z, nil
}

// SetZones replaces what is on record. It is for the process that attends to zones alone.
func (d *Dir) SetZones(z Zones) error {
	return doing(d.replaceFile(d.zonesPath(), Encode(&z.Version, &z)), "write firewalld's links")
}

// AttendZones says, until what it gives is closed, that links join firewalld's zone as their
// networks are put on record.
func (d *Dir) AttendZones() (*os.File, error) {
	// An ADD that looks has it for the time of a system call.
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

// ZonesAttended says whether a process attends to zones now (AttendZones), and has not left
// the link in a zone that an operator chose. A record that cannot be read costs an ADD the wait.
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

// ForwardedLinks names the links by which the host forwards what pods send: the gateways' of this epoch's networks.
// An uplink's bridge is none of them: its zone is the NIC's, and the operator's to choose. Links may come beside an
// error, where not all networks could be read. It needs no lock: a network's record is replaced whole.
func (d *Dir) ForwardedLinks() (links []string, _ error) {
	epoch, err := d.Epoch()
	if errors.Is(err, os.ErrNotExist) || errors.Is(err, ErrStale) {
		return nil, nil
	} else if err != nil {
		return nil, err
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

// NetworksChanged is a number that changes when a network's record is written or removed.
func (d *Dir) NetworksChanged() int64 {
	info, err := os.Stat(d.networksPath())
	if err != nil {
		return 0
	}
	return info.ModTime().UnixNano()
}

// Failures is how many calls of a verb have failed with a code.
type Failures struct {
	Verb  string
	Code  uint
	Count uint64
}

// lastCode is what larger codes of delegated plugins count as.
const lastCode = uint(999)

func (d *Dir) failuresPath() string { return d.path + "/failures" }

// CountFailure counts a call of a verb that failed with a code, for the keeper's metrics: in a file
// for each, a byte for each call. It does not make the state directory: where there is none, no
// keeper reads it. It needs no lock.
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
	return doing(err, "count a %s that failed with code %d", verb, code)
}

// Failures reads what CountFailure counted.
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
