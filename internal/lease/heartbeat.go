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

// The keeper's lock and heartbeat are open file description locks on one file, so that
// they end with the process, however that comes, and a heartbeat writes to no disk. Byte
// 0 is locked for good. A heartbeat locks the byte whose distance from beatsAt is the
// time in milliseconds, and then gives up the one before: a process that asks the kernel for a lock
// in its way (F_OFD_GETLK) is told where that byte is. /proc/locks shows both.
const (
	livesAt = 0
	beatsAt = 1 << 32 // the byte of time 0; tests have beats of before the boot
)

const (
	// Beat is how often the keeper gives a heartbeat.
	Beat = 5 * time.Second

	// Silence is how long it may give none, until it is taken to be stopped or stuck.
	Silence = 4 * Beat
)

var (
	// ErrNoKeeper says that no keeper runs for the directory.
	ErrNoKeeper = errors.New("no keeper runs")

	// ErrSilent says that there is a keeper, which gave no heartbeat for longer
	// than Silence: stopped (SIGSTOP, a debugger, a frozen cgroup), or stuck.
	ErrSilent = errors.New("the keeper is stopped or stuck")

	// ErrOtherKeeper says that another keeper has the directory.
	ErrOtherKeeper = errors.New("another keeper has the lease directory")
)

// CheckKeeper says why no keeper renews the directory's leases, for an operator, if none does: its
// error matches ErrNoKeeper or ErrSilent, or is the system's.
func (d *Dir) CheckKeeper() error {
	runs, since, err := d.heartbeat()
	switch {
	case err != nil:
		return fmt.Errorf("look for the lease keeper: %w", err)
	case !runs:
		return fmt.Errorf("%w for the leases of %s: start it (systemctl start tombolod, or tombolod --leases %s)", ErrNoKeeper, d.path, d.path)
	case since > Silence:
		return fmt.Errorf("%w: no heartbeat for %v from the one for %s: restart it (systemctl restart tombolod)",
			ErrSilent, since.Round(time.Second), d.path)
	}
	return nil
}

// heartbeat asks the kernel about the keeper's locks.
func (d *Dir) heartbeat() (runs bool, since time.Duration, _ error) {
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
		return true, 0, err // it has only just begun
	}
	return true, max(uptime()-time.Duration(beats.Start-beatsAt)*time.Millisecond, 0), nil
}

// Heartbeat is the keeper's hold on a directory.
type Heartbeat struct {
	dir  *Dir
	fd   int
	beat int64 // the byte of the last heartbeat, 0 before the first
}

// Keep makes the caller the directory's keeper, until Close or the end of the process.
// The error matches ErrOtherKeeper where there is one.
func (d *Dir) Keep() (*Heartbeat, error) {
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

// Beat gives the heartbeat. It fails if the directory was removed, so that no other
// process sees it: then the keeper should start again.
func (p *Heartbeat) Beat() error {
	var st unix.Stat_t
	if err := unix.Fstat(p.fd, &st); err != nil || st.Nlink == 0 {
		return fmt.Errorf("keeper's heartbeat: %s/%s was removed: %w", p.dir.path, keeperLock, os.ErrNotExist)
	}
	return p.beatAt(uptime())
}

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

// Close ends the hold. It does not leave that to the close, since a child that is just
// being forked has the descriptor too. Closing twice does nothing.
func (p *Heartbeat) Close() error {
	if p.fd < 0 {
		return nil
	}
	_, err := file.LockRange(p.fd, unix.F_OFD_SETLK, unix.F_UNLCK, 0, 0)
	err = errors.Join(err, unix.Close(p.fd))
	p.fd = -1
	return err
}

// uptime is CLOCK_MONOTONIC. Time that the machine sleeps does not count: no keeper
// could give a heartbeat then.
func uptime() time.Duration { return state.Since(unix.CLOCK_MONOTONIC) }
