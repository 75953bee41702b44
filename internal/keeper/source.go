package keeper

import (
	"bytes"
	"context"
	"errors"
	"slices"
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

	// The pauses for the firewall if it was repaired within the last minute. A reload of ufw runs a dozen programs one
	// after the other, and each undoes the repair before it. Pods need their rules when the reload is done.
	pauseAgain = 900 * time.Millisecond
	urgeAgain  = 5 * time.Second

	// pauseOwn is the same for what pods that come and go cause as well.
	pauseOwn = 3 * time.Second

	// again is when what failed is tried again.
	again = 10 * time.Second

	// lookWithin is how long one look may take, with the repairs that follow from it.
	lookWithin = time.Minute

	// mostNews is how many announcements wait while a worker looks: of more, it is known only that there were some.
	mostNews = 64
)

// urgency is when news are looked at.
type urgency int

const (
	never urgency = iota
	later         // after pauseOwn
	soon          // when the burst is over
)

// feed is what an nl.Feed is.
type feed interface {
	Next() ([]netlink.Message, error)
	Close() error
}

// source is something of the kernel that the loop has looked at when its changes are announced, and once in a while. One
// worker at most is at it, and all of it but news is that worker's meanwhile.
type source struct {
	*Keeper
	slot
	ctx    context.Context
	kind   string               // in logs and metrics
	every  time.Duration        // between two looks without news
	listen func() (feed, error) // nil: nothing is announced
	hear   func([]netlink.Message) urgency
	look   func(context.Context) // looks and has put right what is to be; it may set when to look again

	first    time.Time           // of the news that wait for a look; zero: none do
	news     [][]netlink.Message // what came while a worker was at it; nil messages: some were lost
	contests map[string]*contest // by what is put right by itself
}

// subscribe has a source's changes told to the loop until the context is done. Without a subscription, the looks that are
// made once in a while remain.
func (l *loop) subscribe(s *source) (stop func()) {
	if s.listen == nil {
		return func() {}
	}
	f, err := s.listen()
	if err != nil {
		s.trouble("cannot hear of changes of "+s.kind+": looking once in a while", err)
		return func() {}
	}
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		for {
			messages, err := f.Next()
			if err != nil && !errors.Is(err, unix.ENOBUFS) && !errors.Is(err, nl.ErrMalformed) {
				return // it is closed, or as good as that
			}
			for i := range messages {
				messages[i].Data = bytes.Clone(messages[i].Data) // which the next ones overwrite
			}
			select {
			case l.events <- func() { s.heard(messages) }:
			case <-l.ctx.Done():
				return
			}
		}
	}()
	return func() { _ = f.Close(); <-ended }
}

// heard has news looked at.
func (s *source) heard(messages []netlink.Message) {
	if s.busy {
		if len(s.news) == mostNews {
			s.news, messages = nil, nil
		}
		s.news = append(s.news, messages)
		return
	}
	when := soon
	if len(messages) > 0 {
		when = s.hear(messages)
	}
	switch when {
	case soon:
		if s.first.IsZero() {
			s.first = now()
		}
		settle, urge := pauseNews, urgeNews
		if s.kind == "firewall" && s.recently() {
			settle, urge = pauseAgain, urgeAgain
		}
		s.wake = earliest(now().Add(settle), s.first.Add(urge))
	case later:
		s.wake = earliest(now().Add(pauseOwn), s.wake)
	}
}

// work is one look, by a worker.
func (s *source) work() (end func()) {
	ctx, cancel := context.WithTimeout(s.ctx, lookWithin)
	defer cancel()
	s.first, s.wake = time.Time{}, now().Add(s.every)
	s.look(ctx)
	return func() {
		news := s.news
		s.news = nil
		for _, messages := range news {
			s.heard(messages)
		}
	}
}

// trouble reports what went wrong.
func (s *source) trouble(what string, err error, args ...any) {
	if s.ctx.Err() == nil { // that the keeper ends is no failure
		s.metrics.errors.WithLabelValues(s.kind).Inc()
		s.log.Warn(what, append(args, "err", err)...)
	}
}

// contest holds the recent repairs of a thing. If the keeper made the same repair three times within a minute, a person or
// a program undoes it on purpose, and from then on the keeper repairs once a minute. Nine different repairs count as much.
type contest struct {
	undone []repair  // within contestedFor
	times  int       // the same since it is contested; 0: it is not
	until  time.Time // it is left alone
}

// repair is one repair of a thing.
type repair struct {
	at   time.Time
	what string // the differences before it
}

const (
	// If the same, or anything, was put right so often within the time, it is left alone for as long.
	contestedAfter = 3
	contestedByAll = 9
	contestedFor   = time.Minute
)

// of gives the contest over a thing.
func (s *source) of(key string) *contest {
	c := s.contests[key]
	if c == nil {
		c = &contest{}
		s.contests[key] = c
	}
	return c
}

// recently reports whether anything was put right within the last minute.
func (s *source) recently() bool { return s.any((*contest).recently) }

func (s *source) any(is func(*contest) bool) bool {
	for _, c := range s.contests {
		if is(c) {
			return true
		}
	}
	return false
}

func (c *contest) recently() bool {
	n := len(c.undone)
	return n > 0 && now().Sub(c.undone[n-1].at) < contestedFor
}

func (c *contest) contested() bool { return c.times > 0 }

// putRight notes that a thing with these differences was put right. When that begins to be contested, it logs say.
func (s *source) putRight(key, what, say string, args ...any) (c *contest, begins bool) {
	c = s.of(key)
	c.undone = append(slices.DeleteFunc(c.undone, func(r repair) bool { return now().Sub(r.at) > contestedFor }), repair{now(), what})
	same := 0
	for _, r := range c.undone {
		if r.what == what {
			same++
		}
	}

	switch {
	case c.contested():
		c.times++
	case same < contestedAfter && len(c.undone) < contestedByAll:
		return c, false
	default:
		begins, c.times = true, len(c.undone)
		s.log.Error(say, append(args, "what", what)...)
	}
	c.until = now().Add(contestedFor)
	s.wake = earliest(s.wake, c.until)
	return c, begins
}

// calm is told that all is right, and says whether it was contested until now.
func (c *contest) calm() bool {
	was := c.contested()
	if was {
		c.times, c.undone = 0, nil
	}
	return was
}
