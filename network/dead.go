package network

import (
	"context"
	"encoding/json"
	"errors"
	"io/fs"
	"slices"
	"time"

	"github.com/tombolo-cni/tombolo/internal/state"
	"github.com/tombolo-cni/tombolo/ipam"
	"github.com/tombolo-cni/tombolo/network/internal/fail"
	"github.com/tombolo-cni/tombolo/network/internal/session"
	"github.com/tombolo-cni/tombolo/network/internal/teardown"
)

// Dead is an attachment whose pod died without a Del.
type Dead struct {
	*Attachment
	// Why is what shows that the pod is gone.
	Why string
	// Kept is why the attachment was left alone all the same; nil where it was reclaimed, or
	// would be.
	Kept error
}

// MarshalJSON gives the attachment as it is on record, with why it is dead, and why it was kept.
func (d Dead) MarshalJSON() ([]byte, error) {
	var rec *state.Attachment
	if d.Attachment != nil {
		rec = d.rec
	}
	kept := ""
	if d.Kept != nil {
		kept = d.Kept.Error()
	}
	return json.Marshal(struct {
		*state.Attachment
		Why  string `json:"why"`
		Kept string `json:"kept,omitempty"`
	}{rec, d.Why, kept})
}

// CollectDead takes down the attachments of a network, or of all if that is empty, whose pods
// are gone, and gives them: what a runtime left that was killed, and what an earlier boot did.
// A pod is gone if its port is, and its path does not lead to its namespace: a path that cannot
// be opened may be one of another mount namespace, and a port may have been deleted. What an Add
// or a Del is at work on is left alone. Addresses are given back by Config.Allocators; where
// that gives an error, or one attachment cannot be taken down, it is kept, and Kept says why.
// With dryRun nothing is changed.
//
// It has to be called in the network namespace of the networks. It needs CAP_NET_ADMIN, and
// CAP_SYS_ADMIN to tell namespaces apart.
func (n *Node) CollectDead(ctx context.Context, network string, dryRun bool) ([]Dead, error) {
	if err := n.usable(ctx); err != nil {
		return nil, err
	}
	networks, err := n.cfg.Dir.Networks()
	if err != nil {
		return nil, fail.State(err)
	}
	if network != "" {
		if err := checkName(network); err != nil {
			return nil, err
		}
		if !slices.Contains(networks, network) {
			return nil, fail.Errorf(ErrInvalid, "no network %q is on record in %s", network, n.cfg.Dir.Path())
		}
		networks = []string{network}
	}
	epoch, err := n.cfg.Dir.Epoch()
	switch {
	case errors.Is(err, state.ErrStale):
		if dryRun {
			return nil, nil
		}
		return nil, n.about(ctx, func(s *session.Session) error { return s.Enter(ctx) }) // which deletes all records
	case errors.Is(err, fs.ErrNotExist):
		return nil, nil // nobody can tell whose the records are
	case err != nil:
		return nil, fail.State(err)
	}
	if err := teardown.InOwnNamespace(epoch); err != nil {
		return nil, err
	}
	s, err := n.openKnown(ctx)
	if err != nil {
		return nil, err
	}
	defer s.Close()
	var list []Dead
	var errs []error
	for _, name := range networks {
		t := n.teardown(s, name, nil)
		find := t.CollectDead
		if dryRun {
			find = t.FindDead
		}
		found, err := find(ctx)
		errs = append(errs, err)
		for _, d := range found {
			list = append(list, Dead{attachmentOf(d.Rec), d.Why, d.Kept})
		}
	}
	return list, errors.Join(errs...)
}

// nameDead says what helps where attachments are in the way whose pods are gone.
func (n *Node) nameDead(ctx context.Context, network string, refused error) error {
	if !errors.Is(refused, ErrAttached) {
		return refused
	}
	dead, err := n.CollectDead(ctx, network, true)
	if err != nil || len(dead) == 0 {
		return refused
	}
	return fail.Errorf(ErrAttached, "%w; tombolo gc reclaims %s", refused, fail.Count(len(dead), "attachment whose pod is gone", "attachments whose pods are gone"))
}

// couldReclaim says whether dead pods of a network hold anything.
func (n *Node) couldReclaim(ctx context.Context, network string) bool {
	dead, err := n.CollectDead(ctx, network, true)
	return err == nil && slices.ContainsFunc(dead, func(d Dead) bool { return d.Kept == nil })
}

// reclaimTimeout bounds what an Add spends on pods that died.
const reclaimTimeout = 10 * time.Second

// lacking says whether an Add failed for want of what dead pods may hold. The plugin of an
// allocator that runs one has words of its own for a full pool.
func (nw *Network) lacking(err error) bool {
	if errors.Is(err, ipam.ErrPoolFull) || errors.Is(err, ipam.ErrAddressTaken) {
		return true
	}
	var refused *allocationError
	return errors.As(err, &refused) && nw.Allocator.Slow()
}

// allocationError is one of an allocator's Add.
type allocationError struct{ error }

func (e *allocationError) Unwrap() error { return e.error }

// reclaim takes down what holds addresses of a network, and is dead. It says whether it pays
// to try again. The Add has been undone, and holds no lock.
func (n *Node) reclaim(ctx context.Context, nw *Network) bool {
	if ctx.Err() != nil {
		return false
	}
	ctx, cancel := context.WithTimeout(ctx, reclaimTimeout)
	defer cancel()
	dead, err := n.CollectDead(ctx, nw.Name, false)
	if err != nil {
		n.cfg.Log.Warn("reclaim what dead pods hold: " + err.Error())
	}
	freed := false
	for _, d := range dead {
		if d.Kept != nil {
			n.cfg.Log.Warn("reclaim what the pod of container " + d.ContainerID + " holds, which is gone: " + d.Kept.Error())
			continue
		}
		n.cfg.Log.Warn("the pod of container " + d.ContainerID + " is gone, without a DEL: " + d.Why + "; reclaimed")
		freed = true
	}
	return freed
}

// reclaimLater takes down the dead pods of a network, of one of which an Add has taken
// something over, when the Add has given up its locks.
func (n *Node) reclaimLater(s *session.Session, network string) {
	s.Later(func() error {
		ctx, cancel := context.WithTimeout(context.Background(), reclaimTimeout)
		defer cancel()
		_, err := n.teardown(s, network, nil).CollectDead(ctx)
		return err
	})
}
