package ipam

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"path/filepath"
	"time"

	"github.com/tombolo-cni/tombolo/internal/file"
	"github.com/tombolo-cni/tombolo/internal/strict"
)

const (
	// markerName is the file that says in which epoch the directory was last
	// used. It starts with a dot so that scripts that go over the reservations
	// with * do not see it. The reference plugin reads it, as it does every
	// file, and finds no container in it: its content starts with a brace.
	markerName = ".tombolo-epoch"
	// tempSuffix is of the marker while it is written.
	tempSuffix = ".tmp"
	// maxMarker bounds what is read of it, in bytes.
	maxMarker = 1024
	// markerVersion is the one version there is.
	markerVersion = 1
)

// A marker is the content of the marker file.
type marker struct {
	Version int    `json:"version"`
	Epoch   string `json:"epoch"` // Epoch.Token
}

// errMarker means that the marker file holds something else.
var errMarker = errors.New("not an epoch marker of version 1")

// parseMarker returns the token in a marker file.
func parseMarker(data []byte) (string, error) {
	var m marker
	newer := func(string, string) bool { return true } // fields that a later version adds
	if err := strict.Unmarshal(data, &m, newer); err != nil {
		return "", fmt.Errorf("%w: %w", errMarker, err)
	}
	if m.Version != markerVersion || m.Epoch == "" {
		return "", errMarker
	}
	return m.Epoch, nil
}

// markerToken returns the token of the directory's last use; fs.ErrNotExist if
// there is no marker.
func (s *store) markerToken() (string, error) {
	path := filepath.Join(s.dir, markerName)
	data, err := readFile(path, maxMarker)
	if err != nil {
		return "", err
	}
	token, err := parseMarker(data)
	if err != nil {
		return "", fmt.Errorf("%s: %w", path, err)
	}
	return token, nil
}

// isCurrent reports whether the directory has been used in the node's epoch before;
// without a token, always.
func (s *store) isCurrent() bool {
	if s.node.Epoch.Token == "" {
		return true
	}
	token, err := s.markerToken()
	return err == nil && token == s.node.Epoch.Token
}

// isStale reports whether the directory was last used in another epoch, so that
// its old reservations are to be dropped.
func (s *store) isStale() bool {
	token, err := s.markerToken()
	return err == nil && s.node.Epoch.Token != "" && token != s.node.Epoch.Token
}

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
	switch _, err := s.markerToken(); {
	case err == nil:
		if err := s.dropOld(alive); err != nil {
			return err
		}
	case errors.Is(err, fs.ErrNotExist):
	default:
		s.warnf("%s: treated as missing, so that no reservation is dropped", err)
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
	owner, known := r.owner()
	switch {
	case !known:
		return r.hash == l.Hash
	case owner.IfName == "" || s.node.Hash == nil:
		return true
	default:
		return s.node.Hash(owner) == l.Hash
	}
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
			hash = "0" // nobody's, but reserved
		}
		err := s.reserveFound(addr, reservation{hash: hash})
		if errors.Is(err, fs.ErrExist) {
			continue
		}
		if err != nil {
			return s.ioError("reserve "+addr.String()+", which is in use", err)
		}
		rebuilt++
	}
	if rebuilt > 0 {
		s.warnf("reserved %d addresses that are in use but had no reservation", rebuilt)
	}
	return nil
}

// reserveFound makes a reservation file, also in the place of one that is cut
// short.
func (s *session) reserveFound(addr netip.Addr, r reservation) error {
	err := createFile(s.path(addr), r.content())
	if !errors.Is(err, fs.ErrExist) {
		return err
	}
	if _, state, readErr := s.read(addr); readErr != nil || state != stateTruncated {
		return err
	}
	if err := s.reclaim(addr); err != nil {
		return err
	}
	return createFile(s.path(addr), r.content())
}

// writeMarker replaces the marker. Unlike the reservations it is forced to
// disk: one that a power failure tears would keep the reservations of the epoch
// that ended so.
func (s *session) writeMarker() error {
	path := filepath.Join(s.dir, markerName)
	content, err := json.Marshal(marker{Version: markerVersion, Epoch: s.node.Epoch.Token})
	if err != nil {
		return fmt.Errorf("write epoch marker: %w", err)
	}
	if err := file.ReplaceDurably(path+tempSuffix, path, content); err != nil {
		return fmt.Errorf("write epoch marker: %w", err)
	}
	return nil
}
