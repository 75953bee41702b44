package keeper

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/tombolo-cni/tombolo/internal/lease"
	"github.com/tombolo-cni/tombolo/internal/state"
	"github.com/tombolo-cni/tombolo/netns"
	"github.com/tombolo-cni/tombolo/network"
)

// workers is the largest number of leases that the keeper visits at the same time. Each visit may wait seconds for a
// server.
const workers = 64

// Config holds the settings of a Keeper. Leases is required; the other fields have defaults.
type Config struct {
	Leases *lease.Store
	// State is the plugin's state directory, which records the addresses of pods. If it is nil, the keeper does not
	// check whether another pod has a leased address.
	State *state.Dir
	// Node is the network.Node with the same state and lease directories. With it the keeper updates attachments whose
	// leases get other addresses, and repairs the firewall, links, and NICs that the host shares with pods. It also
	// takes down dead pods. If Node is nil, the keeper does none of this. Node requires State.
	Node *network.Node
	// Bus is the address of the D-Bus with firewalld, as in DBUS_SYSTEM_BUS_ADDRESS. If Bus is empty or Node is nil,
	// the keeper leaves the zones of firewalld alone.
	Bus string
	// Log receives the keeper's messages. It may be nil.
	Log *slog.Logger
	// Ready is called once, when the keeper has listed all records of leases and watches for changes of them. It may be
	// nil.
	Ready func()
	// Alive is called every lease.Beat as long as the loop runs. It may be nil.
	Alive func()
}

// Keeper renews the leases whose records are in one directory, and does the other work that Config.Node enables.
type Keeper struct {
	Config
	host    *netns.NS // nil for the keeper's own namespace
	workers int
	node    node
	boot    string
	metrics *metrics
}

// New checks a configuration and returns a Keeper. The Keeper opens no socket, and watches no file before Run.
func New(cfg *Config) (*Keeper, error) {
	if cfg == nil || cfg.Leases == nil {
		return nil, errors.New("keep leases: no directory given")
	}

	boot, _, err := cfg.Leases.Clock()
	if err != nil {
		return nil, fmt.Errorf("keep leases: %w", err)
	}

	k := &Keeper{Config: *cfg, workers: workers, node: kernel{network: cfg.Node}, boot: boot, metrics: newMetrics(cfg)}
	k.Log = cmp.Or(k.Log, slog.New(slog.DiscardHandler))
	if k.Ready == nil {
		k.Ready = func() {}
	}

	if k.Alive == nil {
		k.Alive = func() {}
	}

	return k, nil
}

// Run does the keeper's work until ctx is done, and then returns nil. It leaves every lease as it is, for the next
// keeper. The error matches lease.ErrOtherKeeper if another keeper runs, and os.ErrNotExist if the directory was
// removed.
func (k *Keeper) Run(ctx context.Context) error {
	heartbeat, err := k.Leases.Keep()
	if err != nil {
		return err
	}

	// Watch before listing the records, so that no change is missed.
	w, err := watch(k.Leases.Path())
	if err != nil {
		return errors.Join(err, heartbeat.Close())
	}

	err = k.newLoop(ctx).run(w.changes, heartbeat.Beat)

	// Stop the heartbeat last: when it stops, another keeper may start.
	return errors.Join(err, w.close(), heartbeat.Close())
}

// now returns the time with a reading of the monotonic clock, so that setting the wall clock changes no interval. Times
// in records get such a reading when they are loaded.
func now() time.Time { return time.Now() }
