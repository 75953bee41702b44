package keeper

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/mdlayher/netlink"
	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/nl"
)

const (
	// A change is looked at when there was none for the first of these, and after the second
	// at the latest.
	pauseNews = 200 * time.Millisecond
	urgeNews  = 700 * time.Millisecond

	// The same if something was put right within the last minute. A reload of ufw runs a dozen
	// programs one after the other, and each undoes what is repaired before it. That is not on
	// purpose; pods need their rules when it is done.
	pauseAgain = 900 * time.Millisecond
	urgeAgain  = 5 * time.Second

	// pauseOwn is the same for what pods that come and go cause as well.
	pauseOwn = 3 * time.Second

	// again is when what failed is tried again.
	again = 10 * time.Second
)

// urgency is when news are looked at.
type urgency int

const (
	never urgency = iota
	later         // after pauseOwn
	soon          // when the burst is over
)

// vigil has a part of the kernel looked at: when its changes are announced, and once in a while.
type vigil struct {
	*Keeper
	ctx     context.Context
	listen  func() (source, error) // nil: nothing is announced
	hear    func([]netlink.Message) urgency
	visit   func() // looks, has put right what is to be, and says in due when to look again
	errors  prometheus.Counter
	subject string // of errors

	due   time.Time // of the next visit
	first time.Time // of the news that wait; zero: none do
	restraints
}

// source is what an nl.Feed is.
type source interface {
	Next() ([]netlink.Message, error)
	Close() error
}

func (v *vigil) run() {
	heard := make(chan []netlink.Message, 64)
	stop := v.follow(heard)
	defer stop()
	timer := time.NewTimer(0)
	defer timer.Stop()
	for v.ctx.Err() == nil {
		if !v.due.After(now()) {
			v.first = time.Time{}
			v.visit()
		}
		timer.Reset(max(v.due.Sub(now()), 0))
		select {
		case <-v.ctx.Done():
		case <-timer.C:
		case messages := <-heard:
			v.heard(messages)
		}
	}
}

// follow subscribes to changes until ctx is done; nil messages are that some were lost. Without a subscription, the
// looks that are made once in a while remain.
func (v *vigil) follow(heard chan<- []netlink.Message) (stop func()) {
	if v.listen == nil {
		return func() {}
	}
	s, err := v.listen()
	if err != nil {
		v.trouble("cannot hear of changes of "+v.subject+": looking once in a while", err)
		return func() {}
	}
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		for {
			messages, err := s.Next()
			if err != nil && !errors.Is(err, unix.ENOBUFS) && !errors.Is(err, nl.ErrMalformed) {
				return // it is closed, or as good as that
			}
			for i := range messages {
				messages[i].Data = bytes.Clone(messages[i].Data) // which the next ones overwrite
			}
			select {
			case heard <- messages:
			case <-v.ctx.Done():
				return
			}
		}
	}()
	return func() { _ = s.Close(); <-ended }
}

// heard has news looked at.
func (v *vigil) heard(messages []netlink.Message) {
	when := soon
	if len(messages) > 0 {
		when = v.hear(messages)
	}
	switch when {
	case soon:
		if v.first.IsZero() {
			v.first = now()
		}
		settle, urge := pauseNews, urgeNews
		if v.recently() {
			settle, urge = pauseAgain, urgeAgain
		}
		v.due = earliest(now().Add(settle), v.first.Add(urge))
	case later:
		v.due = earliest(now().Add(pauseOwn), v.due)
	}
}

// trouble reports what went wrong.
func (v *vigil) trouble(what string, err error, args ...any) {
	if v.ctx.Err() == nil { // that the keeper ends is no failure
		v.errors.Inc()
		v.log.Warn(what, append(args, "err", err)...)
	}
}

// reclaimEvery is how often the keeper looks for pods that died without a DEL. An ADD that
// lacks what they hold looks for itself.
const reclaimEvery = time.Minute

// newReclaim has what dead pods hold reclaimed, at once and then every minute.
func (k *Keeper) newReclaim(ctx context.Context) *vigil {
	v := &vigil{Keeper: k, ctx: ctx, errors: k.metrics.errors}
	said := ""
	v.visit = func() {
		v.due = now().Add(reclaimEvery)
		err := k.reclaim(ctx)
		text := ""
		if err != nil {
			text = err.Error()
		}
		if text != "" && text != said { // what cannot be helped is said once
			v.trouble("cannot reclaim all that dead pods hold", err)
		}
		said = text
	}
	return v
}

// reclaim takes down what pods hold that died without a DEL.
func (k *Keeper) reclaim(ctx context.Context) error {
	dead, err := k.network.CollectDead(ctx, "", false)
	errs := []error{err}
	for _, d := range dead {
		if d.Kept != nil {
			errs = append(errs, fmt.Errorf("%s of container %s in network %s: %w", d.IfName, d.ContainerID, d.Network, d.Kept))
			continue
		}
		k.metrics.reclaims.Inc()
		k.log.Info("reclaimed what a pod held that died without a DEL",
			"network", d.Network, "pod", d.Pod, "container", d.ContainerID, "interface", d.IfName, "why", d.Why)
	}
	k.metrics.deadLooks.Inc()
	return errors.Join(errs...)
}
