package lease

import (
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/state"
)

// Clock returns the kernel's boot id and the time since the boot. The time includes suspensions.
type Clock func() (boot string, up time.Duration, _ error)

// kernelClock returns a Clock that reads CLOCK_BOOTTIME.
func kernelClock() Clock {
	id := sync.OnceValues(state.BootID)
	return func() (string, time.Duration, error) {
		boot, err := id()
		return boot, state.Since(unix.CLOCK_BOOTTIME), err
	}
}

// In a record's file, a lease's times are wall clock times. The file also has the time of the boot by the same clock
// (Booted). Within that boot only the difference between a time and Booted counts, so setting the clock does no harm.
// In another boot there is nothing but the wall clock. In memory, times follow the process's monotonic clock.

// toDisk returns a copy of the record with its times converted for the record's file.
func (d *Store) toDisk(r *Record) (*Record, error) {
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

// fromDisk decodes a record's file, and converts its times. It returns the same errors as decode.
func (d *Store) fromDisk(data []byte) (*Record, error) {
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

// withTimes returns a copy of the record. change converts all times of the leases in the copy, except for zero times.
func (r *Record) withTimes(change func(time.Time) time.Time) *Record {
	to := func(times ...*time.Time) {
		for _, t := range times {
			if !t.IsZero() {
				*t = change(*t)
			}
		}
	}

	out := *r
	out.Lease, out.Six = clone(r.Lease), clone(r.Six)
	if l := out.Lease; l != nil {
		to(&l.Obtained, &l.Renew, &l.Rebind, &l.Expire)
	}

	if out.Six == nil {
		return &out
	}

	out.Six.Lease, out.Six.Information = clone(out.Six.Lease), clone(out.Six.Information)
	if l := out.Six.Lease; l != nil {
		to(&l.Obtained, &l.Renew, &l.Rebind, &l.Preferred, &l.Expire)
	}
	if i := out.Six.Information; i != nil {
		to(&i.Until)
	}
	return &out
}

// clone returns a copy of *p, or nil if p is nil.
func clone[T any](p *T) *T {
	if p == nil {
		return nil
	}
	return new(*p)
}

// TimeLeft returns the remaining time of a DHCPv4 or DHCPv6 lease as text.
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
