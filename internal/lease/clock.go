package lease

import (
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/state"
)

// Clock tells the id of this boot, and how long ago it was; the time that the machine slept counts.
type Clock func() (boot string, up time.Duration, _ error)

// kernelClock goes by CLOCK_BOOTTIME.
func kernelClock() Clock {
	id := sync.OnceValues(state.BootID)
	return func() (string, time.Duration, error) {
		boot, err := id()
		return boot, state.Since(unix.CLOCK_BOOTTIME), err
	}
}

// A lease's times are on disk by the wall clock, with the time at which the machine booted by that
// same clock (Booted). Within that boot their distance from Booted counts, however the clock is set; in another boot
// the wall clock is all that there is. In memory they go by the process's monotonic clock.

// toDisk gives a record as its file is to have it.
func (d *Dir) toDisk(r *Record) (*Record, error) {
	_, up, err := d.Clock()
	if err != nil {
		return nil, err
	}
	now := time.Now()
	wall := now.Round(0).UTC()
	out := r.withTimes(func(t time.Time) time.Time { return wall.Add(t.Sub(now)) })
	out.Booted = wall.Add(-up)
	return out, nil
}

// fromDisk reads a record's file; see decode.
func (d *Dir) fromDisk(data []byte) (*Record, error) {
	r, err := decode(data)
	if err != nil {
		return nil, err
	}
	boot, up, err := d.Clock()
	if err != nil {
		return nil, err
	}
	booted := time.Now().Add(-up)
	from := r.Booted
	if r.Boot != boot || from.IsZero() {
		from = booted.Round(0)
	}
	return r.withTimes(func(t time.Time) time.Time { return booted.Add(t.Sub(from)) }), nil
}

// withTimes gives a copy of a record in which the times of leases are changed; the zero time stays.
func (r *Record) withTimes(change func(time.Time) time.Time) *Record {
	to := func(times ...*time.Time) {
		for _, t := range times {
			if !t.IsZero() {
				*t = change(*t)
			}
		}
	}
	out := *r
	if r.Lease != nil {
		l := *r.Lease
		to(&l.Obtained, &l.Renew, &l.Rebind, &l.Expire)
		out.Lease = &l
	}
	if r.Six == nil {
		return &out
	}
	six := *r.Six
	if six.Lease != nil {
		l := *six.Lease
		to(&l.Obtained, &l.Renew, &l.Rebind, &l.Preferred, &l.Expire)
		six.Lease = &l
	}
	if six.Information != nil {
		i := *six.Information
		to(&i.Until)
		six.Information = &i
	}
	out.Six = &six
	return &out
}

// TimeLeft says how long a lease of either family still runs.
func TimeLeft(l interface {
	Infinite() bool
	Left(time.Time) time.Duration
}, now time.Time) string {
	if l.Infinite() {
		return "for ever"
	}
	if d := l.Left(now); d > 0 {
		return d.Truncate(time.Second).String()
	}
	return "ended"
}
