package teardown

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/endpoint"
	"github.com/tombolo-cni/tombolo/internal/file"
	"github.com/tombolo-cni/tombolo/internal/ident"
	"github.com/tombolo-cni/tombolo/internal/link"
	"github.com/tombolo-cni/tombolo/internal/nl"
	"github.com/tombolo-cni/tombolo/internal/state"
	"github.com/tombolo-cni/tombolo/ipam"
	"github.com/tombolo-cni/tombolo/netns"
	"github.com/tombolo-cni/tombolo/network/internal/fail"
	"github.com/tombolo-cni/tombolo/network/internal/session"
)

// An attachment is dead if its port is gone, or about to go with its namespace, and its path does not
// lead to that. Neither proves it alone. The namespace lives as long as anything refers to it, but somebody may have deleted the port of a pod that runs. And a path that
// cannot be opened may be one of another mount namespace, where the runtime sees it.

// Dead is an attachment whose pod is gone.
type Dead struct {
	Rec  *state.Attachment
	Why  string // what shows that it is
	Kept error  // why it is left alone all the same
}

// whyDead says what shows that an attachment's pod is gone; "" where nothing does.
func whyDead(ctx context.Context, s *session.Session, rec *state.Attachment) (string, error) {
	why, err := seemsDead(ctx, s, rec)
	if why == "" || err != nil {
		return why, err
	}
	// It takes a dump of all links, so it is asked last.
	if renamed, err := s.Renamed(ctx, rec.Hash()); renamed || err != nil {
		return "", err
	}
	return why, nil
}

// seemsDead is whyDead without the search for a port that has another name by now.
func seemsDead(ctx context.Context, s *session.Session, rec *state.Attachment) (string, error) {
	port, now := "veth"+rec.Hash(), "is gone"
	switch _, err := s.Links.Link(ctx, port); {
	case err == nil:
		if goes, err := link.LosesOtherEnd(nl.Of(s.Links.Socket()), port); !goes {
			return "", err
		}
		now = "is about to go"
	case !errors.Is(err, fs.ErrNotExist):
		return "", err
	}
	if rec.NetNS == "" && port != "" {
		return fmt.Sprintf("its port %s %s, and its record is damaged", port, now), nil
	}
	pod, err := netns.Open(rec.NetNS)
	if err != nil && !leadsNowhere(err) {
		return "", err
	}
	if err != nil {
		return fmt.Sprintf("its port %s %s, and its namespace: %v", port, now, err), nil
	}
	defer pod.Close()
	if rec.NetNSCookie == 0 {
		return "", nil // its ADD was killed early: it may be the pod's
	}
	cookie, err := pod.Cookie()
	if err != nil || cookie == rec.NetNSCookie {
		return "", err
	}
	return fmt.Sprintf("its port %s %s, and %s is another namespace by now", port, now, rec.NetNS), nil
}

// leadsNowhere says whether an error is about the path, and not about this process, such as a lack of descriptors.
func leadsNowhere(err error) bool {
	for _, about := range []error{fs.ErrNotExist, netns.ErrNotNetNS, fs.ErrPermission, unix.ENOTDIR, unix.ESRCH, unix.ELOOP, unix.ENAMETOOLONG} {
		if errors.Is(err, about) {
			return true
		}
	}
	return false
}

// InOwnNamespace refuses a caller in another network namespace than the networks': it would find none of their
// ports, and take all pods for dead.
func InOwnNamespace(epoch state.Epoch) error {
	here, err := netns.Current()
	if err != nil {
		return err
	}
	defer here.Close()
	cookie, err := here.Cookie()
	if err == nil && epoch.NetNS != 0 && cookie != epoch.NetNS {
		err = fail.Errorf(fail.ErrState, "the networks on record are in another network namespace, so this one does not show which pods live: run this in the host's")
	}
	return err
}

// FindDead lists the network's dead attachments without a lock. One whose ADD is under way is not among them.
func (t *Teardown) FindDead(ctx context.Context) ([]*Dead, error) {
	records, unread, err := t.Session.Dir.List(t.Network)
	if err != nil {
		return nil, fail.State(err)
	}
	for _, d := range unread {
		t.Session.Warn(d.Error())
		if d.Hash != "" && (errors.Is(d, state.ErrDamaged) || errors.Is(d, state.ErrVersion)) {
			records = append(records, t.instead(d.Hash))
		}
	}
	var found []*Dead
	var errs []error
	for _, rec := range records {
		why, err := whyDead(ctx, t.Session, rec)
		errs = append(errs, err)
		if why == "" {
			continue
		}
		// A call has the lock, and is at work on it: an ADD, whose port is still to come, or a DEL.
		lock, err := t.Session.Dir.LockAttachment(t.Network, rec.Hash())
		if isAtWork(rec, err) {
			continue
		}
		lock.Close()
		found = append(found, &Dead{Rec: rec, Why: why, Kept: t.unreleasable(rec)})
	}
	return found, errors.Join(errs...)
}

// isAtWork says, by what locking a record came to, that another call is at work on it, or was. A damaged one may be
// no file, which cannot be locked.
func isAtWork(rec *state.Attachment, err error) bool {
	return err != nil && (rec.NetNS != "" || errors.Is(err, state.ErrBusy) || errors.Is(err, fs.ErrNotExist))
}

// instead is for a record that cannot be read: it says what is known without. What the attachment has in the kernel
// carries its hash, and its reservation names it.
func (t *Teardown) instead(hash string) *state.Attachment {
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

// unreleasable says why nobody could take an attachment's addresses back.
func (t *Teardown) unreleasable(rec *state.Attachment) error {
	switch {
	case rec.IPAMType == endpoint.Leased:
		return nil
	case rec.NetNS == "" && rec.IPAMType == "":
		return errors.New("what gave it an address is not known, nor which container it is: have the runtime call GC")
	}
	_, err := t.Allocator(&Origin{rec.IPAMType, rec.DataDir})
	return err
}

// CollectDead takes the dead attachments of the network down, and gives them. Each is looked
// at again under its record's lock, which an ADD holds from beginning to end.
func (t *Teardown) CollectDead(ctx context.Context) ([]*Dead, error) {
	list, err := t.FindDead(ctx)
	errs := []error{err}
	var found []*Dead
	var gone []*state.Attachment
	for _, d := range list {
		if d.Kept == nil {
			took, err := t.takeDeadDown(ctx, d)
			if err == nil && !took {
				continue
			}
			if d.Kept = err; err == nil {
				gone = append(gone, d.Rec)
			}
		}
		found = append(found, d)
	}
	errs = append(errs, closeLoopbackAfter(ctx, t.Session, t.Known, gone...))
	t.Session.Leave()
	return found, errors.Join(errs...)
}

// takeDeadDown takes an attachment down if it is dead still, and says whether it was.
func (t *Teardown) takeDeadDown(ctx context.Context, d *Dead) (bool, error) {
	hash, dir := d.Rec.Hash(), t.Session.Dir
	lock, err := dir.LockAttachment(t.Network, hash)
	if isAtWork(d.Rec, err) {
		return false, nil
	}
	defer lock.Close()
	rec, err := dir.Load(t.Network, hash)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return false, nil
	case err != nil:
		rec = d.Rec
	}
	why, err := whyDead(ctx, t.Session, rec)
	if why == "" || err != nil {
		return false, err
	}
	d.Rec, d.Why = rec, why
	// The keeper holds a lease's lock only while it writes the record.
	ctx, cancel := context.WithTimeout(ctx, collectWait)
	defer cancel()
	r := t.ownRemains(ctx, ipam.Owner{ContainerID: rec.ContainerID, IfName: rec.IfName}, hash)
	r.rec = rec
	r.retaken = t.retaken(r)
	return true, t.takeDown(ctx, r)
}

// retaken are the addresses that the reference's plugin, which knows nothing of the record, has
// reserved for the same attachment after its end: the container was restarted by that.
func (t *Teardown) retaken(r *remains) []netip.Addr {
	if r.rec.DataDir == "" {
		return nil // a directory of our own
	}
	written, err := t.Session.Dir.Written(t.Network, r.hash)
	if err != nil {
		return nil
	}
	var list []netip.Addr
	for _, a := range r.addresses {
		path := r.rec.DataDir + "/" + t.Network + "/" + a.String()
		info, err := os.Stat(path)
		if err != nil || !info.Mode().IsRegular() || !info.ModTime().After(written) {
			continue
		}
		// One that was made again by the kernel's addresses names no container.
		if text, err := os.ReadFile(path); err == nil && strings.HasPrefix(string(text), r.owner.ContainerID) {
			list = append(list, a)
		}
	}
	return list
}
