package keeper

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/nl"
	"github.com/tombolo-cni/tombolo/internal/trace"
)

const (
	// pauseNews is the time without further announcements after which the loop visits a source. Even if announcements
	// continue, the loop visits the source when urgeNews has passed since the first one.
	pauseNews = 200 * time.Millisecond
	urgeNews  = 700 * time.Millisecond

	// pauseAgain and urgeAgain replace pauseNews and urgeNews for the firewall if something was repaired within the
	// last minute. A reload of ufw runs a dozen programs one after the other, and each undoes the previous repairs.
	// With the longer pauses, the reload does not count as a contest: pods need their rules only when it has ended.
	pauseAgain = 900 * time.Millisecond
	urgeAgain  = 5 * time.Second

	// pauseOwn is the time from an announcement to the visit of its source. It is for kinds of changes that our own ADD
	// and DEL calls cause too.
	pauseOwn = 3 * time.Second

	// again is the pause after a failed repair, or a failed comparison of links.
	again = 10 * time.Second

	// lookWithin limits the duration of one visit to a source, including repairs.
	lookWithin = time.Minute

	// mostNews is the largest number of calls of receive whose announcements a source queues while a worker visits it.
	// If more come, the source drops them all and counts them as lost.
	mostNews = 64
)

// urgency determines the time from an announcement to the visit of a source. A higher value means earlier.
type urgency int

const (
	never urgency = iota
	later         // after pauseOwn
	soon          // after pauseNews or pauseAgain without further announcements
)

// feed is a subscription to announcements of changes, by the kernel or by firewalld. nl.Feed implements it for the
// kernel.
type feed interface {
	Next() ([]netlink.Message, error)
	Close() error
}

// source is a subject of the keeper's work besides leases, such as the firewall. The loop visits it after announcements
// of changes, and at regular intervals. At most one worker visits it at a time. During the visit all fields except news
// and busy belong to that worker.
type source struct {
	*Keeper
	slot
	ctx    context.Context
	kind   string               // the source's name in logs and metrics
	every  time.Duration        // the interval between visits without announcements
	listen func() (feed, error) // subscribes to announcements; nil if there are none for the source
	hear   func(netlink.Message) urgency
	look   func(context.Context) // compares and repairs; may set the time of the next visit

	failure  string              // the error of the last visit, for reportResult
	first    time.Time           // the time of the first announcement that waits for a visit; zero if none
	news     [][]netlink.Message // announcements that came during a visit; for an empty element see receive
	contests map[string]*contest // by the key of an object that is repaired separately
}

// subscribe delivers a source's announcements to the loop until the context is done, stop is called, or the feed fails.
// If the subscription cannot begin, subscribe logs the error. Without a feed only the regular visits remain.
func (l *loop) subscribe(s *source) (stop func()) {
	if s.listen == nil {
		return func() {}
	}

	f, err := s.listen()
	if err != nil {
		s.reportError("cannot hear of changes of "+s.kind+": looking at intervals", err)
		return func() {}
	}

	var reader sync.WaitGroup
	reader.Go(func() {
		for {
			messages, err := f.Next()
			if err != nil && !errors.Is(err, unix.ENOBUFS) && !errors.Is(err, nl.ErrMalformed) {
				return // the feed was closed, or cannot continue
			}

			for i := range messages {
				messages[i].Data = bytes.Clone(messages[i].Data) // the next messages overwrite it
			}
			select {
			case l.events <- func() { s.receive(messages) }:
			case <-l.ctx.Done():
				return
			}
		}
	})

	return func() { _ = f.Close(); reader.Wait() }
}

// receive schedules a visit to the source after announcements. During a visit it queues the announcements. An empty
// list has the urgency soon. It means that announcements were lost, that another source requests a visit, or that the
// feed has no messages (firewalld).
func (s *source) receive(messages []netlink.Message) {
	if s.busy {
		if len(s.news) == mostNews {
			s.news, messages = nil, nil
		}
		s.news = append(s.news, messages)
		return
	}

	when := never
	if len(messages) == 0 {
		when = soon
	}

	for _, m := range messages {
		when = max(when, s.hear(m))
	}

	switch when {
	case soon:
		if s.first.IsZero() {
			s.first = now()
		}
		settle, urge := pauseNews, urgeNews
		if s.kind == "firewall" && s.repairedRecently() {
			settle, urge = pauseAgain, urgeAgain
		}
		s.wake = trace.Earliest(now().Add(settle), s.first.Add(urge))
	case later:
		s.wake = trace.Earliest(now().Add(pauseOwn), s.wake)
	}
}

// work visits the source once. The returned function handles the announcements that were queued during the visit.
func (s *source) work() (end func()) {
	ctx, cancel := context.WithTimeout(s.ctx, lookWithin)
	defer cancel()
	s.first, s.wake = time.Time{}, now().Add(s.every)
	s.look(ctx)
	return func() {
		news := s.news
		s.news = nil
		for _, messages := range news {
			s.receive(messages)
		}
	}
}

// reportError counts an error of the source, and logs it. It ignores errors after the keeper's end.
func (s *source) reportError(what string, err error) {
	if s.ctx.Err() == nil { // the end of the keeper is no failure
		s.metrics.errors.WithLabelValues(s.kind).Inc()
		s.Log.Warn(what, "err", err)
	}
}

// reportResult counts and logs the error of a visit, unless the previous visit had the same error.
func (s *source) reportResult(what string, err error) {
	text := fmt.Sprint(err)
	if err != nil && text != s.failure {
		s.reportError(what, err)
	}
	s.failure = text
}

// contest counts repairs of one object, so that the keeper and another program do not undo each other's changes all the
// time. If a repair is undone several times within a minute, a person or a program must want the change. The object is
// then contested: the keeper repairs it only once a minute.
type contest struct {
	repairs []repair  // the repairs within the last contestedFor
	times   int       // the number of repairs in the contest; 0 if the object is not contested
	until   time.Time // no repair before this time
}

// repair describes one repair that the keeper made to an object.
type repair struct {
	at   time.Time
	what string // the differences before the repair
}

const (
	// An object is contested if, within contestedFor, it needed contestedAfter repairs of the same differences. It is
	// also contested if it needed contestedByAll repairs of any differences in that time. A contested object is
	// repaired again only after contestedFor has passed.
	contestedAfter = 3
	contestedByAll = 9
	contestedFor   = time.Minute
)

// contestOver returns the contest of the object with the given key, and creates it if necessary.
func (s *source) contestOver(key string) *contest {
	c := s.contests[key]
	if c == nil {
		c = &contest{}
		s.contests[key] = c
	}
	return c
}

// repairedRecently reports whether any object of the source was repaired within the last minute.
func (s *source) repairedRecently() bool { return s.anyContest((*contest).repairedRecently) }

func (s *source) anyContest(is func(*contest) bool) bool {
	return slices.ContainsFunc(slices.Collect(maps.Values(s.contests)), is)
}

func (c *contest) repairedRecently() bool {
	n := len(c.repairs)
	return n > 0 && now().Sub(c.repairs[n-1].at) < contestedFor
}

func (c *contest) isContested() bool { return c.times > 0 }

// recordRepair records a repair of the object with the given key. what describes the repaired differences. If the
// object is now contested (see contest), recordRepair schedules the next repair. If this repair made the object
// contested, begins is true, and recordRepair logs the message say with args.
func (s *source) recordRepair(key, what, say string, args ...any) (c *contest, begins bool) {
	c = s.contestOver(key)
	c.repairs = append(slices.DeleteFunc(c.repairs, func(r repair) bool { return now().Sub(r.at) > contestedFor }),
		repair{now(), what})
	same := 0
	for _, r := range c.repairs {
		if r.what == what {
			same++
		}
	}

	switch {
	case c.isContested():
		c.times++
	case same < contestedAfter && len(c.repairs) < contestedByAll:
		return c, false
	default:
		begins, c.times = true, len(c.repairs)
		s.Log.Error(say, append(args, "what", what)...)
	}

	c.until = now().Add(contestedFor)
	s.wake = trace.Earliest(s.wake, c.until)
	return c, begins
}

// end ends a contest, because the object no longer differs from the records. It reports whether the object was
// contested.
func (c *contest) end() bool {
	was := c.isContested()
	if was {
		c.times, c.repairs = 0, nil
	}
	return was
}
