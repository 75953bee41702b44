package network

import (
	"context"
	"errors"
	"io/fs"

	"github.com/tombolo-cni/tombolo/network/internal/fail"
)

// maxRemains is how often an ADD undoes what it finds in its way. Once is enough, unless
// others are killed at the same attachment meanwhile.
const maxRemains = 3

// begin takes the locks that the ADD needs, in their order, and puts the attachment on
// record before anything is made for it, so that whatever comes, nothing is left that
// nobody can name. The record's lock is held from then on, and is never waited for.
func (a *adding) begin(ctx context.Context) error {
	for range maxRemains {
		if a.leasing != nil {
			// An ADD of the same that runs has the lease's lock for as long as its server
			// takes: so look first.
			if err := a.takeRemainsDown(ctx); err != nil {
				return err
			}
			if err := a.leasing.lock(ctx, a.hash); err != nil {
				return err
			}
		}
		if err := a.s.Enter(ctx); err != nil {
			return err
		}
		err := a.writeRecord()
		if !errors.Is(err, fs.ErrExist) {
			return err
		}
		// What is to be undone may have a lease, and a plugin to ask.
		a.s.Leave()
		if a.leasing != nil {
			a.leasing.unlock()
		}
		if err := a.takeRemainsDown(ctx); err != nil {
			return err
		}
	}
	return existsAlready(a.pod.key(a.nw))
}

// writeRecord creates the record and locks it. The error matches fs.ErrExist where there
// is one.
func (a *adding) writeRecord() error {
	a.base.Epoch = a.s.Epoch.Token()
	var err error
	if a.pending, err = a.s.Dir.Create(a.base); err != nil {
		if errors.Is(err, fs.ErrExist) {
			return err
		}
		return fail.State(err)
	}
	a.back.push(func(context.Context) error { return a.pending.Abandon() })
	return nil
}

// takeRemainsDown undoes what an ADD of this very attachment left that was killed: its
// record's lock is free, and the record says that it never came to its end. So it does with
// what is left of a pod that died without a DEL, whose port went with its namespace: some
// runtimes give the next container the same ID, and send no DEL before. Any other record is
// in the way.
func (a *adding) takeRemainsDown(ctx context.Context) error {
	lock, err := a.s.Dir.LockAttachment(a.nw.Name, a.hash)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil // it has gone by itself
	case err != nil:
		return existsAlready(a.pod.key(a.nw))
	}
	defer lock.Close()
	unfinished, err := a.s.Dir.Unfinished(a.nw.Name, a.hash)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil
	case err != nil || !unfinished && !a.s.Died(ctx, a.nw.Name, a.hash):
		return existsAlready(a.pod.key(a.nw))
	case unfinished:
		a.s.Warn("an earlier ADD of this attachment was killed: undoing what it left")
	default:
		a.s.Warn("the pod of this attachment is gone, without a DEL: undoing what it left")
	}
	known := &Known{Bridge: a.nw.Bridge, GatewayLink: a.nw.GatewayLink(), Leased: a.leasing != nil}
	return a.node.teardown(a.s, a.nw.Name, known).Remains(ctx, a.pod.owner(), a.hash)
}

func existsAlready(k Key) error {
	return fail.Errorf(ErrExists, "container %s has an attachment %s to network %q already: DEL it first", k.ContainerID, k.IfName, k.Network)
}

// overtaken says that the attachment was deleted and added again while this ADD was at work.
// Port, elements and reservations go by the attachment, so they may be the other ADD's, and
// are not to be undone. What this one had made went by the DEL, or goes by the other ADD.
func (a *adding) overtaken() bool {
	if a.pending == nil {
		return false
	}
	if gone, _ := a.pending.Gone(); !gone {
		return false
	}
	_, err := a.s.Dir.Load(a.nw.Name, a.hash)
	return !errors.Is(err, fs.ErrNotExist)
}
