package state

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/file"
	"github.com/tombolo-cni/tombolo/internal/ident"
	"github.com/tombolo-cni/tombolo/internal/strict"
)

// DefaultDir is the state directory if the configuration names no other.
const DefaultDir = "/run/tombolo"

// suffix is the end of the names of the files for networks, attachments and NICs.
const suffix = ".json"

// A Dir is a state directory on disk. Several goroutines and processes may call its methods at once. The comment of
// each method names the lock that the caller must hold, if any.
type Dir struct {
	path    string
	sources sources
}

// Open returns the state directory at an absolute path. It makes no system call. The first lock or record creates the
// directory.
func Open(dir string) (*Dir, error) {
	path, err := file.CleanDir(dir)
	if err != nil {
		return nil, fmt.Errorf("open state directory: %w", err)
	}
	return &Dir{path: path, sources: hostSources()}, nil
}

// Path returns the directory's path, cleaned.
func (d *Dir) Path() string { return d.path }

func (d *Dir) epochPath() string    { return d.path + "/epoch" }
func (d *Dir) lockPath() string     { return d.path + "/lock" }
func (d *Dir) networksPath() string { return d.path + "/networks" }
func (d *Dir) uplinksPath() string  { return d.path + "/uplinks" }

func (d *Dir) attachmentsPath() string { return d.path + "/attachments" }

// networkPath returns the path of a network's record. With an error about an invalid name, the path must not be used.
func (d *Dir) networkPath(network string) (string, error) {
	return d.networksPath() + "/" + network + suffix, checkNetwork(network)
}

// attachmentPath returns the path of an attachment's record. With an error about an invalid name, the path must not be
// used.
func (d *Dir) attachmentPath(network, hash string) (string, error) {
	err := checkNetwork(network)
	if err == nil {
		err = ident.CheckHash(hash)
	}
	return d.attachmentsPath() + "/" + network + "/" + hash + suffix, err
}

// ErrName means that the name of a network or a NIC, or the hash of an attachment, is invalid. It is ident.ErrName.
var ErrName = ident.ErrName

// maxNetworkName is the maximum length of a network's name, in bytes. A file name has up to 255 (NAME_MAX), and ends in
// ".json".
const maxNetworkName = 250

// checkNetwork returns an error if the CNI specification forbids name as the name of a network, or if name is too long
// for a file. This keeps "..", '/', NUL and our own ".tmp-" out of paths.
func checkNetwork(name string) error {
	switch {
	case name == "":
		return fmt.Errorf("network: %w: it is empty", ErrName)
	case len(name) > maxNetworkName:
		return fmt.Errorf("network %.20q…: %w: %d bytes, at most %d fit in a file name", name, ErrName, len(name),
			maxNetworkName)
	case !ident.IsIdentifier(name):
		return fmt.Errorf("network %q: %w: only letters, digits, '_', '.' and '-' are allowed, "+
			"and first a letter or a digit", name, ErrName)
	}

	return nil
}

func isNetwork(name string) bool { return checkNetwork(name) == nil }

// WithOperation puts the text of the failed operation before an error. It returns nil if err is nil.
func WithOperation(err error, format string, args ...any) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf(format+": %w", append(args, err)...)
}

// Ignore returns nil if err matches one of the targets. It returns any other error unchanged.
func Ignore(err error, targets ...error) error {
	if slices.ContainsFunc(targets, func(target error) bool { return errors.Is(err, target) }) {
		return nil
	}
	return err
}

// readFile reads a record's file. It returns an error for a file larger than file.MaxRecord.
func readFile(path string) ([]byte, error) { return file.Read(path, file.MaxRecord) }

// tempPath returns the path of the temporary file that holds the new content for the file at path. If a crash leaves
// the temporary file, the next write overwrites it, or the removal of the record removes it. Only one process at a time
// may write to the file at path.
func (d *Dir) tempPath(path string) string { return d.path + "/.tmp-" + ident.Hash(path, "", "") }

// replaceFile replaces a file as a whole. Readers see the old or the new content, and nothing in between.
func (d *Dir) replaceFile(path string, data []byte) error {
	return file.Replace(d.tempPath(path), path, data)
}

// remove removes a record's file and the temporary file of an interrupted update.
func (d *Dir) remove(path string) error {
	if err := file.Remove(path); err != nil {
		return err
	}
	return file.Remove(d.tempPath(path))
}

// version is the version of the format of the records and files that we write.
const version = 1

// Encode returns a record as one line of JSON. record points to a struct, and v to its version field, which Encode
// sets.
func Encode(v *int, record any) []byte {
	*v = version
	return append(strict.Append(make([]byte, 0, 1024), record), '\n')
}

// checkable is a record that can check itself. Check returns an error if the record is invalid.
type checkable interface{ Check() error }

// EncodeChecked checks a record and encodes it. It returns an error if the record is invalid, or if the result has more
// bytes than the limit most.
func EncodeChecked(v *int, record checkable, most int) ([]byte, error) {
	if err := record.Check(); err != nil {
		return nil, err
	}
	data := Encode(v, record)
	if len(data) > most {
		return nil, fmt.Errorf("its record has %d bytes, at most %d are kept", len(data), most)
	}
	return data, nil
}

// Decode parses a record and, if it has a method Check, checks it. v points to the record's version field. If a newer
// version of Tombolo wrote the record, the error matches ErrVersion. Any other error matches ErrDamaged.
func Decode(data []byte, v *int, record any) error {
	err := strict.Unmarshal(data, record, strict.Everything).First()
	switch {
	case *v > version:
		return fmt.Errorf("%w: version %d, and this tombolo reads up to %d", ErrVersion, *v, version)
	case err == nil && *v < 1:
		err = errors.New("it has no version")
	}

	if of, is := record.(checkable); err == nil && is {
		err = of.Check()
	}
	return WithOperation(err, "%w", ErrDamaged)
}

var (
	// ErrDamaged means that the content of a file is not valid. It is file.ErrDamaged.
	ErrDamaged = file.ErrDamaged

	// ErrVersion means that a newer Tombolo wrote a file. This version cannot read such a file. The operator can
	// install the newer version again, or empty the node and remove the state directory.
	ErrVersion = errors.New("written by a newer version")
)

// A RecordError is an error about one record's file. It unwraps to ErrDamaged, ErrVersion or the system's error.
type RecordError struct {
	Path string // the file

	// Network and Hash come from the file's path, so that an attachment can be removed even if its record is damaged.
	// Network is set for the record of an attachment or a network. Hash is set for the record of an attachment or a
	// lease.
	Network, Hash string

	NIC string // set for the record of a NIC's takeover (see UplinkFile)

	Err error
}

// Error returns a message with the path of the file, the error and, for a damaged file, advice.
func (e *RecordError) Error() string {
	text := fmt.Sprintf("record %s: %v", e.Path, e.Err)
	switch {
	case !errors.Is(e.Err, ErrDamaged):
		return text
	case e.Hash != "":
		return text + "; a DEL or GC of the attachment removes it"
	case e.Network != "":
		return text + "; the next ADD to the network builds it again and replaces the file"
	case e.NIC != "":
		return text + "; look what `ip address` and `ip route` say, then remove the file"
	default:
		return text + "; remove the file by hand if no other program needs it"
	}
}

// Unwrap returns the cause.
func (e *RecordError) Unwrap() error { return e.Err }

// Wrap sets e.Err from err, an error from reading the record, and returns e. It returns err itself if the file is
// missing, since a missing record is no damage.
func (e *RecordError) Wrap(err error) error {
	if errors.Is(err, os.ErrNotExist) {
		return err
	}
	if pathErr, ok := err.(*os.PathError); ok {
		err = pathErr.Err // e names the path already
	}
	e.Err = err
	return e
}

// ReadRecord reads the file bad.Path, decodes it, and calls check with the record. After a failure it stores the cause
// in bad.Err and returns bad. If the file is missing, it returns that error instead. A directory or a symbolic link in
// place of the file counts as damage (ErrDamaged).
func ReadRecord[T any](bad *RecordError, decode func([]byte) (*T, error), check func(*T) error) (*T, error) {
	var record *T
	data, err := readFile(bad.Path)
	if err == nil {
		record, err = decode(data)
	}

	if err == nil {
		err = check(record)
	}

	if err == nil {
		return record, nil
	}

	err = bad.Wrap(err)
	if errors.Is(err, unix.EISDIR) || errors.Is(err, unix.ELOOP) {
		bad.Err = fmt.Errorf("%w: %w", ErrDamaged, bad.Err)
	}
	return nil, err
}

// RecordNames returns the names of the records in a directory, without their suffix, in the order of the file names.
// others has the names of all other files. isName reports whether a name is valid for a record. A missing directory is
// no error.
func RecordNames(dir string, isName func(string) bool) (names, others []string, _ error) {
	entries, err := file.ReadDir(dir)
	for _, e := range entries {
		if name, ok := strings.CutSuffix(e.Name(), suffix); ok && isName(name) {
			names = append(names, name)
		} else {
			others = append(others, e.Name())
		}
	}
	return names, others, err
}

// list reads the records in a directory, sorted by file name. isName reports whether a name, without its suffix, is
// valid for a record. bad has a *RecordError for each record that cannot be used, and for each file whose name is not
// valid.
func list[T any](dir string, isName func(string) bool, load func(name string) (*T, error)) (found []*T,
	bad []*RecordError, _ error) {
	names, others, err := RecordNames(dir, isName)
	if err != nil {
		return nil, nil, err
	}

	for _, name := range others {
		bad = append(bad, &RecordError{Path: dir + "/" + name,
			Err: fmt.Errorf("%w: no record has such a file name", ErrDamaged)})
	}

	found, unread := LoadAll(names, load)
	return found, append(bad, unread...), nil
}

// LoadAll loads the records with the given names. It returns the errors of type *RecordError in bad, and skips records
// with other errors, such as missing ones.
func LoadAll[T any](names []string, load func(name string) (*T, error)) (found []*T, bad []*RecordError) {
	for _, name := range names {
		record, err := load(name)
		if damaged, is := errors.AsType[*RecordError](err); is {
			bad = append(bad, damaged)
		} else if err == nil {
			found = append(found, record)
		}
	}

	return found, bad
}

// writableSize is the number of bytes that CheckWritable tries to write. Almost every record is smaller.
const writableSize = 16 << 10

// CheckWritable returns an error if no record could be written now, for example because the file system is full. It
// writes to a file without a name, so nothing remains. If the directory does not exist, it tries the closest parent
// that does. It takes no lock.
func (d *Dir) CheckWritable() error {
	path := d.path
	fd, err := openUnnamed(path + "/.")
	for errors.Is(err, fs.ErrNotExist) && path != "/" {
		path = filepath.Dir(path)
		fd, err = openUnnamed(path + "/.")
	}
	if err == nil {
		err = errors.Join(file.WriteAll(fd, path, make([]byte, writableSize)), unix.Close(fd))
	}
	return WithOperation(err, "the state directory %s cannot be written", d.path)
}

// userHZ is the number of clock ticks a second in /proc/<pid>/stat. For user space on amd64 and arm64 it is always
// 100, also if the kernel's own HZ differs.
const userHZ = 100

// sources holds the files and functions that show whether an epoch (see Epoch) is over. Tests replace them.
type sources struct {
	bootIDPath string
	initPath   string                          // /proc/<pid>/stat of pid 1
	now        func() time.Time                // CLOCK_REALTIME
	uptime     func() time.Duration            // CLOCK_BOOTTIME
	netns      func() (cookie uint64, _ error) // of the calling thread's network namespace
}

// hostSources returns the real files and functions that show whether an epoch is over. Only tests use other sources.
func hostSources() sources {
	return sources{
		bootIDPath: "/proc/sys/kernel/random/boot_id",
		initPath:   "/proc/1/stat",
		now:        time.Now,
		uptime:     uptime,
		netns:      NetNSCookie,
	}
}

// BootID returns the kernel's boot id, which is random and new at each boot.
func BootID() (string, error) {
	s := hostSources()
	return s.bootID()
}

// bootID returns the kernel's boot id. It changes at each boot, but not if a node that is a container restarts.
func (s *sources) bootID() (string, error) {
	data, err := file.ReadKernel(s.bootIDPath)
	if err != nil {
		return "", fmt.Errorf("%w: is /proc mounted?", err)
	}
	id := string(bytes.TrimSpace(data))
	if id == "" {
		return "", fmt.Errorf("read %s: it is empty", s.bootIDPath)
	}
	return id, nil
}

// initStart returns when pid 1 started, as a time since boot, rounded down to 10 ms. If /proc does not show pid 1, it
// returns 0, as if pid 1 had started at boot.
func (s *sources) initStart() (time.Duration, error) {
	data, err := file.ReadKernel(s.initPath)
	if err != nil {
		return 0, Ignore(err, os.ErrNotExist, os.ErrPermission)
	}

	start, err := parseStart(data)
	return start, WithOperation(err, "read %s", s.initPath)
}

// parseStart returns starttime, field 22 of proc_pid_stat(5), which counts by CLOCK_BOOTTIME. It searches from the
// last ')', since field 2 is a command in parentheses that may contain anything.
func parseStart(stat []byte) (time.Duration, error) {
	const afterCommand = 22 - 3
	fields := bytes.Fields(stat[bytes.LastIndexByte(stat, ')')+1:])
	if len(fields) <= afterCommand {
		return 0, fmt.Errorf("want 22 fields, not %.60q", stat)
	}

	// 39 bits are 174 years in ticks, and do not overflow a Duration.
	ticks, err := strconv.ParseUint(string(fields[afterCommand]), 10, 39)
	if err != nil {
		return 0, fmt.Errorf("start time: %w", err)
	}
	return time.Duration(ticks) * (time.Second / userHZ), nil
}

// uptime returns the time since boot by CLOCK_BOOTTIME, which includes suspended time.
func uptime() time.Duration { return Since(unix.CLOCK_BOOTTIME) }

// Since returns the time since the zero of one of the kernel's clocks, such as CLOCK_BOOTTIME.
func Since(clock int32) time.Duration {
	var ts unix.Timespec
	_ = unix.ClockGettime(clock, &ts) // cannot fail for the clocks that we use
	return time.Duration(ts.Nano())
}

// NetNSCookie returns the SO_NETNS_COOKIE (Linux 5.14) of the calling thread's network namespace. It reads the cookie
// from a new socket.
func NetNSCookie() (uint64, error) {
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return 0, fmt.Errorf("open a socket: %w", err)
	}
	defer unix.Close(fd)
	cookie, err := unix.GetsockoptUint64(fd, unix.SOL_SOCKET, unix.SO_NETNS_COOKIE)
	return cookie, WithOperation(err, "read SO_NETNS_COOKIE")
}

// ErrStale means that a record belongs to an epoch that is over (see Epoch).
var ErrStale = errors.New("of an earlier epoch")

// An Epoch describes one life of the node. Each record belongs to one epoch. An epoch ends at a reboot, when all pods
// of the node are gone for good. If the node itself is a container with its own network namespace (kind, k3s in
// Docker), the epoch also ends when that container restarts. Such a restart changes pid 1 and the network namespace,
// but not the boot id.
type Epoch struct {
	Version int    `json:"version,omitempty"`
	Boot    string `json:"boot"` // the kernel's boot id
	ID      string `json:"id"`   // random, so that no two epochs have the same Token

	// Init is the start time of pid 1, by CLOCK_BOOTTIME. It is at least 1 ms, so that it differs from a missing value.
	Init time.Duration `json:"init,omitempty"`

	// Made is the time when the epoch was written, by CLOCK_BOOTTIME.
	Made time.Duration `json:"made,omitempty"`

	// NetNS is the SO_NETNS_COOKIE of the network namespace in which the epoch began.
	NetNS uint64 `json:"netns,omitempty"`
}

// Token returns a text that identifies the epoch. The record of a network contains it.
func (e Epoch) Token() string { return e.Boot + "/" + e.ID }

// Epoch reads the recorded epoch and writes nothing. If there is none, the error matches os.ErrNotExist. If the epoch
// is over, Epoch returns it together with an error that matches ErrStale. Epoch needs no lock. A CNI call that changes
// something calls [Dir.Enter] instead.
func (d *Dir) Epoch() (Epoch, error) { return d.epochOf(d.sources.netns) }

// epochOf does the work of Epoch. netns returns the cookie of the caller's network namespace.
func (d *Dir) epochOf(netns func() (uint64, error)) (Epoch, error) {
	var e Epoch
	data, err := readFile(d.epochPath())
	if err == nil {
		e, err = decodeEpoch(data)
	}

	if err != nil {
		err = (&RecordError{Path: d.epochPath()}).Wrap(err)
	} else {
		err = d.checkEpoch(d.epochPath(), e, netns)
	}
	return e, WithOperation(err, "read epoch")
}

func decodeEpoch(data []byte) (e Epoch, _ error) {
	err := Decode(data, &e.Version, &e)
	return e, err
}

// Check returns an error if the epoch lacks its boot id or its id.
func (e *Epoch) Check() error {
	if e.Boot == "" || e.ID == "" {
		return errors.New("it has no boot id, or no id")
	}
	return nil
}

// checkEpoch returns an error that matches ErrStale if the epoch e, which was read from path, is over. An epoch is over
// if the boot id differs, or if the network namespace differs and pid 1 is younger than the epoch.
//
// A younger pid 1 alone proves nothing, since a caller in a pod with its own PID namespace sees one too. A node has a
// new network namespace after a restart, unless it is a container with host networking. The epoch of such a container
// continues, and GC removes the attachments of pods that are gone.
func (d *Dir) checkEpoch(path string, e Epoch, netns func() (uint64, error)) error {
	boot, err := d.sources.bootID()
	if err != nil {
		return err
	}

	if e.Boot != boot {
		return fmt.Errorf("%s: %w: of boot %s, and this is %s", path, ErrStale, e.Boot, boot)
	}

	// Compare the cookie before pid 1's start time. Reading it is cheap, and nearly every call ends here.
	cookie, err := netns()
	if err != nil || cookie == e.NetNS {
		return err
	}

	start, err := d.sources.initStart()
	if err != nil || start <= e.Made {
		return err
	}

	return fmt.Errorf("%s: %w: made %v after boot in network namespace %d, and pid 1 started at %v in %d",
		path, ErrStale, e.Made, e.NetNS, start, cookie)
}

// newEpoch returns a new Epoch of the present boot, pid 1 and network namespace.
func (d *Dir) newEpoch() (Epoch, error) {
	boot, bootErr := d.sources.bootID()
	start, startErr := d.sources.initStart()
	cookie, cookieErr := d.sources.netns()
	return Epoch{
		Version: version,
		Boot:    boot,
		ID:      fmt.Sprintf("%016x%016x", rand.Uint64(), rand.Uint64()),
		Init:    max(start, time.Millisecond),
		Made:    d.sources.uptime(),
		NetNS:   cookie,
	}, errors.Join(bootErr, startErr, cookieErr)
}

// Begun returns the time of an epoch's beginning, by the present wall clock. An epoch begins when pid 1 starts. For the
// zero Epoch it returns the zero time.
func (d *Dir) Begun(e Epoch) time.Time {
	if e.Init == 0 {
		return time.Time{}
	}
	return d.sources.now().Add(e.Init - d.sources.uptime()).UTC()
}

// Enter takes the shared lock, and returns it together with the node's present epoch.
//
// If the recorded epoch is missing, damaged or over, one process begins a new epoch under the exclusive lock, while all
// others wait. This process deletes the records of attachments and networks of an epoch that is over, and writes the
// new epoch last. If a step fails, the next caller begins again. If the recorded epoch was missing or damaged, all
// records stay, and GC later removes the attachments of pods that are gone.
//
// If a newer version wrote the epoch, the error matches ErrVersion. Enter also returns the errors of Lock. The
// caller must be in the node's own network namespace and, to begin an epoch, in its PID namespace.
func (d *Dir) Enter(ctx context.Context) (*Lock, Epoch, error) {
	l, err := d.Lock(ctx, Shared)
	if err != nil {
		return nil, Epoch{}, err
	}

	var epoch Epoch
	var found error
	err = l.Ensure(ctx,
		func() (bool, error) {
			epoch, found = d.epochOf(l.netns)

			// A new epoch replaces a missing, stale or damaged one.
			return found == nil, Ignore(found, os.ErrNotExist, ErrStale, ErrDamaged)
		},
		func() (err error) {
			epoch, err = d.beginEpoch(errors.Is(found, ErrStale))
			return err
		})

	if err != nil {
		return nil, Epoch{}, errors.Join(fmt.Errorf("enter %s: %w", d.path, err), l.Close())
	}

	return l, epoch, nil
}

// beginEpoch writes a new epoch. If the previous epoch is stale, beginEpoch first deletes its records of attachments
// and networks. The caller holds the exclusive lock.
func (d *Dir) beginEpoch(stale bool) (Epoch, error) {
	epoch, err := d.newEpoch()
	if err == nil && stale { // records of NICs' takeovers may stay, since they contain their own epoch
		err = WithOperation(errors.Join(os.RemoveAll(d.attachmentsPath()), os.RemoveAll(d.networksPath())),
			"drop records of earlier epochs")
	}

	if err == nil {
		// Write the epoch last, since other processes regard the directory as usable as soon as it has the new epoch.
		err = d.replaceFile(d.epochPath(), Encode(&epoch.Version, &epoch))
	}
	return epoch, WithOperation(err, "begin epoch")
}
