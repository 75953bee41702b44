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

// workers is how many leases are worked on at a time: each may wait seconds for a server that does not answer.
const workers = 64

// Config says what to keep. Leases is needed; the rest has defaults.
type Config struct {
	Leases *lease.Dir
	// State is the plugin's state directory, which tells what addresses pods have; nil: none is known.
	State *state.Dir
	// Node is the same node, whose attachments follow their leases to other addresses, and whose uplinks, firewall, links
	// and dead pods are looked after; nil: nothing of that. It needs State, and the same directory of leases.
	Node *network.Node
	// Log gets the keeper's messages; it may be nil.
	Log *slog.Logger
	// Ready is called once, when all the records that there were have been listed, and
	// new ones are heard of; nil is nothing.
	Ready func()
	// Alive is called every lease.Beat for as long as the loop turns; nil is nothing.
	Alive func()
}

// Keeper keeps the leases of one directory.
type Keeper struct {
	leases  *lease.Dir
	state   *state.Dir    // may be nil
	network *network.Node // may be nil
	host    *netns.NS     // nil: the keeper's own
	log     *slog.Logger
	workers int
	ready   func()
	alive   func()
	node    node
	boot    string
	metrics *metrics
	// carriers is told that an uplink has its carrier again: it may lead to another network.
	carriers chan struct{}
}

// New checks a configuration. Nothing is opened yet.
func New(cfg *Config) (*Keeper, error) {
	if cfg == nil || cfg.Leases == nil {
		return nil, errors.New("keep leases: no directory given")
	}
	boot, _, err := cfg.Leases.Clock()
	if err != nil {
		return nil, fmt.Errorf("keep leases: %w", err)
	}
	k := &Keeper{leases: cfg.Leases, state: cfg.State, network: cfg.Node, log: cmp.Or(cfg.Log, slog.New(slog.DiscardHandler)), workers: workers, ready: cfg.Ready, alive: cfg.Alive, node: kernel{network: cfg.Node}, boot: boot,
		metrics: newMetrics(cfg), carriers: make(chan struct{}, 1)}
	if k.ready == nil {
		k.ready = func() {}
	}
	if k.alive == nil {
		k.alive = func() {}
	}
	return k, nil
}

// Run keeps the leases until ctx is done, and then ends without an error: every lease
// stays as it is, for the next keeper. The error matches lease.ErrOtherKeeper where there is
// another keeper, and os.ErrNotExist when the directory was removed meanwhile.
func (k *Keeper) Run(ctx context.Context) error {
	heartbeat, err := k.leases.Keep()
	if err != nil {
		return err
	}
	// Before the records are listed, so that none falls in between.
	w, err := watch(k.leases.Path())
	if err != nil {
		return errors.Join(err, heartbeat.Close())
	}
	err = k.newLoop(ctx).run(w.changes, heartbeat.Beat)
	// The heartbeat last: a process that sees no keeper may begin as one.
	return errors.Join(err, w.close(), heartbeat.Close())
}

// now is the time. It goes by the monotonic clock, as the times of a record that was read do.
func now() time.Time { return time.Now() }
