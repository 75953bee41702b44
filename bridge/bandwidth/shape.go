package bandwidth

import (
	"cmp"
	"fmt"
	"strconv"
	"time"

	"github.com/tombolo-cni/tombolo"
	"github.com/tombolo-cni/tombolo/internal/tc"
)

// Limit is the limit of the traffic in one direction.
type Limit struct {
	// Rate is in bits per second, with frames counted from their Ethernet header on. 0 means no limit. The kernel
	// counts in bytes, so it is rounded down to a multiple of 8.
	Rate uint64 `json:"rate,omitempty"`
	// Burst is the number of bits that may pass at once after a pause. With 0, Effective chooses it.
	Burst uint64 `json:"burst,omitempty"`
}

// Shape holds the limits of one pod, from the pod's point of view.
type Shape struct {
	Ingress Limit `json:"ingress,omitzero"` // for packets to the pod
	Egress  Limit `json:"egress,omitzero"`  // for packets from the pod
}

// IsZero reports whether there is no limit.
func (s Shape) IsZero() bool { return s.Ingress.Rate == 0 && s.Egress.Rate == 0 }

// Lowest and highest rate, in bits per second. The kernel counts whole bytes, and maxRate is the limit of Kubernetes'
// annotations.
const (
	minRate uint64 = 8
	maxRate uint64 = 1e15
)

const (
	// defaultBurst is the default burst, as the time in which the rate sends it.
	defaultBurst = 5 * time.Millisecond
	// longestBurst is the longest configured burst, as such a time. Container runtimes may fill in 2³¹ or 2³² bits,
	// and a limit of 10 Mbit/s would then have no effect for minutes.
	longestBurst = 50 * time.Millisecond
	// leastBurst is the shortest burst, in full frames. With less than one, no full frame could pass. With two, the
	// rate is reached although timers are late.
	leastBurst = 2

	// queueTime is the longest time that a packet waits. leastQueue is the minimum length of the queue, in full
	// frames, since TCP breaks down at low rates with fewer.
	queueTime  = 15 * time.Millisecond
	leastQueue = 8

	// frameOverhead is the maximum length of a frame beyond its MTU: the Ethernet header and a VLAN tag.
	frameOverhead = 18
	// segmented is the longest packet, with its headers, that is cut into frames only on its way out (the default of
	// gso_max_size).
	segmented = 65536 + 256

	// mostBytes is the longest burst and queue that the kernel's 32 bits can hold.
	mostBytes = 1 << 31
)

// adjustment returns an explanation for the operator why the effective burst, in bits, differs from the configured
// one.
func adjustment(direction string, requested, effective Limit) string {
	if requested.Burst < effective.Burst {
		return fmt.Sprintf("%s burst of %d bit is shorter than two frames of full size, of which none could pass: %d "+
			"bit is used",
			direction, requested.Burst, effective.Burst)
	}
	return fmt.Sprintf("%s burst of %d bit would defeat the rate: it is what %s takes %s to send; %d bit is used",
		direction, requested.Burst, formatRate(requested.Rate), sendingTime(requested.Burst, requested.Rate),
		effective.Burst)
}

// sendingTime returns how long a rate takes to send these bits, in a few digits.
func sendingTime(bits, rate uint64) string {
	seconds := float64(bits) / float64(rate)
	if seconds >= 1 {
		return strconv.FormatFloat(seconds, 'f', 0, 64) + " s"
	}
	return strconv.FormatFloat(seconds*1000, 'f', 0, 64) + " ms"
}

// formatRate returns a rate in the largest unit that keeps it a whole number.
func formatRate(rate uint64) string {
	units := []string{"bit/s", "kbit/s", "Mbit/s", "Gbit/s", "Tbit/s"}
	i := 0
	for i < len(units)-1 && rate != 0 && rate%1000 == 0 {
		rate /= 1000
		i++
	}
	return strconv.FormatUint(rate, 10) + " " + units[i]
}

// Effective returns the shape that Ensure installs on a port with this MTU in bytes. Its rates are whole bytes. Its
// bursts are set, long enough to reach the rate, and short enough not to defeat it. For each configured burst that it
// changes, adjustments has an explanation for the operator. Effective does not change a shape that it returned.
// Errors match tombolo.ErrInvalid.
func (s Shape) Effective(mtu int) (_ Shape, adjustments []string, _ error) {
	if mtu < 68 || mtu > 65535 {
		return Shape{}, nil, fmt.Errorf("%w: an MTU of %d bytes", tombolo.ErrInvalid, mtu)
	}

	for _, d := range []struct {
		name  string
		limit *Limit
	}{{"ingress", &s.Ingress}, {"egress", &s.Egress}} {
		requested := *d.limit
		if err := requested.validate(); err != nil {
			return Shape{}, nil, fmt.Errorf("%s: %w", d.name, err)
		}
		*d.limit = requested.effective(mtu)
		if requested.Burst/8 != 0 && requested.Burst/8 != d.limit.Burst/8 {
			adjustments = append(adjustments, adjustment(d.name, requested, *d.limit))
		}
	}

	return s, adjustments, nil
}

// validate returns an error if the limit is out of range.
func (l Limit) validate() error {
	switch {
	case l.Rate == 0 && l.Burst != 0:
		return fmt.Errorf("%w: a burst of %d bit without a rate", tombolo.ErrInvalid, l.Burst)
	case l.Rate == 0:
		return nil
	case l.Rate < minRate:
		return fmt.Errorf("%w: a rate of %d bit/s, where %s is the least (rates are in bits per second)",
			tombolo.ErrInvalid, l.Rate, formatRate(minRate))
	case l.Rate > maxRate:
		return fmt.Errorf("%w: a rate of %d bit/s, where %s is the most; 0 means no limit", tombolo.ErrInvalid, l.Rate,
			formatRate(maxRate))
	}

	return nil
}

// effective returns the limit with its effective burst.
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

// sentIn returns the number of bytes that a rate, in bytes per second, sends in a time. It cannot overflow up to
// maxRate and a second.
func sentIn(rate uint64, d time.Duration) uint64 {
	return rate * uint64(d/time.Millisecond) / 1000
}

// bucket converts an effective limit into the kernel's parameters.
func (l Limit) bucket(mtu int) tc.Bucket {
	b := tc.Bucket{Rate: l.Rate / 8, Burst: uint32(l.Burst / 8)}
	queue := max(sentIn(b.Rate, queueTime), leastQueue*frame(mtu))
	if uint64(b.Burst) < segmented {
		// Longer packets are cut into frames before they are queued.
		b.Limit = uint32(max(queue, uint64(b.Burst)))
		return b
	}

	// A packet that fits into the bucket is queued uncut, so the queue must hold it.
	b.Limit = uint32(min(max(queue, segmented), mostBytes))
	return b
}
