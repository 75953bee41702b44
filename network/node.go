package network

import (
	"cmp"
	"context"
	"log/slog"
	"time"

	"github.com/tombolo-cni/tombolo/bridge"
	"github.com/tombolo-cni/tombolo/internal/state"
	"github.com/tombolo-cni/tombolo/ipam"
	"github.com/tombolo-cni/tombolo/netns"
	"github.com/tombolo-cni/tombolo/nft"
)

// DefaultStateDir is where the state is kept unless a Config says otherwise.
const DefaultStateDir = state.DefaultDir

// UndoTimeout bounds what is undone after an Add that failed, whose own deadline may have
// been what failed it.
const UndoTimeout = 10 * time.Second

// Config configures a Node. A nil Config and a zero field mean the default.
type Config struct {
	// NetNS is the namespace of the bridges, the host's; nil is that of the calling thread. It
	// stays open as long as the Node is used. Each call is in it until it returns.
	NetNS *netns.NS
	// StateDir is where networks and attachments are on record; empty is DefaultStateDir. All
	// programs that work on one node have to agree on it.
	StateDir string
	// LeaseDir is where leases are on record. Without it no pod can lease its address, and
	// the lease that the host has by an uplink is left alone.
	LeaseDir string
	// Mark is the bit of a packet's mark that says that a pod may have it forwarded, which
	// all networks of a node share; 0 is that of the networks on record, or nft.DefaultMark.
	Mark uint32
	// Allocators returns the allocator that takes back addresses of a network, since Del and GC get no Network. origin
	// is the Network.Origin that Add put on record with the attachment, or nil for the network as it is now. If the
	// allocator is nil, the addresses stay reserved.
	//
	// Without Allocators, Del takes back addresses of an Origin of type "host-local", and fails for those of a
	// Network.Allocator without an Origin.
	Allocators func(network string, origin *Origin) (ipam.Allocator, error)
	// Log gets what an operator should know although a call goes on; nil drops it.
	Log *slog.Logger
	// Step is called when a step of Add is done, and when one of what Del takes down is; an
	// error of it ends the Add there, undone. Nil is nothing.
	Step func(step string) error

	// DialBridge and DialFirewall open the kernel for each call, in NetNS; nil is bridge.Dial and
	// nft.Dial. They are for tests, which put a fault in front of it.
	DialBridge   func() (*bridge.Conn, error)
	DialFirewall func(*nft.Config) (*nft.Conn, error)
}

// Node is the networks and pods of one network namespace, the host's, with their records. It
// holds no socket, file or lock between calls, and its methods may be called from several
// goroutines, and processes.
type Node struct{ cfg settings }

// settings is a Config with its defaults filled in, but for the Mark.
type settings struct {
	Config
	Dir *state.Dir
}

// Open checks a configuration. Nothing is made before there is something to keep.
func Open(ctx context.Context, cfg *Config) (*Node, error) {
	if cfg == nil {
		cfg = &Config{}
	}
	dir, err := state.Open(cmp.Or(cfg.StateDir, DefaultStateDir))
	if err != nil {
		return nil, failf(ErrInvalid, "%w", err)
	}
	n := &Node{settings{*cfg, dir}}
	n.cfg.Log = cmp.Or(cfg.Log, slog.New(slog.DiscardHandler))
	if n.cfg.DialBridge == nil {
		n.cfg.DialBridge = func() (*bridge.Conn, error) { return bridge.Dial(nil) }
	}
	if n.cfg.DialFirewall == nil {
		n.cfg.DialFirewall = nft.Dial
	}
	return n, nil
}

// step says that a part of a call is done.
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
	if err := s.Enter(ctx); err != nil {
		s.Close()
		return nil, err
	}
	return s, nil
}

// about does something in a session about all networks, or about some by their names.
func (n *Node) about(ctx context.Context, do func(*session) error, networks ...string) error {
	s, err := n.openKnown(ctx, networks...)
	if err != nil {
		return err
	}
	defer s.Close()
	return do(s)
}

// openKnown opens a session for a call about all networks, or about some by their names. All
// share one mark, so any record tells it.
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
