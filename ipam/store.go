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
	// lastPrefix and the index of a range set make the name of the file with
	// the address that was given last.
	lastPrefix = "last_reserved_ip."
	// maxLast bounds what is read of it, in bytes; an IPv6 address has at most
	// 39.
	maxLast = 64
	// maxProbes is how many candidates in a row are found taken one by one,
	// before the directory is read instead. Below that many, probing is cheaper
	// also than reading a small directory.
	maxProbes = 8
)

// A store is the directory with the reservations of one network.
type store struct {
	dir     string
	network string
	wait    time.Duration // for the lock
	node    Node
}

// ioError returns an error of a system call, with what it was for.
func (s *store) ioError(doing string, err error) error {
	return newError(err, "network %q: %s: %s", s.network, doing, err)
}

func (s *store) warnf(format string, args ...any) {
	if s.node.Warn != nil {
		s.node.Warn(fmt.Sprintf("network %q: %s", s.network, fmt.Sprintf(format, args...)))
	}
}

// create makes the directory, with the mode that the reference gives it.
func (s *store) create() error {
	if err := os.MkdirAll(s.dir, 0o755); err != nil {
		return s.ioError("make the directory of the reservations", err)
	}
	return nil
}

// path is the reservation file of addr. Its name is the canonical text of the
// address, on which package netip and the reference agree, IPv6 included.
func (s *store) path(addr netip.Addr) string { return s.dir + "/" + addr.String() }

// read returns the attachment that holds addr. A file that cannot be read, since it is a directory, say,
// is a foreign one. The error is that there is no file; or that it could not be read this
// time, so that its owner is not known.
func (s *store) read(addr netip.Addr) (reservation, reservationState, error) {
	data, err := readFile(s.path(addr), maxReservation)
	if errors.Is(err, fs.ErrNotExist) {
		return reservation{}, 0, err
	}
	if isFault(err) {
		return reservation{}, stateForeign, s.ioError("read the reservation of "+addr.String(), err)
	}
	if err != nil {
		return reservation{}, stateForeign, nil
	}
	held, state := parseReservation(data)
	return held, state, nil
}

// isFault says that an error is the disk's or the machine's, and not about what the file
// is.
func isFault(err error) bool {
	return slices.ContainsFunc([]error{unix.EIO, unix.ENOMEM, unix.EMFILE, unix.ENFILE, unix.ESTALE, unix.ETIMEDOUT},
		func(fault error) bool { return errors.Is(err, fault) })
}

// isOwner reports whether r is a reservation of owner; old says that it names
// the container only, so that it may be that of another interface.
func (s *store) isOwner(r reservation, owner Owner) (is, old bool) {
	if r.hash != "" {
		return s.node.Hash != nil && r.hash == s.node.Hash(owner), false
	}
	if r.containerID != owner.ContainerID {
		return false, false
	}
	return r.ifName == owner.IfName || r.ifName == "", r.ifName == ""
}

// list returns the addresses that have a file, in no order.
func (s *store) list() ([]netip.Addr, error) {
	dir, err := os.Open(s.dir)
	if err != nil {
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

// reserve makes a reservation of addr. It reports false if there is one; ErrDuplicate
// if that is of the same owner, whose container is known.
func (s *session) reserve(addr netip.Addr, r reservation) (bool, error) {
	path, owner := s.path(addr), Owner{ContainerID: r.containerID, IfName: r.ifName}
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
		case state == stateHeld:
			if is, _ := s.isOwner(held, owner); is && r.containerID != "" {
				return false, newError(ErrDuplicate, "network %q: interface %s of container %s already has %s: "+
					"DEL it first", s.network, owner.IfName, owner.ContainerID, addr)
			}
			return false, nil
		}
		// Creators hold the lock until the file is whole, and we hold it now:
		// this one's is dead.
		if err := s.reclaim(addr); err != nil {
			return false, err
		}
	}
	return false, nil
}

// reclaim removes a file that its creator did not live to write.
func (s *session) reclaim(addr netip.Addr) error {
	s.warnf("reclaimed %s: its file is empty or cut short, so the process that reserved it died meanwhile", addr)
	if err := file.Remove(s.path(addr)); err != nil {
		return s.ioError("reclaim "+addr.String(), err)
	}
	return nil
}

// release removes the reservation of addr. The caller has checked its owner.
func (s *session) release(addr netip.Addr) error {
	if err := file.Remove(s.path(addr)); err != nil {
		return s.ioError("release "+addr.String(), err)
	}
	return nil
}

// A lastFile has the address that a range set gave last. It is kept open from the reading to the writing. It only
// spreads the addresses, so its faults are passed over.
type lastFile struct {
	fd   int
	addr netip.Addr
	size int // of its content
}

// openLast reads last_reserved_ip.<index>.
func (s *session) openLast(index int) *lastFile {
	path := s.dir + "/" + lastPrefix + strconv.Itoa(index)
	fd, err := file.OpenAny(path, unix.O_RDWR|unix.O_CREAT)
	if err != nil {
		return &lastFile{fd: -1}
	}
	data, _ := readAt(fd, path, maxLast)
	return &lastFile{fd, parseLast(data), len(data)}
}

// parseLast reads the content of a last_reserved_ip file; the zero Addr stands for one that is no address.
func parseLast(data []byte) netip.Addr {
	addr, err := netip.ParseAddr(strings.TrimSpace(string(data)))
	if err != nil || addr.Zone() != "" {
		return netip.Addr{}
	}
	return addr.Unmap()
}

// write stores addr. The content is replaced before the file is cut, never
// after: on ext4 a file that was cut to nothing is written to disk at its
// close.
func (l *lastFile) write(addr netip.Addr) {
	text := addr.String()
	if file.WriteAll(l.fd, lastPrefix, []byte(text)) == nil && len(text) < l.size {
		_ = unix.Ftruncate(l.fd, int64(len(text)))
	}
}

func (l *lastFile) close() { _ = unix.Close(l.fd) }

// The directory is the reference plugin's too, and its files may be any user's: they are
// opened by file.OpenAny, not by file.Open.

// readAt reads up to limit bytes from the start of fd, and one more to show
// that there are more. Of a regular file, which all of ours are, one call
// returns that much or all there is.
func readAt(fd int, path string, limit int) ([]byte, error) {
	buf := make([]byte, limit+1)
	n, err := file.Restart(func() (int, error) { return unix.Pread(fd, buf, 0) })
	if err != nil {
		return nil, file.PathError("read", path, err)
	}
	return buf[:n], nil
}

// readFile reads up to limit+1 bytes of the file at path. It does not wait for
// the writer of a pipe.
func readFile(path string, limit int) ([]byte, error) {
	fd, err := file.OpenAny(path, unix.O_RDONLY)
	if err != nil {
		return nil, err
	}
	defer unix.Close(fd)
	return readAt(fd, path, limit)
}

// createFile makes a file that was not there, or fails with EEXIST. Where it
// cannot be written whole it is removed again.
func createFile(path, text string) error {
	fd, err := file.OpenAny(path, unix.O_WRONLY|unix.O_CREAT|unix.O_EXCL)
	if err != nil {
		return err
	}
	err = file.WriteAll(fd, path, []byte(text))
	// Some file systems say only at the close that there was no room.
	if closeErr := unix.Close(fd); err == nil {
		err = file.PathError("close", path, closeErr)
	}
	if err != nil {
		return errors.Join(err, file.Remove(path))
	}
	return nil
}

const (
	// lockName is the file that the reference plugin locks with flock, and we.
	lockName = "lock"
	// defaultLockWait is how long a verb waits for that lock.
	defaultLockWait = 5 * time.Second
)

// A session is a store whose lock is held. The methods that change the directory are session's.
type session struct {
	*store
	fd    int // of the lock file
	order *lockorder.Held
}

// lock waits for the lock of the directory, at most for s.wait and until ctx
// ends. The error matches ErrLocked where another process has it, and
// fs.ErrNotExist where there is no directory.
func (s *store) lock(ctx context.Context) (*session, error) {
	path := filepath.Join(s.dir, lockName)
	if err := ctx.Err(); err != nil {
		return nil, newError(errors.Join(ErrLocked, err), "network %q: wait for the lock %s: %s", s.network, path, err)
	}
	order := lockorder.Wait(lockorder.Reservations)
	fd, err := s.flock(ctx, path)
	if err != nil {
		order.Release()
		return nil, err
	}
	return &session{store: s, fd: fd, order: order}, nil
}

// flock opens and locks the file, which may be any user's.
func (s *store) flock(ctx context.Context, path string) (int, error) {
	fd, err := file.OpenAny(path, unix.O_RDONLY|unix.O_CREAT)
	if err != nil {
		return -1, s.ioError("lock the reservations", err)
	}
	try := func() (bool, error) { return file.TryFlock(fd, unix.LOCK_EX) }
	had, err := try()
	if !had && err == nil {
		// Only now is a timer worth its price.
		ctx, cancel := context.WithTimeout(ctx, s.wait)
		defer cancel()
		err = file.Await(ctx, path, try)
	}
	switch {
	case err == nil:
		return fd, nil
	case errors.Is(err, file.ErrLocked):
		err = newError(errors.Join(ErrLocked, err), "network %q: reservations: %s", s.network, err)
	default:
		err = s.ioError("lock the reservations", file.PathError("flock", path, err))
	}
	unix.Close(fd)
	return -1, err
}

// unlock gives the lock back: closing its only descriptor does.
func (s *session) unlock() {
	s.order.Release()
	unix.Close(s.fd)
}

// lineBreak is between the lines of a reservation file. There is none at the
// end.
const lineBreak = "\r\n"

// hashPrefix starts a reservation whose owner is known only by the hash that
// marks its link. A container ID cannot have a colon, so the reference plugin
// takes such a file for that of a container it does not know.
const hashPrefix = "tombolo:"

// A reservation names the attachment that holds an address. The content of its file has one of
// the forms
//
//	<container>\r\n<interface>    what the reference plugin writes, and we
//	<container>                   what it wrote before version 0.8
//	tombolo:<hash>\r\n[<interface>]    what we write for an address that we found alive without a file
type reservation struct {
	containerID string
	ifName      string // empty in the second form
	hash        string // of the third form, which has no containerID
}

// reservation is what an attachment's file has.
func (o Owner) reservation() reservation {
	return reservation{containerID: o.ContainerID, ifName: o.IfName}
}

// A reservationState is what the content of a file turned out to be.
type reservationState int

const (
	stateHeld      reservationState = iota // a reservation
	stateTruncated                         // what a creator left that died before it had written all
	stateForeign                           // something else: not ours to judge
)

// maxReservation bounds the content that is read, in bytes. A container ID may
// be of any length; those of runtimes have 64.
const maxReservation = 1024

// parseReservation reads the content of a reservation file. Content that it does not understand is foreign, and
// never an error.
func parseReservation(data []byte) (reservation, reservationState) {
	text := string(data)
	if len(data) > maxReservation {
		return reservation{}, stateForeign
	}
	// A file may come out of a power failure with its length but without its
	// content.
	if strings.Trim(text, "\x00 \t\r\n") == "" {
		return reservation{}, stateTruncated
	}
	trimmed := strings.TrimSpace(text)
	first, second, _ := strings.Cut(trimmed, lineBreak)
	if hash, ok := strings.CutPrefix(first, hashPrefix); ok {
		if !isHash(hash) || !ident.IsLinkName(second) && second != "" {
			return reservation{}, stateForeign
		}
		return reservation{hash: hash, ifName: second}, stateHeld
	}
	switch {
	case !ident.IsIdentifier(first):
		return reservation{}, stateForeign
	case second != "":
		if !ident.IsLinkName(second) {
			return reservation{}, stateForeign
		}
		return reservation{containerID: first, ifName: second}, stateHeld
	default:
		return reservation{containerID: first}, stateHeld
	}
}

// content is the file of r.
func (r reservation) content() string {
	switch {
	case r.hash != "":
		return hashPrefix + r.hash + lineBreak + r.ifName
	case r.ifName == "":
		return r.containerID
	default:
		return r.containerID + lineBreak + r.ifName
	}
}

// isHash reports whether text is a hexadecimal number in lower case.
func isHash(text string) bool {
	for i := range len(text) {
		if c := text[i]; (c < '0' || c > '9') && (c < 'a' || c > 'f') {
			return false
		}
	}
	return text != ""
}
