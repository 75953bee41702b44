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

// Config holds the parameters of a Node. A nil Config and the zero value of a field mean the defaults.
type Config struct {
	// NetNS is the network namespace that contains the bridges, normally the host's. nil means the calling thread's
	// namespace. NetNS must stay open as long as the Node is used. Each call enters NetNS, and leaves it when it
	// returns.
	NetNS *netns.NS
	// StateDir is the directory with the records of networks and attachments. Empty means DefaultStateDir. All
	// programs on one node must use the same directory.
	StateDir string
	// LeaseDir is the directory with the records of DHCP leases. If it is empty, no pod can lease its address, and
	// the Node does not touch the host's own lease on an uplink.
	LeaseDir string
	// Mark is the bit of the packet mark that means that a packet of a pod may be forwarded. All networks of a node
	// share it. 0 means the bit in the networks' records or, without records, nft.DefaultMark.
	Mark uint32
	// Allocators returns the allocator to which Del releases addresses. origin is the recorded origin of a network's
	// attachment; nil selects the network's present allocator. If Allocators returns nil, the addresses are not
	// released. If Allocators itself is nil, only addresses with an origin of type host-local can be released. Del
	// then fails for the addresses of an allocator that Network.Origin does not name.
	Allocators func(network string, origin *Origin) (ipam.Allocator, error)
	// Log receives warnings for the operator about problems that do not make a call fail. nil discards them.
	Log *slog.Logger
	// Step is called with a name after each step of Add, and of the removal in Del. If Step returns an error, Add
	// stops there and undoes its changes. nil means no calls.
	Step func(step string) error
}

// Node manages the networks and pods of one network namespace, normally the host's, together with their records. It
// holds no socket, file or lock between calls. Several goroutines and several processes may call its methods at the
// same time.
type Node struct{ cfg settings }

// settings is a Config in which the empty fields have their defaults, except for Mark. Dir is the state directory.
type settings struct {
	Config
	Dir  *state.Dir
	dial nl.Dialer // nil outside of tests
}

// Open checks cfg and returns a Node. It does not create the state directory; the first call that writes a record
// does.
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

// reportStep calls Config.Step, unless that is nil, with the name of the step that a call has just completed.
func (n *Node) reportStep(name string) error {
	if n.cfg.Step == nil {
		return nil
	}
	return n.cfg.Step(name)
}

// openEntered opens a session and takes the state's lock, shared.
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

// withSession opens a session for the named networks, or for all networks if there are no names. It calls the function
// do with the session, and closes the session.
func (n *Node) withSession(do func(*session) error, networks ...string) error {
	s, err := n.openKnown(networks...)
	if err != nil {
		return err
	}
	defer s.close()
	return do(s)
}

// openKnown opens a session for a call without a network's configuration. It checks the given names of networks. If
// Config.Mark is 0, openKnown reads the mark from a network's record: all networks share one mark.
func (n *Node) openKnown(networks ...string) (*session, error) {
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
