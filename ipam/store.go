package ipam

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/file"
	"github.com/tombolo-cni/tombolo/internal/ident"
	"github.com/tombolo-cni/tombolo/internal/lockorder"
)

const (
	// lastPrefix is the beginning of the name of a file with the last assigned address. The index of the range set
	// follows.
	lastPrefix = "last_reserved_ip."
	// maxLast limits the number of bytes that are read from a last_reserved_ip file. An IPv6 address has at most 39
	// bytes.
	maxLast = 64
	// maxProbes is the number of taken or kept addresses after which nextFree lists the directory. Up to this number,
	// probing is cheaper than listing even a small directory.
	maxProbes = 8
)

// A store is the directory with the reservations of one network.
type store struct {
	dir     string
	network string
	wait    time.Duration // maximum wait for the lock
	node    Node
}

// failf returns an error that names the network and matches cause.
func (s *store) failf(cause error, format string, args ...any) error {
	return newError(cause, "network %q: %s", s.network, fmt.Sprintf(format, args...))
}

// ioError returns an error about a failed operation on the directory. It matches err.
func (s *store) ioError(doing string, err error) error { return s.failf(err, "%s: %s", doing, err) }

// warnf sends a message to Node.Warn.
func (s *store) warnf(format string, args ...any) {
	if s.node.Warn != nil {
		s.node.Warn(fmt.Sprintf("network %q: %s", s.network, fmt.Sprintf(format, args...)))
	}
}

// path returns the path of addr's reservation file. Its name is the canonical text of the address, which package
// netip and the reference plugin write alike, also for IPv6.
func (s *store) path(addr netip.Addr) string { return s.dir + "/" + addr.String() }

// read returns the reservation of addr. For a file of a kind that cannot be read, such as a directory, it returns
// stateForeign and no error. If there is no file, the error matches fs.ErrNotExist. Any other error means that the
// disk or the machine failed, so the owner is unknown.
func (s *store) read(addr netip.Addr) (reservation, reservationState, error) {
	data, err := readFile(s.path(addr), maxReservation)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return reservation{}, 0, err
	case isFault(err):
		return reservation{}, stateForeign, s.ioError("read the reservation of "+addr.String(), err)
	case err != nil:
		return reservation{}, stateForeign, nil
	}

	held, state := parseReservation(data)
	return held, state, nil
}

// isFault reports whether an error of reading a file comes from the disk or the machine. Other errors come from the
// file's type or permissions, such as EISDIR for a directory.
func isFault(err error) bool {
	return slices.ContainsFunc([]error{unix.EIO, unix.ENOMEM, unix.EMFILE, unix.ENFILE, unix.ESTALE, unix.ETIMEDOUT},
		func(fault error) bool { return errors.Is(err, fault) })
}

// isOwner reports whether r is a reservation of the owner.
func (s *store) isOwner(r reservation, owner Owner) bool {
	if r.hash != "" {
		return r.hash == s.hashOf(reservation{Owner: owner})
	}
	return r.Owner == owner
}

// hashOf returns the hash of the reservation's owner, or "" if it cannot be known.
func (s *store) hashOf(r reservation) string {
	if r.hash == "" && s.node.Hash != nil {
		return s.node.Hash(r.Owner)
	}
	return r.hash
}

// list returns the addresses that have a reservation file, unsorted. Without a directory there are none.
func (s *store) list() ([]netip.Addr, error) {
	dir, err := os.Open(s.dir)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil, nil
	case err != nil:
		return nil, s.ioError("list the reservations", err)
	}
	defer dir.Close()
	names, err := dir.Readdirnames(-1)
	if err != nil {
		return nil, s.ioError("list the reservations", err)
	}

	addrs := make([]netip.Addr, 0, len(names))
	for _, name := range names {
		addr, err := netip.ParseAddr(name)
		if err == nil && addr.String() == name && addr.Zone() == "" && !addr.Is4In6() {
			addrs = append(addrs, addr)
		}
	}

	return addrs, nil
}

// reserve creates a reservation of addr, and returns true. It returns false if addr is reserved for another owner, or
// if its file has another format or cannot be read. If addr is reserved for the container and interface in r, the error
// matches ErrDuplicate. reserve replaces the empty file of a process that died.
func (s *session) reserve(addr netip.Addr, r reservation) (bool, error) {
	path := s.path(addr)
	for range 2 {
		err := createFile(path, r.content())
		if err == nil {
			return true, nil
		}

		if !errors.Is(err, fs.ErrExist) {
			return false, s.ioError("reserve "+addr.String(), err)
		}

		held, state, err := s.read(addr)
		switch {
		case err != nil, state == stateForeign:
			s.warnf("%s holds no reservation; %s is not given to anyone", path, addr)
			return false, nil
		case state == stateComplete:
			if r.ContainerID != "" && s.isOwner(held, r.Owner) {
				return false, s.failf(ErrDuplicate, "interface %s of container %s already has %s: DEL it first",
					r.IfName, r.ContainerID, addr)
			}
			return false, nil
		}

		// A creator holds the lock until its file is complete. We hold the lock now, so this file's creator is dead.
		if err := s.reclaim(addr); err != nil {
			return false, err
		}
	}

	return false, nil
}

// reclaim removes a reservation file whose creator died before it had written the content, and warns about it.
func (s *session) reclaim(addr netip.Addr) error {
	s.warnf("reclaimed %s: its file is empty or cut short, so the process that reserved it died too early", addr)
	if err := file.Remove(s.path(addr)); err != nil {
		return s.ioError("reclaim "+addr.String(), err)
	}
	return nil
}

// release removes the reservation of addr. The caller has checked the owner. If addr is kept for a name (see
// HostLocal.Keep), release moves it to the end of the kept addresses. So other attachments get it last.
func (s *session) release(addr netip.Addr) error {
	if err := file.Remove(s.path(addr)); err != nil {
		return s.ioError("release "+addr.String(), err)
	}
	s.moveToEnd(addr)
	return nil
}

// lastPath returns the path of the file with the last address that a range set assigned. The file serves only to spread
// the addresses, so its users ignore errors.
func (s *store) lastPath(index int) string { return s.dir + "/" + lastPrefix + strconv.Itoa(index) }

// parseLast parses an address from a last_reserved_ip file, or from the file of kept addresses. It returns the zero
// Addr if the text is no address.
func parseLast(data []byte) netip.Addr {
	addr, err := netip.ParseAddr(strings.TrimSpace(string(data)))
	if err != nil || addr.Zone() != "" {
		return netip.Addr{}
	}
	return addr.Unmap()
}

// writeLast stores addr as the address that the range set with this index assigned last. It overwrites the content
// first and then truncates the file. The other order would be slow, since ext4 writes a file to disk at its close if
// the file was truncated to nothing.
func (s *session) writeLast(index int, addr netip.Addr) {
	fd, err := file.OpenAny(s.lastPath(index), unix.O_WRONLY|unix.O_CREAT)
	if err != nil {
		return
	}
	defer unix.Close(fd)
	text := addr.String()
	if file.WriteAll(fd, lastPrefix, []byte(text)) == nil {
		_ = unix.Ftruncate(fd, int64(len(text)))
	}
}

// The directory may belong to the reference plugin too, and files in it to any user. So use file.OpenAny: file.Open
// refuses the files of other users.

// readFile reads up to limit+1 bytes of the file at path. The extra byte shows that the file is longer than limit. If
// path is a named pipe, readFile does not wait for a writer.
func readFile(path string, limit int) ([]byte, error) {
	fd, err := file.OpenAny(path, unix.O_RDONLY)
	if err != nil {
		return nil, err
	}
	defer unix.Close(fd)

	buf := make([]byte, limit+1) // pread fails for a named pipe
	n, err := file.Restart(func() (int, error) { return unix.Pread(fd, buf, 0) })
	return buf[:max(n, 0)], file.PathError("read", path, err)
}

// createFile creates a new file. If the file exists, the error matches unix.EEXIST. If createFile cannot write the
// whole content, it removes the file again.
func createFile(path, text string) error {
	fd, err := file.OpenAny(path, unix.O_WRONLY|unix.O_CREAT|unix.O_EXCL)
	if err != nil {
		return err
	}

	// Some file systems report a full disk only at close.
	err = errors.Join(file.WriteAll(fd, path, []byte(text)), file.PathError("close", path, unix.Close(fd)))
	if err != nil {
		return errors.Join(err, file.Remove(path))
	}
	return nil
}

const (
	// lockName is the file that the reference plugin and we lock with flock.
	lockName = "lock"
	// defaultLockWait is the default of Config.LockWait.
	defaultLockWait = 5 * time.Second
)

// A session is a store whose lock is held. All methods that change reservations belong to session.
type session struct {
	*store
	fd    int // the open lock file
	order *lockorder.Acquisition

	keeper string        // the name that keeps an Add's addresses (see HostLocal.Keep), or ""
	kept   []keptAddress // the addresses that names keep; nil unless keeper is set
}

// lock waits for the lock of the directory until s.wait is over or ctx ends. The error matches ErrLocked if the
// lock does not become free in time, and fs.ErrNotExist if there is no directory.
func (s *store) lock(ctx context.Context) (*session, error) {
	path := filepath.Join(s.dir, lockName)
	if err := ctx.Err(); err != nil {
		return nil, s.failf(errors.Join(ErrLocked, err), "wait for the lock %s: %s", path, err)
	}

	order := lockorder.Wait(lockorder.Reservations)
	fd, err := s.flock(ctx, path)
	if err != nil {
		order.Release()
		return nil, err
	}
	return &session{store: s, fd: fd, order: order}, nil
}

// flock opens or creates the lock file, which may belong to any user, and locks it. It returns the descriptor.
func (s *store) flock(ctx context.Context, path string) (int, error) {
	fd, err := file.OpenAny(path, unix.O_RDONLY|unix.O_CREAT)
	if err != nil {
		return -1, s.ioError("lock the reservations", err)
	}

	try := func() (bool, error) { return file.TryFlock(fd, unix.LOCK_EX) }
	had, err := try()
	if !had && err == nil {
		// Set a timer only now, since the lock is usually free.
		ctx, cancel := context.WithTimeout(ctx, s.wait)
		defer cancel()
		err = file.Await(ctx, path, try)
	}

	switch {
	case err == nil:
		return fd, nil
	case errors.Is(err, file.ErrLocked):
		err = s.failf(errors.Join(ErrLocked, err), "reservations: %s", err)
	default:
		err = s.ioError("lock the reservations", file.PathError("flock", path, err))
	}

	unix.Close(fd)
	return -1, err
}

// unlock releases the lock by closing its only descriptor.
func (s *session) unlock() {
	s.order.Release()
	unix.Close(s.fd)
}

// lineBreak separates container and interface in a reservation file. In a file with a hash, it follows the hash.
const lineBreak = "\r\n"

// hashPrefix begins a reservation whose owner is known only by its hash (Live.Hash). A container ID has no colon, so
// the reference plugin sees such a file as the reservation of an unknown container.
const hashPrefix = "tombolo:"

// A reservation names the attachment that has an address. Its file has one of these forms:
//
//	<container>\r\n<interface>    written by the reference plugin and by us
//	tombolo:<hash>\r\n            written by us for a live address without a file
type reservation struct {
	Owner
	hash string // only in the second form, which has no Owner
}

// A reservationState classifies the content of a reservation file.
type reservationState int

const (
	stateComplete  reservationState = iota // a reservation
	stateTruncated                         // the creator died before it had written everything
	stateForeign                           // something else, which we leave alone
)

// maxReservation limits the number of bytes that are read from a reservation file. A container ID may have any
// length, but runtimes use 64 characters.
const maxReservation = 1024

// parseReservation parses the content of a reservation file. Content of another format is foreign, and never an
// error.
func parseReservation(data []byte) (reservation, reservationState) {
	text := string(data)
	if len(data) > maxReservation {
		return reservation{}, stateForeign
	}

	// Treat a file of zeros like an empty one. After a power failure a file may have its length but not its content.
	if strings.Trim(text, "\x00 \t\r\n") == "" {
		return reservation{}, stateTruncated
	}

	first, second, _ := strings.Cut(strings.TrimSpace(text), lineBreak)
	if hash, ok := strings.CutPrefix(first, hashPrefix); ok && isHash(hash) {
		return reservation{hash: hash}, stateComplete
	}

	if !ident.IsIdentifier(first) || !ident.IsLinkName(second) {
		return reservation{}, stateForeign
	}
	return reservation{Owner: Owner{first, second}}, stateComplete
}

// content returns the file's content for r.
func (r reservation) content() string {
	if r.hash != "" {
		return hashPrefix + r.hash + lineBreak
	}
	return r.ContainerID + lineBreak + r.IfName
}

// isHash reports whether text is a hexadecimal number in lower case.
func isHash(text string) bool { return text != "" && strings.Trim(text, "0123456789abcdef") == "" }
