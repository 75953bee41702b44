package network

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/endpoint"
	"github.com/tombolo-cni/tombolo/internal/file"
	"github.com/tombolo-cni/tombolo/internal/ident"
	"github.com/tombolo-cni/tombolo/internal/link"
	"github.com/tombolo-cni/tombolo/internal/nl"
	"github.com/tombolo-cni/tombolo/internal/printable"
	"github.com/tombolo-cni/tombolo/internal/state"
	"github.com/tombolo-cni/tombolo/ipam"
	"github.com/tombolo-cni/tombolo/netns"
)

// Dead is an attachment whose pod died without a Del.
type Dead struct {
	*Attachment
	// Why describes the evidence that the pod is gone.
	Why string
	// Kept is the reason why the attachment was left alone nevertheless. It is nil if it was reclaimed, or would be.
	Kept error
}

// MarshalJSON returns the attachment's record, with the fields Why and Kept.
func (d Dead) MarshalJSON() ([]byte, error) {
	kept := ""
	if d.Kept != nil {
		kept = d.Kept.Error()
	}
	return json.Marshal(struct {
		*state.Attachment
		Why  string `json:"why"`
		Kept string `json:"kept,omitempty"`
	}{d.Attachment.onRecord(), d.Why, kept})
}

// CollectDead removes the attachments of a network, or of all networks if network is empty, whose pods are gone, and
// returns them. Such remains come from a killed runtime, or an earlier boot. A pod is gone if its port is gone or
// about to be deleted with its namespace, and its path does not lead to that namespace: a path that cannot be opened
// may belong to another mount namespace, and somebody may have deleted a port separately. CollectDead leaves
// attachments alone that an Add or Del is working on. Config.Allocators give addresses back. If they fail, or one
// attachment cannot be removed, it is kept, with the reason in Kept. With dryRun nothing is changed.
//
// It needs CAP_NET_ADMIN, and CAP_SYS_ADMIN to distinguish namespaces.
func (n *Node) CollectDead(ctx context.Context, network string, dryRun bool) ([]Dead, error) {
	networks, err := n.cfg.Dir.Networks()
	if err != nil {
		return nil, stateError(err)
	}

	if network != "" {
		if !slices.Contains(networks, network) {
			return nil, failf(ErrInvalid, "%w", state.UnknownNetwork(networks, network))
		}
		networks = []string{network}
	}

	_, err = n.cfg.Dir.Epoch()
	switch {
	case errors.Is(err, state.ErrStale):
		if dryRun {
			return nil, nil
		}
		return nil, n.about(ctx, func(s *session) error { return s.enter(ctx) }) // this deletes all records
	case errors.Is(err, fs.ErrNotExist):
		return nil, nil // the epoch of the records is unknown
	case err != nil:
		return nil, stateError(err)
	}

	s, err := n.openKnown(ctx)
	if err != nil {
		return nil, err
	}
	defer s.close()
	if err := s.inOwnNamespace(); err != nil {
		return nil, err
	}

	var list []Dead
	var errs []error
	for _, name := range networks {
		found, err := n.teardown(s, name, nil).collectDead(ctx, dryRun)
		list, errs = append(list, found...), append(errs, err)
	}

	return list, errors.Join(errs...)
}

// nameDead adds advice to the error if dead attachments are in the way.
func (n *Node) nameDead(ctx context.Context, network string, refused error) error {
	if !errors.Is(refused, ErrAttached) {
		return refused
	}
	dead, err := n.CollectDead(ctx, network, true)
	if err != nil || len(dead) == 0 {
		return refused
	}
	return failf(ErrAttached, "%w; tombolo gc reclaims %s", refused,
		printable.Count(len(dead), "attachment whose pod is gone", "attachments whose pods are gone"))
}

// reclaimTimeout limits the time that an Add spends on dead pods.
const reclaimTimeout = 10 * time.Second

// lacking reports whether an Add failed for lack of resources that dead pods may hold. An allocator that runs a
// plugin has that plugin's message for a full pool.
func (nw *Network) lacking(err error) bool {
	if errors.Is(err, ipam.ErrPoolFull) || errors.Is(err, ipam.ErrAddressTaken) {
		return true
	}
	var refused *allocationError
	return errors.As(err, &refused) && nw.Allocator.Slow()
}

// allocationError is an error from an allocator's Add.
type allocationError struct{ error }

func (e *allocationError) Unwrap() error { return e.error }

// reclaim removes dead attachments that hold addresses of a network, and reports whether another attempt makes sense.
// The Add has been undone, and holds no lock.
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
			n.cfg.Log.Warn("reclaim what the pod of container " + d.ContainerID + " holds, which is gone: " +
				d.Kept.Error())
			continue
		}
		n.cfg.Log.Warn("the pod of container " + d.ContainerID + " is gone, without a DEL: " + d.Why + "; reclaimed")
		freed = true
	}

	return freed
}

// hasDied reports whether the pod of an attachment on record is gone: the record is readable, and its port no longer
// exists.
func (s *session) hasDied(ctx context.Context, network, hash string) bool {
	if _, err := s.Dir.Load(network, hash); err != nil {
		return false
	}
	_, err := s.Links.Link(ctx, ident.Port(hash))
	return errors.Is(err, fs.ErrNotExist)
}

// whyDead returns the evidence that an attachment's pod is gone, or "" without any.
func whyDead(ctx context.Context, s *session, rec *state.Attachment) (string, error) {
	port, now := ident.Port(rec.Hash()), "is gone"
	switch _, err := s.Links.Link(ctx, port); {
	case err == nil:
		if goes, err := link.LosesOtherEnd(nl.Of(s.Links.Socket()), port); !goes {
			return "", err
		}
		now = "is about to go"
	case !errors.Is(err, fs.ErrNotExist):
		return "", err
	}

	where, err := strayed(rec)
	if where == "" || err != nil {
		return "", err
	}

	// To find a renamed port takes a dump of all links, so do this last.
	if renamed, err := s.isRenamed(ctx, rec.Hash()); renamed || err != nil {
		return "", err
	}

	return fmt.Sprintf("its port %s %s, and %s", port, now, where), nil
}

// strayed returns why a record does not lead to its pod's namespace, or "" if it does or may.
func strayed(rec *state.Attachment) (string, error) {
	if rec.NetNS == "" {
		return "its record is damaged", nil
	}

	pod, err := netns.Open(rec.NetNS)
	if err != nil {
		// These errors concern the path, unlike those that concern this process, such as a lack of descriptors.
		paths := []error{fs.ErrNotExist, netns.ErrNotNetNS, fs.ErrPermission, unix.ENOTDIR, unix.ESRCH, unix.ELOOP,
			unix.ENAMETOOLONG}
		if slices.ContainsFunc(paths, func(about error) bool { return errors.Is(err, about) }) {
			return fmt.Sprintf("its namespace: %v", err), nil
		}
		return "", err
	}
	defer pod.Close()
	if rec.NetNSCookie == 0 {
		return "", nil // its ADD was killed early, so it may be the pod's
	}

	cookie, err := pod.Cookie()
	if err != nil || cookie == rec.NetNSCookie {
		return "", err
	}

	return rec.NetNS + " is another namespace by now", nil
}

// inOwnNamespace returns an error if the caller is in a network namespace other than the networks': it would find
// none of their ports, and take all pods for dead.
func (s *session) inOwnNamespace() error {
	epoch, err := s.Dir.Epoch()
	if err != nil {
		return nil // no record is valid
	}

	cookie, err := state.NetNSCookie()
	if err == nil && epoch.NetNS != 0 && cookie != epoch.NetNS {
		err = failf(ErrState,
			"the networks on record are in another network namespace, so this one does not show which pods live: run "+
				"this in the host's")
	}
	return err
}

// instead returns a substitute for an unreadable record. The attachment's objects in the kernel contain its hash, and
// its reservation names it.
func (t *teardown) instead(hash string) *state.Attachment {
	rec := &state.Attachment{State: state.Adding, Network: t.Network, Short: hash}
	rec.DataDir = t.Session.Dir.Path() + "/ipam"
	if n, err := t.Session.Dir.LoadNetwork(t.Network); err == nil {
		rec.Bridge, rec.VLAN, rec.DataDir = n.Bridge, n.VLAN, cmp.Or(n.PoolDir, rec.DataDir)
	}

	dir := rec.DataDir + "/" + t.Network
	entries, _ := os.ReadDir(dir)
	for _, e := range entries {
		if !e.Type().IsRegular() {
			continue
		}
		data, _ := file.Read(dir+"/"+e.Name(), file.MaxRecord)
		id, ifName, _ := strings.Cut(strings.TrimSpace(string(data)), "\r\n")
		if ident.Hash(t.Network, id, ifName) == hash {
			rec.ContainerID, rec.IfName, rec.IPAMType = id, ifName, "host-local"
		}
	}

	return rec
}

// unreleasable returns the reason if no allocator can take an attachment's addresses back.
func (t *teardown) unreleasable(rec *state.Attachment) error {
	switch {
	case rec.IPAMType == endpoint.Leased:
		return nil
	case rec.NetNS == "" && rec.IPAMType == "":
		return errors.New("neither the allocator of its address nor its container is known: have the runtime call GC")
	}
	_, err := t.node.allocator(t.Network, &Origin{rec.IPAMType, rec.DataDir})
	return err
}

// collectDead removes the dead attachments of the network, and returns them.
func (t *teardown) collectDead(ctx context.Context, dryRun bool) ([]Dead, error) {
	records, unread, err := t.Session.Dir.List(t.Network)
	if err != nil {
		return nil, stateError(err)
	}

	for _, d := range unread {
		t.Session.warn(d.Error())
		if d.Hash != "" && (errors.Is(d, state.ErrDamaged) || errors.Is(d, state.ErrVersion)) {
			records = append(records, t.instead(d.Hash))
		}
	}

	var errs []error
	var found []Dead
	var gone []*state.Attachment
	for _, rec := range records {
		d, err := t.collectIfDead(ctx, rec, dryRun)
		errs = append(errs, err)
		if d == nil {
			continue
		}
		if found = append(found, *d); d.Kept == nil && !dryRun {
			gone = append(gone, d.rec)
		}
	}

	errs = append(errs, closeLoopbackAfter(ctx, t.Session, t.Known, gone...))
	t.Session.leave()
	return found, errors.Join(errs...)
}

// collectIfDead removes one attachment. It returns nil if the attachment does not look dead, or if a call is working
// on it. It looks again under the record's lock, which an ADD holds from beginning to end.
func (t *teardown) collectIfDead(ctx context.Context, rec *state.Attachment, dryRun bool) (*Dead, error) {
	if why, err := whyDead(ctx, t.Session, rec); why == "" {
		return nil, err
	}

	lock, err := t.Session.Dir.LockAttachment(t.Network, rec.Hash())
	if err != nil && (rec.NetNS != "" || errors.Is(err, state.ErrBusy) || errors.Is(err, fs.ErrNotExist)) {
		return nil, nil // a call is or was working on it; a damaged record may be no file, which cannot be locked
	}
	defer lock.Close()
	switch now, err := t.Session.Dir.Load(t.Network, rec.Hash()); {
	case errors.Is(err, fs.ErrNotExist):
		return nil, nil
	case err == nil:
		rec = now
	}

	why, err := whyDead(ctx, t.Session, rec)
	if why == "" {
		return nil, err
	}

	d := &Dead{attachmentOf(rec), why, t.unreleasable(rec)}
	if dryRun || d.Kept != nil {
		return d, nil
	}

	// The keeper holds a lease's lock only while it writes the record.
	ctx, cancel := context.WithTimeout(ctx, collectWait)
	defer cancel()
	r := t.ownRemains(ctx, keyOf(rec).owner(), rec.Hash())
	r.rec = rec
	r.retaken = t.retaken(ctx, r)
	d.Kept = t.takeDown(ctx, r)
	return d, nil
}
