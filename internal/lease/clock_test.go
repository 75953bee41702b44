package lease

import (
	"testing"
	"time"

	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
)

// boot is a Clock that tests change.
type boot struct {
	id string
	up time.Duration
}

func (b *boot) now() (string, time.Duration, error) { return b.id, b.up, nil }

func TestALeasesTimesAreFromTheBootWithinABootAndByTheWallClockInAnother(t *testing.T) {
	t.Parallel()
	const elapsed = 10 * time.Minute
	for name, c := range map[string]struct {
		now  boot
		left time.Duration // of an hour
	}{
		"at once":                       {boot{"a", 100 * time.Hour}, time.Hour},
		"later, or after a sleep":       {boot{"a", 100*time.Hour + elapsed}, time.Hour - elapsed},
		"after its end":                 {boot{"a", 102 * time.Hour}, 0},
		"in another boot":               {boot{"b", time.Second}, time.Hour},
		"in another that is up as long": {boot{"b", 100*time.Hour + elapsed}, time.Hour},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			d, clock := open(t), &boot{"a", 100 * time.Hour}
			d.Clock = clock.now
			r := sample()
			now := time.Now()
			r.Boot = "a"
			r.Lease.Obtained, r.Lease.Renew, r.Lease.Rebind, r.Lease.Expire = now, now.Add(30*time.Minute), now.Add(40*time.Minute), now.Add(time.Hour)
			r.Six.Lease.Obtained, r.Six.Lease.Renew, r.Six.Lease.Rebind, r.Six.Lease.Expire = now, now.Add(30*time.Minute), now.Add(40*time.Minute), now.Add(time.Hour)
			create(t, d, r)
			*clock = c.now
			got := must.Of(d.Load(r.Hash())).Get(t)
			for what, l := range map[string]interface{ Left(time.Time) time.Duration }{"lease": got.Lease, "DHCPv6 lease": got.Six.Lease} {
				left := l.Left(time.Now())
				expect.That(t, (left-c.left).Abs() <= time.Minute, "the %s has %v left, want %v", what, left, c.left)
			}
			if got.Lease.Renew.Sub(got.Lease.Obtained) != 30*time.Minute || r.Lease.Expire != now.Add(time.Hour) {
				t.Errorf("it became %+v", got.Lease)
			}
		})
	}
}
