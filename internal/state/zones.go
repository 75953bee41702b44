package state

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/file"
)

// Where firewalld runs, tombolod has links join a zone of it. It says in the state directory that
// it does, so that an ADD waits for that, and what it has done, so that the next tombolod can undo it.

func (d *Dir) zonesPath() string { return d.path + "/firewalld" }

func (d *Dir) zonesLockPath() string { return d.path + "/firewalld.lock" }

// ForwardedLinks names the links by which the host forwards what pods send: the gateways' of this
// epoch's networks. That of an uplink is none: its zone is the NIC's, and the operator's to choose.
// Links may come beside an error, where not all networks could be read. It needs no lock: a
// network's record is replaced whole.
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
func (d *Dir) NetworksChanged() int64 { return changed(d.networksPath()) }

func changed(dir string) int64 {
	info, err := os.Stat(dir)
	if err != nil {
		return 0
	}
	return info.ModTime().UnixNano()
}

// AttendZones says, until what it gives is closed, that links join firewalld's zone as their
// networks are put on record.
func (d *Dir) AttendZones() (*os.File, error) {
	fd, err := file.Create(d.zonesLockPath(), unix.O_RDWR)
	if err != nil {
		return nil, fmt.Errorf("lock %s: %w", d.zonesLockPath(), err)
	}
	f := os.NewFile(uintptr(fd), d.zonesLockPath())
	err = unix.EWOULDBLOCK
	// An ADD that looks has it for the time of a system call.
	for try := 0; errors.Is(err, unix.EWOULDBLOCK) && try < 20; try++ {
		if try > 0 {
			time.Sleep(5 * time.Millisecond)
		}
		err = unix.Flock(fd, unix.LOCK_EX|unix.LOCK_NB)
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("lock %s: %w", f.Name(), err), f.Close())
	}
	return f, nil
}

// ZonesAttended says whether a process attends to zones now (AttendZones), and has not left
// the link in a zone that somebody chose.
func (d *Dir) ZonesAttended(link string) bool {
	fd, err := file.Open(d.zonesLockPath(), unix.O_RDONLY)
	if err != nil {
		return false
	}
	err = unix.Flock(fd, unix.LOCK_SH|unix.LOCK_NB)
	unix.Close(fd)
	// The plugin does without the decoder. A record that cannot be read costs an ADD the wait.
	data, _ := readFile(d.zonesPath())
	return err == unix.EWOULDBLOCK && !strings.Contains(string(data), wasLeft+link+"\n")
}

// What lines of the record begin with.
const hasJoined, wasLeft = "joined ", "left "

// Zones is what became of links.
type Zones struct {
	Joined []string // those that are in firewalld's zone by tombolod's doing
	Left   []string // those that somebody put into another zone
}

// Zones reads what SetZones wrote. Lines that make no sense are passed over: all that
// they can cause is that a link stays in a zone.
func (d *Dir) Zones() (Zones, error) {
	data, err := readFile(d.zonesPath())
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return Zones{}, fmt.Errorf("read firewalld's links: %w", err)
	}
	return decodeZones(data), nil
}

func decodeZones(data []byte) (z Zones) {
	for line := range bytes.Lines(data) {
		switch what, link, _ := strings.Cut(strings.TrimSuffix(string(line), "\n"), " "); {
		case link == "" || len(link) >= unix.IFNAMSIZ || strings.ContainsAny(link, "/ "):
		case what+" " == hasJoined:
			z.Joined = append(z.Joined, link)
		case what+" " == wasLeft:
			z.Left = append(z.Left, link)
		}
	}
	return z
}

// SetZones replaces what is on record. It is for the process that attends to zones alone.
func (d *Dir) SetZones(z Zones) error {
	if err := file.Replace(d.zonesPath()+".new", unix.O_TRUNC, d.zonesPath(), encodeZones(z)); err != nil {
		return fmt.Errorf("write firewalld's links: %w", err)
	}
	return nil
}

func encodeZones(z Zones) []byte {
	var b strings.Builder
	for _, link := range z.Joined {
		b.WriteString(hasJoined + link + "\n")
	}
	for _, link := range z.Left {
		b.WriteString(wasLeft + link + "\n")
	}
	return []byte(b.String())
}
