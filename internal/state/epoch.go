package state

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"time"
)

// ErrStale says that the state belongs to an epoch that is over.
var ErrStale = errors.New("of an earlier epoch")

// An Epoch is one life of the node, which ends when its pods are gone for good:
// at a reboot, or where the node is a container itself (kind, k3s in Docker), when
// that container restarts. The boot id survives the latter; pid 1 and the network
// namespace do not.
type Epoch struct {
	Version int    `json:"version,omitempty"`
	Boot    string `json:"boot"` // the kernel's boot id
	ID      string `json:"id"`   // random, so that no two epochs are taken for one

	// Init is when pid 1 started, by CLOCK_BOOTTIME.
	Init time.Duration `json:"init,omitempty"`

	// Made is when the epoch was made, by CLOCK_BOOTTIME.
	Made time.Duration `json:"made,omitempty"`

	// NetNS is SO_NETNS_COOKIE of the namespace it was made in.
	NetNS uint64 `json:"netns,omitempty"`
}

// Token names the epoch, to be kept beside what belongs to it.
func (e Epoch) Token() string { return e.Boot + "/" + e.ID }

// Epoch reads the epoch and makes nothing. If there is none the error matches
// os.ErrNotExist; if it is over, ErrStale, and the epoch comes along. It needs no
// lock. Verbs that change something use [Dir.Enter].
func (d *Dir) Epoch() (Epoch, error) { return d.epochOf(d.sources.netns) }

// epochOf is Epoch for the network namespace with the cookie that netns gives.
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

// Check refuses one that could not be compared with another.
func (e *Epoch) Check() error {
	if e.Boot == "" || e.ID == "" {
		return errors.New("it has no boot id, or no id")
	}
	return nil
}

// checkEpoch fails with ErrStale if e, which stands in a file, is over. A pid 1 that is younger than the epoch is
// not enough: a caller in a pod with its own PID namespace sees one too. A node that restarted has another network
// namespace besides. (The one exception, a nested node on its machine's own network, is left to GC.)
func (d *Dir) checkEpoch(path string, e Epoch, netns func() (uint64, error)) error {
	boot, err := d.sources.bootID()
	if err != nil {
		return err
	}
	if e.Boot != boot {
		return fmt.Errorf("%s: %w: of boot %s, and this is %s", path, ErrStale, e.Boot, boot)
	}
	// The cheaper question first: it settles the matter in nearly every call.
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

// newEpoch describes the epoch that we are in. The start of pid 1 is never before
// the boot, so it is the later of the two.
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

// Begun is when an epoch began: when pid 1 started, by the clock as it is now. The zero
// Epoch has no beginning.
func (d *Dir) Begun(e Epoch) time.Time {
	if e.Init == 0 {
		return time.Time{}
	}
	return d.sources.now().Add(e.Init - d.sources.uptime()).UTC()
}
