package bandwidth

import (
	"cmp"
	"fmt"
	"strconv"
	"time"

	"github.com/tombolo-cni/tombolo"
	"github.com/tombolo-cni/tombolo/internal/tc"
)

// Limit bounds the traffic of one direction.
type Limit struct {
	// Rate is in bits per second, frames counted from their Ethernet header on; 0 is
	// no limit. Odd bits are dropped: the kernel counts in bytes.
	Rate uint64 `json:"rate,omitempty"`
	// Burst is how many bits may pass at once after a pause; 0 leaves the choice to
	// Effective.
	Burst uint64 `json:"burst,omitempty"`
}

// Shape is the limits of one pod, seen from the pod.
type Shape struct {
	Ingress Limit `json:"ingress,omitzero"` // of what the pod receives
	Egress  Limit `json:"egress,omitzero"`  // of what the pod sends
}

// IsZero says whether there is nothing to shape.
func (s Shape) IsZero() bool { return s.Ingress.Rate == 0 && s.Egress.Rate == 0 }

// The rates that can be, in bits per second: the kernel counts whole bytes, and the most is
// the bound that Kubernetes sets for its annotations.
const (
	minRate uint64 = 8
	maxRate uint64 = 1e15
)

const (
	// defaultBurst is the burst where none is given, as the time in which the rate sends it.
	defaultBurst = 5 * time.Millisecond
	// longestBurst bounds a burst that was given: with the value that a container runtime fills in (2³¹ or 2³²
	// bits), a limit of 10 Mbit/s would have no effect for minutes.
	longestBurst = 50 * time.Millisecond
	// leastBurst is in full frames. One is what it takes for any to pass; with two the
	// rate is reached although timers are late.
	leastBurst = 2

	// queueTime is how long a packet waits at most, and leastQueue, in full frames, what fits in any case: with
	// fewer TCP loses its way at low rates.
	queueTime  = 15 * time.Millisecond
	leastQueue = 8

	// frameOverhead is what a frame may have beside its MTU: the Ethernet header and a
	// VLAN tag.
	frameOverhead = 18
	// segmented is the longest packet that is cut into frames on its way out, not
	// before (the default of gso_max_size), with its headers.
	segmented = 65536 + 256

	// mostBytes is the longest burst and queue, in the 32 bits that the kernel has.
	mostBytes = 1 << 31
)

// adjustment says to the operator why a burst, in bits, is another.
func adjustment(direction string, asked, effective Limit) string {
	if asked.Burst < effective.Burst {
		return fmt.Sprintf("%s burst of %d bit is shorter than two frames of full size, of which none could pass: %d bit is used",
			direction, asked.Burst, effective.Burst)
	}
	return fmt.Sprintf("%s burst of %d bit would defeat the rate: it is what %s takes %s to send; %d bit is used",
		direction, asked.Burst, formatRate(asked.Rate), sendingTime(asked.Burst, asked.Rate), effective.Burst)
}

// sendingTime is how long a rate takes for so many bits, in a few digits.
func sendingTime(bits, rate uint64) string {
	seconds := float64(bits) / float64(rate)
	if seconds >= 1 {
		return strconv.FormatFloat(seconds, 'f', 0, 64) + " s"
	}
	return strconv.FormatFloat(seconds*1000, 'f', 0, 64) + " ms"
}

// formatRate writes a rate with the largest unit that keeps it whole.
func formatRate(rate uint64) string {
	units := []string{"bit/s", "kbit/s", "Mbit/s", "Gbit/s", "Tbit/s"}
	i := 0
	for i < len(units)-1 && rate != 0 && rate%1000 == 0 {
		rate /= 1000
		i++
	}
	return strconv.FormatUint(rate, 10) + " " + units[i]
}

// Effective gives the shape that Ensure installs on a port of an MTU, in bytes: rates
// in whole bytes, bursts that are set, reach the rate and do not defeat it. Of a burst
// that was given and could not stay the adjustments say why, to the operator. The effective shape
// of an effective shape is itself. Errors match tombolo.ErrInvalid.
func (s Shape) Effective(mtu int) (_ Shape, adjustments []string, _ error) {
	if mtu < 68 || mtu > 65535 {
		return Shape{}, nil, fmt.Errorf("%w: an MTU of %d bytes", tombolo.ErrInvalid, mtu)
	}
	for _, d := range []struct {
		name  string
		limit *Limit
	}{{"ingress", &s.Ingress}, {"egress", &s.Egress}} {
		asked := *d.limit
		if err := asked.validate(); err != nil {
			return Shape{}, nil, fmt.Errorf("%s: %w", d.name, err)
		}
		*d.limit = asked.effective(mtu)
		if asked.Burst/8 != 0 && asked.Burst/8 != d.limit.Burst/8 {
			adjustments = append(adjustments, adjustment(d.name, asked, *d.limit))
		}
	}
	return s, adjustments, nil
}

func (l Limit) validate() error {
	switch {
	case l.Rate == 0 && l.Burst != 0:
		return fmt.Errorf("%w: a burst of %d bit without a rate", tombolo.ErrInvalid, l.Burst)
	case l.Rate == 0:
		return nil
	case l.Rate < minRate:
		return fmt.Errorf("%w: a rate of %d bit/s, where %s is the least (rates are in bits per second)", tombolo.ErrInvalid, l.Rate, formatRate(minRate))
	case l.Rate > maxRate:
		return fmt.Errorf("%w: a rate of %d bit/s, where %s is the most; 0 means no limit", tombolo.ErrInvalid, l.Rate, formatRate(maxRate))
	}
	return nil
}

func (l Limit) effective(mtu int) Limit {
	if l.Rate == 0 {
		return Limit{}
	}
	rate := l.Rate / 8
	burst := cmp.Or(l.Burst/8, sentIn(rate, defaultBurst))
	burst = min(burst, sentIn(rate, longestBurst), mostBytes)
	burst = max(burst, leastBurst*frame(mtu))
	return Limit{Rate: rate * 8, Burst: burst * 8}
}

func frame(mtu int) uint64 { return uint64(mtu) + frameOverhead }

// sentIn is how many bytes a rate, in bytes per second, sends in a time. It does not
// overflow up to maxRate and a second.
func sentIn(rate uint64, d time.Duration) uint64 {
	return rate * uint64(d/time.Millisecond) / 1000
}

// bucket turns an effective limit into the kernel's terms.
func (l Limit) bucket(mtu int) tc.Bucket {
	b := tc.Bucket{Rate: l.Rate / 8, Burst: uint32(l.Burst / 8)}
	queue := max(sentIn(b.Rate, queueTime), leastQueue*frame(mtu))
	if uint64(b.Burst) < segmented {
		// Longer packets are cut into frames when they come.
		b.Limit = uint32(max(queue, uint64(b.Burst)))
		return b
	}
	// A packet that fits into the bucket is queued whole, and must find room.
	b.Limit = uint32(min(max(queue, segmented), mostBytes))
	return b
}
