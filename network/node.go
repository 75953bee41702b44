package network

import (
	"cmp"
	"context"
	"log/slog"
	"time"

	"github.com/tombolo-cni/tombolo/internal/nl"
	"github.com/tombolo-cni/tombolo/internal/state"
	"github.com/tombolo-cni/tombolo/ipam"
	"github.com/tombolo-cni/tombolo/netns"
)

// DefaultStateDir is the state directory if Config.StateDir is empty.
const DefaultStateDir = state.DefaultDir

// UndoTimeout limits the time for undoing a failed Add, whose own deadline may have been the cause.
const UndoTimeout = 10 * time.Second

// Config holds the parameters of a Node. The zero value, and nil, mean the defaults.
type Config struct {
	// NetNS is the namespace of the bridges, the host's. nil means that of the calling thread. It must stay open as
	// long as the Node is used. Each call enters it until it returns.
	NetNS *netns.NS
	// StateDir is the directory with the records of networks and attachments. Empty means DefaultStateDir. All
	// programs on one node must use the same.
	StateDir string
	// LeaseDir is the directory with the records of leases. Without it no pod can lease its address, and the host's
	// own lease on an uplink is left alone.
	LeaseDir string
	// Mark is the bit of a packet's mark which means that a pod may have the packet forwarded. All networks of a node
	// share it. 0 means that of the networks on record, or nft.DefaultMark.
	Mark uint32
	// Allocators returns the allocator that takes addresses back: for a network's attachments with this origin or, if
	// origin is nil, for the network as it is now. If it returns nil, addresses are not given back. If Allocators is
	// nil, only addresses with an origin of type host-local are given back, and for addresses of an Allocator that
	// Network.Origin does not name, Del fails.
	Allocators func(network string, origin *Origin) (ipam.Allocator, error)
	// Log receives messages for the operator about calls that continue. nil discards them.
	Log *slog.Logger
	// Step is called after each step of Add, and of the removal in Del. If it returns an error, Add ends there, and
	// is undone. It may be nil.
	Step func(step string) error
}

// Node manages the networks and pods of one network namespace, the host's, with their records. It holds no socket,
// file or lock between calls. Several goroutines, and several processes, may call its methods.
type Node struct{ cfg settings }

// settings is a Config with its defaults, except for the Mark.
type settings struct {
	Config
	Dir  *state.Dir
	dial nl.Dialer // nil outside of tests
}

// Open checks a configuration and returns a Node. It creates nothing before something must be recorded.
func Open(ctx context.Context, cfg *Config) (*Node, error) {
	if cfg == nil {
		cfg = &Config{}
	}

	dir, err := state.Open(cmp.Or(cfg.StateDir, DefaultStateDir))
	if err != nil {
		return nil, failf(ErrInvalid, "%w", err)
	}

	n := &Node{settings{*cfg, dir, nl.DialerOf(ctx)}}
	n.cfg.Log = cmp.Or(cfg.Log, slog.New(slog.DiscardHandler))
	return n, nil
}

// step reports the end of a part of a call.
func (n *Node) step(name string) error {
	if n.cfg.Step == nil {
		return nil
	}
	return n.cfg.Step(name)
}

// openEntered opens a session, and takes the shared lock.
func (n *Node) openEntered(ctx context.Context) (*session, error) {
	s, err := openSession(n.cfg)
	if err != nil {
		return nil, err
	}
	if err := s.enter(ctx); err != nil {
		s.close()
		return nil, err
	}
	return s, nil
}

// about calls do in a session about all networks, or about some by their names.
func (n *Node) about(ctx context.Context, do func(*session) error, networks ...string) error {
	s, err := n.openKnown(ctx, networks...)
	if err != nil {
		return err
	}
	defer s.close()
	return do(s)
}

// openKnown opens a session for a call about all networks, or about some by their names. All networks share one mark,
// so any record contains it.
func (n *Node) openKnown(ctx context.Context, networks ...string) (*session, error) {
	for _, name := range networks {
		if err := checkName(name); err != nil {
			return nil, err
		}
	}

	cfg := n.cfg
	if cfg.Mark == 0 {
		records, _, err := n.cfg.Dir.ListNetworks()
		if err != nil {
			return nil, stateError(err)
		}
		for _, rec := range records {
			if rec.Mark != 0 {
				cfg.Mark = rec.Mark
			}
		}
	}

	return openSession(cfg)
}
