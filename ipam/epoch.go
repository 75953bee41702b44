package ipam

import (
	"context"
	"errors"
	"net/netip"
	"os"
	"path/filepath"
	"time"

	"github.com/tombolo-cni/tombolo/internal/file"
)

const (
	// markerName is the file with the token of the last epoch that used the directory. Its name starts with a dot so
	// that scripts that expand * do not see it. The reference plugin reads it, like every file, and finds no
	// container in it.
	markerName = ".tombolo-epoch"
	// tempSuffix ends the name of a temporary file, which then replaces the marker or the file of kept addresses.
	tempSuffix = ".tmp"
	// maxMarker is the maximum number of bytes that are read from the marker.
	maxMarker = 1024
)

// lastEpoch returns the token of the last epoch that used the directory, or "" if it is unknown.
func (s *store) lastEpoch() string {
	data, _ := readFile(filepath.Join(s.dir, markerName), maxMarker)
	return string(data)
}

// isCurrent reports whether the directory has been used in the node's present epoch. Without a token it reports true.
func (s *store) isCurrent() bool {
	return s.node.Epoch.Token == "" || s.lastEpoch() == s.node.Epoch.Token
}

// isStale reports whether the directory was last used in another epoch, so that its old reservations must be dropped.
func (s *store) isStale() bool { return !s.isCurrent() && s.lastEpoch() != "" }

// maxClockSkew is the largest plausible distance of a file's time into the future. If the distance is larger, the
// file was written before this epoch: a clock without a battery starts behind the times of the previous boot.
const maxClockSkew = time.Minute

// isOld reports whether the file of addr was written before the node's epoch. A time too far in the future counts as
// before. If the epoch's start is unknown, it returns true for every existing file.
func (s *store) isOld(addr netip.Addr) bool {
	info, err := os.Lstat(s.path(addr))
	started := s.node.Epoch.Started
	return err == nil && (started.IsZero() || info.ModTime().Before(started) ||
		time.Until(info.ModTime()) > maxClockSkew)
}

// enter adapts the reservations to the node's present epoch, as the comment of Epoch describes. If the directory was
// used in this epoch already, it does nothing.
func (s *session) enter(ctx context.Context, p pool) error {
	if s.isCurrent() {
		return nil
	}

	alive := map[netip.Addr]Live{}
	if s.node.Live != nil {
		found, err := s.node.Live(ctx)
		if err != nil {
			// Fail, since without this list a pod's address could be assigned twice.
			return s.failf(errors.Join(ErrLiveUnknown, err), "%s: %s", ErrLiveUnknown, err)
		}
		for _, l := range found {
			l.Addr = l.Addr.Unmap().WithZone("")
			alive[l.Addr] = l
		}
	}

	if s.isStale() {
		if err := s.dropOld(alive); err != nil {
			return err
		}
	}

	if err := s.rebuild(alive, p); err != nil {
		return err
	}

	// Sync the marker to disk, unlike reservations. A marker that a power failure damaged would count as unknown, and
	// the reservations of the previous epoch would stay. Only warn of an error: the reservations are complete, and the
	// next use repeats the work.
	path := filepath.Join(s.dir, markerName)
	if err := file.ReplaceDurably(path+tempSuffix, path, []byte(s.node.Epoch.Token)); err != nil {
		s.warnf("write epoch marker: %s", err)
	}

	return nil
}

// dropOld removes reservations from before the epoch's start. It keeps files of another format, and reservations whose
// owner has a record or still has the address in the kernel. If the kernel shows another owner, rebuild later makes a
// reservation for that owner.
func (s *session) dropOld(alive map[netip.Addr]Live) error {
	addrs, err := s.list()
	if err != nil {
		return err
	}

	started, dropped := s.node.Epoch.Started, 0
	for _, addr := range addrs {
		if started.IsZero() || !s.isOld(addr) {
			continue
		}

		held, state, err := s.read(addr)
		l, isAlive := alive[addr]

		// If the owner has a record, its reservation is of this epoch.
		if err != nil || state == stateForeign ||
			state == stateComplete && (isAlive && s.mayBelongTo(held, l) || s.isInUse(held)) {
			continue
		}

		if err := s.release(addr); err != nil {
			s.warnf("%s", err)
			continue
		}

		dropped++
	}

	if dropped > 0 {
		s.warnf("dropped %d reservations from before %s", dropped, started.Format("2006-01-02 15:04:05 MST"))
	}

	return nil
}

// mayBelongTo reports whether the live address l may belong to the owner of the reservation. Either the hashes are
// equal, or the reservation's hash cannot be known.
func (s *store) mayBelongTo(r reservation, l Live) bool {
	hash := s.hashOf(r)
	return hash == "" || hash == l.Hash
}

// rebuild reserves every live address of our ranges that has no reservation. The reservation names its owner by the
// hash. If the hash is unknown, the reservation has no owner.
func (s *session) rebuild(alive map[netip.Addr]Live, p pool) error {
	rebuilt := 0
	for addr, l := range alive {
		if p.indexOf(addr) < 0 || p.isGateway(addr) {
			continue
		}

		hash := l.Hash
		if !isHash(hash) {
			hash = "0" // reserved without an owner
		}

		ok, err := s.reserve(addr, reservation{hash: hash})
		if err != nil {
			return err
		}
		if ok {
			rebuilt++
		}
	}

	if rebuilt > 0 {
		s.warnf("reserved %d addresses that are in use but had no reservation", rebuilt)
	}

	return nil
}
