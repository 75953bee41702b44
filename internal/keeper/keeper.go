package keeper

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/tombolo-cni/tombolo/internal/lease"
	"github.com/tombolo-cni/tombolo/internal/state"
	"github.com/tombolo-cni/tombolo/netns"
)

// DefaultWorkers is how many leases are worked on at a time. Few would do for servers
// that answer: it is for those that do not, for which each waits for seconds, with a
// socket and without a thread.
const DefaultWorkers = 64

// Config says what to keep. Leases is needed; the rest has defaults.
type Config struct {
	Leases *lease.Dir
	// State is the plugin's state directory: of attachments, which follow their leases
	// to other addresses, and of uplinks. Nil: neither is looked after.
	State *state.Dir
	// Log is told what happens to leases; nil is nobody.
	Log *slog.Logger
	// Workers bounds the leases that are worked on at a time, and with them the sockets
	// that are open; 0 is DefaultWorkers.
	Workers int
	// Ready is called once, when all the records that there were have been listed, and
	// new ones are heard of; nil is nothing.
	Ready func()
	// Alive is called every lease.Beat for as long as the loop turns; nil is nothing.
	Alive func()
	// Repair is called after an uplink had to be mended: a bridge that was made anew has
	// neither the pods' ports nor what their networks set of it. And it is called when the
	// host has other addresses on such a bridge: default routes of pods lead there. Nil is
	// nothing.
	Repair func(context.Context) error
	// Firewall is looked at when nf_tables has changed, and Repair called if anything is lacking.
	// It needs State; nil: it is not looked after.
	Firewall Firewall
	// Reclaim is called at once, and then every minute, to take down what pods hold that died
	// without a DEL; it says of how many it did. It needs State; nil is nothing.
	Reclaim func(context.Context) (int, error)
	// Links are looked at when the kernel announces changes of them, and Repair is called if
	// anything is lacking. It needs State; nil: they are not looked after.
	Links Links
	// Pools says how far networks' addresses are used up, when metrics are asked for; nil: they
	// do not tell.
	Pools func(context.Context) ([]Pool, error)
}

// Keeper keeps the leases of one directory.
type Keeper struct {
	leases   *lease.Dir
	state    *state.Dir // may be nil
	host     *netns.NS  // nil: the keeper's own
	log      *slog.Logger
	workers  int
	ready    func()
	alive    func()
	repair   func(context.Context) error
	firewall Firewall                           // may be nil
	reclaim  func(context.Context) (int, error) // may be nil
	links    Links                              // may be nil
	node     node
	boot     string
	metrics  metrics
	// strayed is told of a pod that its lease took out of the subnet of the host's address
	// which its default route leads to.
	strayed chan struct{}
	// carriers is told of bridges whose uplink has its carrier again: it may lead to another network.
	carriers chan string
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
	k := &Keeper{leases: cfg.Leases, state: cfg.State, log: cfg.Log, workers: cfg.Workers, ready: cfg.Ready, alive: cfg.Alive, node: kernel{}, boot: boot,
		strayed: make(chan struct{}, 1), carriers: make(chan string, 16)}
	k.firewall, k.reclaim, k.links = cfg.Firewall, cfg.Reclaim, cfg.Links
	k.metrics.pools = cfg.Pools
	if k.state != nil {
		k.metrics.failures = k.state.Failures
	}
	if k.log == nil {
		k.log = slog.New(slog.DiscardHandler)
	}
	if k.workers <= 0 {
		k.workers = DefaultWorkers
	}
	if k.ready == nil {
		k.ready = func() {}
	}
	if k.alive == nil {
		k.alive = func() {}
	}
	if k.repair = cfg.Repair; k.repair == nil {
		k.repair = func(context.Context) error { return nil }
	}
	return k, nil
}

// Run keeps the leases until ctx is done, and then ends without an error: every lease
// stays as it is, for the next keeper. The error matches lease.ErrOtherKeeper where there is
// another keeper, and os.ErrNotExist when the directory was removed meanwhile.
func (k *Keeper) Run(ctx context.Context) error {
	if err := k.leases.Make(); err != nil {
		return err
	}
	heartbeat, err := k.leases.Keep()
	if err != nil {
		return err
	}
	// Before the records are listed, so that none falls in between.
	w, err := watch(k.leases.Path())
	if err != nil {
		return errors.Join(err, heartbeat.Close())
	}
	stop := k.besides(ctx)
	err = k.newLoop(ctx).run(w.changes, heartbeat.Beat)
	stop()
	// The heartbeat last: a process that sees no keeper may begin as one.
	return errors.Join(err, w.close(), heartbeat.Close())
}

// besides begins what goes on beside the leases, and gives the function that ends it.
func (k *Keeper) besides(ctx context.Context) (stop func()) {
	if k.state == nil {
		return func() {}
	}
	ctx, cancel := context.WithCancel(ctx)
	var all sync.WaitGroup
	all.Go(func() { k.keepUplinks(ctx) })
	if k.firewall != nil {
		all.Go(func() { k.keepFirewall(ctx) })
	}
	if k.reclaim != nil {
		all.Go(func() { k.keepReclaiming(ctx) })
	}
	if k.links != nil {
		all.Go(func() { k.keepLinks(ctx) })
	}
	return func() { cancel(); all.Wait() }
}

// now is the time. It goes by the monotonic clock, as the times of a record that was read do.
func now() time.Time { return time.Now() }
