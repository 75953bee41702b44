package ipam

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"time"

	"github.com/tombolo-cni/tombolo/internal/file"
)

const (
	// markerName is the file that says in which epoch the directory was last
	// used: it has the token. It starts with a dot so that scripts that go over the reservations
	// with * do not see it. The reference plugin reads it, as it does every
	// file, and finds no container in it.
	markerName = ".tombolo-epoch"
	// tempSuffix is of the marker while it is written.
	tempSuffix = ".tmp"
	// maxMarker bounds what is read of it, in bytes.
	maxMarker = 1024
)

// lastEpoch is the token of the epoch in which the directory was last used; empty if none is known.
func (s *store) lastEpoch() string {
	data, err := readFile(filepath.Join(s.dir, markerName), maxMarker)
	if err != nil {
		return ""
	}
	return string(data)
}

// isCurrent reports whether the directory has been used in the node's epoch before;
// without a token, always.
func (s *store) isCurrent() bool {
	return s.node.Epoch.Token == "" || s.lastEpoch() == s.node.Epoch.Token
}

// isStale reports whether the directory was last used in another epoch, so that
// its old reservations are to be dropped.
func (s *store) isStale() bool { return !s.isCurrent() && s.lastEpoch() != "" }

// fromTheFuture is how much later than now a file's time is that cannot be of this epoch. A clock
// that is behind after a boot, as without a battery, is behind what was written before it.
const fromTheFuture = time.Minute

// isOld reports whether the file of addr is from before the node's epoch. Of an epoch
// whose start is not known, any may be.
func (s *store) isOld(addr netip.Addr) bool {
	info, err := os.Lstat(s.path(addr))
	started := s.node.Epoch.Started
	return err == nil && (started.IsZero() || info.ModTime().Before(started) || time.Until(info.ModTime()) > fromTheFuture)
}

// enter makes the directory one of the node's epoch, if it is not yet: see Epoch.
func (s *session) enter(ctx context.Context, p pool) error {
	if s.isCurrent() {
		return nil
	}
	alive := map[netip.Addr]Live{}
	if s.node.Live != nil {
		found, err := s.node.Live(ctx)
		if err != nil {
			// To go on would risk an address that a pod has.
			return newError(errors.Join(ErrLiveUnknown, err), "network %q: %s: %s", s.network, ErrLiveUnknown, err)
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
	if err := s.writeMarker(); err != nil {
		// Everything is done, and will be done again at the next use.
		s.warnf("%s", err)
	}
	return nil
}

// dropOld removes reservations from before the epoch's start. The live ones
// stay, unless they are another attachment's than the file says: then rebuild
// gives them to that.
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
		if err != nil || state == stateForeign {
			continue
		}
		if l, ok := alive[addr]; ok && state == stateHeld && s.mayBe(held, l) {
			continue
		}
		if state == stateHeld && s.isInUse(held) {
			continue // records are of this epoch
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

// mayBe reports whether the live address l can be that of the reservation: its
// owner has l's hash, or has none that could be known.
func (s *store) mayBe(r reservation, l Live) bool {
	if r.hash != "" {
		return r.hash == l.Hash
	}
	return r.ifName == "" || s.node.Hash == nil || s.node.Hash(Owner{r.containerID, r.ifName}) == l.Hash
}

// rebuild reserves every live address of our ranges that has no reservation,
// for the owner with its hash.
func (s *session) rebuild(alive map[netip.Addr]Live, p pool) error {
	rebuilt := 0
	for addr, l := range alive {
		if !p.contains(addr) || p.isGateway(addr) {
			continue
		}
		hash := l.Hash
		if !isHash(hash) {
			hash = "0" // without an owner, but reserved
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

// writeMarker replaces the marker. Unlike the reservations it is forced to
// disk: one that a power failure tears would keep the reservations of the epoch
// that ended so.
func (s *session) writeMarker() error {
	path := filepath.Join(s.dir, markerName)
	if err := file.ReplaceDurably(path+tempSuffix, path, []byte(s.node.Epoch.Token)); err != nil {
		return fmt.Errorf("write epoch marker: %w", err)
	}
	return nil
}
