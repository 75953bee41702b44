package bandwidth

import (
	"cmp"
	"fmt"
	"strconv"
	"time"

	"github.com/tombolo-cni/tombolo"
	"github.com/tombolo-cni/tombolo/internal/tc"
)

// Limit describes the limit for traffic in one direction.
type Limit struct {
	// Rate is the rate in bits per second, including Ethernet headers. 0 means no limit. The kernel counts bytes, so
	// the rate is rounded down to a multiple of 8.
	Rate uint64 `json:"rate,omitempty"`
	// Burst is the number of bits that may pass at once after a pause. If 0, Effective chooses it.
	Burst uint64 `json:"burst,omitempty"`
}

// Shape holds the limits for one pod. Ingress and egress are seen from the pod.
type Shape struct {
	Ingress Limit `json:"ingress,omitzero"` // for packets to the pod
	Egress  Limit `json:"egress,omitzero"`  // for packets from the pod
}

// IsZero reports whether both directions have no limit.
func (s Shape) IsZero() bool { return s.Ingress.Rate == 0 && s.Egress.Rate == 0 }

// minRate and maxRate are the lowest and the highest rate, in bits per second. The kernel counts whole bytes. maxRate
// is the limit of the bandwidth annotations of Kubernetes.
const (
	minRate uint64 = 8
	maxRate uint64 = 1e15
)

const (
	// defaultBurst is the time in which the rate sends the default burst.
	defaultBurst = 5 * time.Millisecond
	// longestBurst is the time in which the rate sends the longest permitted burst. Container runtimes may configure
	// bursts of 2³¹ or 2³² bits. A limit of 10 Mbit/s would then have no effect for minutes.
	longestBurst = 50 * time.Millisecond
	// leastBurst is the shortest burst in full frames. With less than one frame, no full frame could pass. With two
	// frames, the traffic reaches its rate even if timers are late.
	leastBurst = 2

	// queueTime is the time in which the rate sends a full queue. leastQueue is the minimum length of the queue in
	// full frames, since TCP works badly with fewer frames at low rates.
	queueTime  = 15 * time.Millisecond
	leastQueue = 8

	// frameOverhead is the maximum number of bytes of a frame in addition to its MTU: the Ethernet header and a VLAN
	// tag.
	frameOverhead = 18
	// segmented is the maximum length in bytes, with headers, of a packet that is split into frames only when it is
	// sent. It is the default of gso_max_size plus room for headers.
	segmented = 65536 + 256

	// mostBytes is the longest burst and the longest queue in bytes that fit into the kernel's 32-bit fields.
	mostBytes = 1 << 31
)

// adjustment returns a text for the operator that explains why the effective burst differs from the configured one.
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

// sendingTime returns the time in which the rate sends the given number of bits, as rounded text.
func sendingTime(bits, rate uint64) string {
	seconds := float64(bits) / float64(rate)
	if seconds >= 1 {
		return strconv.FormatFloat(seconds, 'f', 0, 64) + " s"
	}
	return strconv.FormatFloat(seconds*1000, 'f', 0, 64) + " ms"
}

// formatRate returns a rate in bits per second as text, in the largest unit that keeps it a whole number.
func formatRate(rate uint64) string {
	units := []string{"bit/s", "kbit/s", "Mbit/s", "Gbit/s", "Tbit/s"}
	i := 0
	for i < len(units)-1 && rate != 0 && rate%1000 == 0 {
		rate /= 1000
		i++
	}
	return strconv.FormatUint(rate, 10) + " " + units[i]
}

// Effective returns the limits that Ensure installs on a port with the given MTU in bytes. The rates are whole bytes
// per second. Bursts are always set, long enough to reach the rate, and short enough to limit it. For each configured
// burst that Effective changes, adjustments contains an explanation for the operator. Calling Effective on its own
// result changes nothing. Errors match tombolo.ErrInvalid.
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

// effective returns the limit with a rate of whole bytes and an effective burst, for an MTU in bytes.
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

// sentIn returns the number of bytes that a rate in bytes per second sends during d. It does not overflow for rates
// up to maxRate and times up to a second.
func sentIn(rate uint64, d time.Duration) uint64 {
	return rate * uint64(d/time.Millisecond) / 1000
}

// bucket converts an effective limit to the parameters of a tbf.
func (l Limit) bucket(mtu int) tc.Bucket {
	b := tc.Bucket{Rate: l.Rate / 8, Burst: uint32(l.Burst / 8)}
	queue := max(sentIn(b.Rate, queueTime), leastQueue*frame(mtu))
	if uint64(b.Burst) < segmented {
		// Packets longer than the bucket are split into frames before they are queued. So no packet needs more room
		// in the queue than the bucket has.
		b.Limit = uint32(max(queue, uint64(b.Burst)))
		return b
	}

	// The kernel queues a packet that fits into the bucket without splitting it, so the queue must have room for it.
	b.Limit = uint32(min(max(queue, segmented), mostBytes))
	return b
}
