package lease

import (
	"errors"
	"fmt"
	"os"
	"time"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/file"
	"github.com/tombolo-cni/tombolo/internal/state"
)

// The keeper's lock and heartbeat are open file description locks on one file. They end with the process, even if it
// is killed, and a heartbeat writes nothing to disk. The keeper locks byte 0 as long as it runs. For each heartbeat
// it locks the byte at offset beatsAt plus the time in milliseconds, and then unlocks the previous one. A process
// that asks the kernel for a conflicting lock (F_OFD_GETLK) learns the offset of that byte. /proc/locks shows both
// locks.
const (
	livesAt = 0
	beatsAt = 1 << 32 // the byte for time 0; tests use times before the boot
)

const (
	// Beat is the interval between the keeper's heartbeats.
	Beat = 5 * time.Second

	// Silence is the time without a heartbeat after which the keeper counts as stopped or stuck.
	Silence = 4 * Beat
)

var (
	// ErrNoKeeper means that no keeper runs for the lease directory.
	ErrNoKeeper = errors.New("no keeper runs")

	// ErrSilent means that the keeper's last heartbeat is older than Silence: the keeper is stopped (SIGSTOP, a
	// debugger, a frozen cgroup) or stuck.
	ErrSilent = errors.New("the keeper is stopped or stuck")

	// ErrOtherKeeper means that another keeper runs for the lease directory.
	ErrOtherKeeper = errors.New("another keeper has the lease directory")
)

// CheckKeeper returns an error with advice for an operator if no keeper renews the directory's leases. The error
// matches ErrNoKeeper or ErrSilent, or comes from a system call.
func (d *Store) CheckKeeper() error {
	runs, since, err := d.heartbeat()
	switch {
	case err != nil:
		return fmt.Errorf("look for the lease keeper: %w", err)
	case !runs:
		return fmt.Errorf("%w for the leases of %s: start it (systemctl start tombolod, or tombolod --leases %s)",
			ErrNoKeeper, d.path, d.path)
	case since > Silence:
		return fmt.Errorf("%w: no heartbeat for %v from the one for %s: restart it (systemctl restart tombolod)",
			ErrSilent, since.Round(time.Second), d.path)
	}

	return nil
}

// heartbeat asks the kernel whether a keeper runs, and for the time since its last heartbeat. since is 0 before the
// first one.
func (d *Store) heartbeat() (runs bool, since time.Duration, _ error) {
	fd, err := file.Open(d.path+"/"+keeperLock, unix.O_RDWR)
	if errors.Is(err, os.ErrNotExist) {
		return false, 0, nil
	}

	if err != nil {
		return false, 0, err
	}
	defer unix.Close(fd)
	lives, err := file.LockRange(fd, unix.F_OFD_GETLK, unix.F_WRLCK, livesAt, 1)
	if err != nil || lives.Type == unix.F_UNLCK {
		return false, 0, err
	}

	beats, err := file.LockRange(fd, unix.F_OFD_GETLK, unix.F_WRLCK, livesAt+1, 0)
	if err != nil || beats.Type == unix.F_UNLCK {
		return true, 0, err // the keeper has only just started
	}

	return true, max(uptime()-time.Duration(beats.Start-beatsAt)*time.Millisecond, 0), nil
}

// Heartbeat is the keeper's lock on a lease directory. While its holder calls Beat, other processes see that the
// keeper works.
type Heartbeat struct {
	dir  *Store
	fd   int
	beat int64 // the locked byte of the last heartbeat, 0 before the first
}

// Keep makes the caller the directory's keeper, until Close or the end of the process. If there is already another
// keeper, the error matches ErrOtherKeeper.
func (d *Store) Keep() (*Heartbeat, error) {
	fd, err := file.Create(d.path+"/"+keeperLock, unix.O_RDWR)
	if err != nil {
		return nil, fmt.Errorf("keep leases: %w", err)
	}

	_, err = file.LockRange(fd, unix.F_OFD_SETLK, unix.F_WRLCK, livesAt, 1)
	switch {
	case errors.Is(err, unix.EAGAIN):
		err = fmt.Errorf("%w: %s (`fuser -v %s/%s` shows which)", ErrOtherKeeper, d.path, d.path, keeperLock)
	case err == nil:
		err = d.private()
	}

	if err != nil {
		return nil, errors.Join(fmt.Errorf("keep leases: %w", err), unix.Close(fd))
	}

	p := &Heartbeat{dir: d, fd: fd}
	if err := p.Beat(); err != nil {
		return nil, errors.Join(err, p.Close())
	}

	return p, nil
}

// Beat records a heartbeat. It fails if the lock's file was removed, since no other process would see the
// heartbeat. The keeper should then start again.
func (p *Heartbeat) Beat() error {
	var st unix.Stat_t
	if err := unix.Fstat(p.fd, &st); err != nil || st.Nlink == 0 {
		return fmt.Errorf("keeper's heartbeat: %s/%s was removed: %w", p.dir.path, keeperLock, os.ErrNotExist)
	}
	return p.beatAt(uptime())
}

// beatAt locks the byte for the time now, and unlocks the byte of the previous heartbeat.
func (p *Heartbeat) beatAt(now time.Duration) error {
	beat := beatsAt + now.Milliseconds()
	if beat == p.beat {
		return nil
	}

	_, err := file.LockRange(p.fd, unix.F_OFD_SETLK, unix.F_WRLCK, beat, 1)
	if err == nil && p.beat != 0 {
		_, err = file.LockRange(p.fd, unix.F_OFD_SETLK, unix.F_UNLCK, p.beat, 1)
	}

	if err != nil {
		return fmt.Errorf("keeper's heartbeat: %w", err)
	}

	p.beat = beat
	return nil
}

// Close ends the caller's role as keeper. It unlocks explicitly, since a child that is just being forked may still
// have the file descriptor. A second Close does nothing.
func (p *Heartbeat) Close() error {
	if p.fd < 0 {
		return nil
	}
	_, err := file.LockRange(p.fd, unix.F_OFD_SETLK, unix.F_UNLCK, 0, 0)
	err = errors.Join(err, unix.Close(p.fd))
	p.fd = -1
	return err
}

// uptime returns CLOCK_MONOTONIC. That clock stops while the machine is suspended, when no keeper can record a
// heartbeat.
func uptime() time.Duration { return state.Since(unix.CLOCK_MONOTONIC) }
