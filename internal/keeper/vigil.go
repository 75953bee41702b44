package keeper

import (
	"context"
	"errors"
	"time"

	"github.com/mdlayher/netlink"
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

// vigil has a part of the kernel looked at: when its changes are announced, as the kernel tells
// them, and once in a while. N is what one datagram of announcements tells.
type vigil[N any] struct {
	*Keeper
	ctx     context.Context
	listen  func() (source, error)
	read    func([]netlink.Message) (n N, some bool)
	lost    N                            // what is told if announcements were lost
	when    func(N) urgency              // says how soon visit has to be called after them
	visit   func()                       // looks, and has put right what is to be
	trouble func(what string, err error) // reports what went wrong
	subject string                       // of errors

	due   time.Time // of the next visit
	first time.Time // of the news that wait; zero: none do
	restraints
}

func (v *vigil[N]) run() {
	heard := make(chan N, 64)
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
		case n := <-heard:
			v.hear(n)
		}
	}
}

// follow subscribes to changes until ctx is done. Without that, the looks that are made
// once in a while remain. What is not heard in time is lost, which is news as well.
func (v *vigil[N]) follow(heard chan<- N) (stop func()) {
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
			n, some := v.read(messages)
			switch {
			case errors.Is(err, unix.ENOBUFS), errors.Is(err, nl.ErrMalformed):
				n = v.lost
			case err != nil:
				return // it is closed, or as good as that
			case !some:
				continue
			}
			select {
			case heard <- n:
			case <-v.ctx.Done():
				return
			}
		}
	}()
	return func() { _ = s.Close(); <-ended }
}

// hear has news looked at.
func (v *vigil[N]) hear(n N) {
	switch v.when(n) {
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
