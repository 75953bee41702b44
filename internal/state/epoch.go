package state

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"time"
)

// ErrStale means that the state belongs to an epoch that is over (see Epoch).
var ErrStale = errors.New("of an earlier epoch")

// An Epoch is one life of the node. It ends at a reboot, when all pods of the node are gone for good. If the node
// itself is a container (kind, k3s in Docker), its life also ends when that container restarts. Such a restart
// changes pid 1 and the network namespace, but not the boot id.
type Epoch struct {
	Version int    `json:"version,omitempty"`
	Boot    string `json:"boot"` // the kernel's boot id
	ID      string `json:"id"`   // random, so that two epochs never have the same Token

	// Init is the start time of pid 1, by CLOCK_BOOTTIME.
	Init time.Duration `json:"init,omitempty"`

	// Made is the time when the epoch was written, by CLOCK_BOOTTIME.
	Made time.Duration `json:"made,omitempty"`

	// NetNS is the SO_NETNS_COOKIE of the network namespace in which the epoch began.
	NetNS uint64 `json:"netns,omitempty"`
}

// Token returns the name of the epoch. Each record contains the token of its epoch.
func (e Epoch) Token() string { return e.Boot + "/" + e.ID }

// Epoch reads the recorded epoch and writes nothing. If there is none, the error matches os.ErrNotExist. If the epoch
// is over, Epoch returns it together with an error that matches ErrStale. Epoch needs no lock. A verb that changes
// something calls [Dir.Enter] instead.
func (d *Dir) Epoch() (Epoch, error) { return d.epochOf(d.sources.netns) }

// epochOf does the work of Epoch. The function netns returns the cookie of the caller's network namespace.
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

	if err != nil {
		return e, fmt.Errorf("read epoch: %w", err)
	}

	return e, nil
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

// checkEpoch returns an error that matches ErrStale if e, which was read from path, is over. An epoch is over if the
// boot id differs, or if the network namespace differs and pid 1 is younger than the epoch.
//
// A younger pid 1 alone proves nothing, since a caller in a pod with its own PID namespace sees one too. A node has
// a new network namespace after a restart, unless it is a container with host networking. There the epoch goes on,
// and GC removes the attachments of pods that are gone.
func (d *Dir) checkEpoch(path string, e Epoch, netns func() (uint64, error)) error {
	boot, err := d.sources.bootID()
	if err != nil {
		return err
	}

	if e.Boot != boot {
		return fmt.Errorf("%s: %w: of boot %s, and this is %s", path, ErrStale, e.Boot, boot)
	}

	// Reading the cookie is cheap, and nearly every call ends here.
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
	boot, err := d.sources.bootID()
	if err != nil {
		return Epoch{}, err
	}

	start, err := d.sources.initStart()
	if err != nil {
		return Epoch{}, err
	}

	cookie, err := d.sources.netns()
	if err != nil {
		return Epoch{}, err
	}

	return Epoch{
		Version: version,
		Boot:    boot,
		ID:      fmt.Sprintf("%016x%016x", rand.Uint64(), rand.Uint64()),
		Init:    max(start, time.Millisecond),
		Made:    d.sources.uptime(),
		NetNS:   cookie,
	}, nil
}

// Begun returns when an epoch began, as a time by the present wall clock. An epoch begins when pid 1 starts. The
// zero Epoch yields the zero time.
func (d *Dir) Begun(e Epoch) time.Time {
	if e.Init == 0 {
		return time.Time{}
	}
	return d.sources.now().Add(e.Init - d.sources.uptime()).UTC()
}

// Enter takes the shared lock, and returns it together with the node's present epoch.
//
// If the recorded epoch is missing, damaged or over, one process begins a new epoch under the exclusive lock, while
// all others wait. It deletes the records of an epoch that is over, and writes the new epoch last. If a step fails,
// the next caller begins again. If the recorded epoch was missing or damaged, all records stay, and GC later
// removes the attachments of pods that are gone.
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
			return found == nil, ignoreLost(found)
		},
		func() error {
			var err error
			epoch, err = d.beginEpoch(errors.Is(found, ErrStale))
			return err
		})

	if err != nil {
		return nil, Epoch{}, errors.Join(fmt.Errorf("enter %s: %w", d.path, err), l.Close())
	}

	return l, epoch, nil
}

// ignoreLost returns nil for the errors that beginning a new epoch resolves, and any other err unchanged.
func ignoreLost(err error) error {
	if errors.Is(err, os.ErrNotExist) || errors.Is(err, ErrStale) || errors.Is(err, ErrDamaged) {
		return nil
	}
	return err
}

// beginEpoch writes a new epoch. If the previous epoch is stale, beginEpoch first deletes its records. The caller
// holds the exclusive lock.
func (d *Dir) beginEpoch(stale bool) (Epoch, error) {
	epoch, err := d.newEpoch()
	if err != nil {
		return Epoch{}, fmt.Errorf("begin epoch: %w", err)
	}

	if stale { // records of takeovers name their own epoch
		err = errors.Join(os.RemoveAll(d.attachmentsPath()), os.RemoveAll(d.networksPath()))
	}

	if err != nil {
		return Epoch{}, fmt.Errorf("begin epoch: drop records of earlier epochs: %w", err)
	}

	// Write the epoch last, since other processes regard the directory as usable as soon as it has the new epoch.
	if err := d.replaceFile(d.epochPath(), Encode(&epoch.Version, &epoch)); err != nil {
		return Epoch{}, fmt.Errorf("begin epoch: %w", err)
	}

	return epoch, nil
}
