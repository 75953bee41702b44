package bandwidth

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"strconv"
	"time"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo"
	"github.com/tombolo-cni/tombolo/internal/diff"
	"github.com/tombolo-cni/tombolo/internal/link"
	"github.com/tombolo-cni/tombolo/internal/nl"
	"github.com/tombolo-cni/tombolo/internal/tc"
)

// Limit describes the limit for traffic in one direction.
type Limit struct {
	// Rate is the rate in bits per second, including Ethernet headers. 0 means no limit. The kernel counts bytes, so
	// the rate is rounded down to a multiple of 8.
	Rate uint64 `json:"rate,omitempty"`
	// Burst is the number of bits that may pass at once after a pause. If less than 8, Effective chooses it.
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
	// defaultBurst is the length of the default burst, as the time in which the rate sends it.
	defaultBurst = 5 * time.Millisecond
	// longestBurst is the length of the longest permitted burst, as the time in which the rate sends it. Container
	// runtimes may configure bursts of 2³¹ or 2³² bits. A limit of 10 Mbit/s would then have no effect for minutes.
	longestBurst = 50 * time.Millisecond
	// leastBurst is the shortest burst in full frames. With less than one frame, no full frame could pass. With two
	// frames, the traffic reaches its rate even if timers are late.
	leastBurst = 2

	// queueTime is the length of the queue, as the time in which the rate sends a full queue. leastQueue is the minimum
	// length of the queue in full frames, since TCP works badly with fewer frames at low rates.
	queueTime  = 15 * time.Millisecond
	leastQueue = 8

	// frameOverhead is the maximum number of bytes of a frame in addition to its MTU: the Ethernet header and a VLAN
	// tag.
	frameOverhead = 18
	// segmented is the maximum length in bytes, with headers, of a packet that is split into frames only when it is
	// sent (GSO). It is the default of gso_max_size plus room for headers.
	segmented = 65536 + 256

	// mostBytes is the upper limit for a burst and for a queue in bytes. It fits into the kernel's 32-bit fields.
	mostBytes = 1 << 31
)

// adjustment returns a text for the operator that explains why the effective burst differs from the configured one.
func adjustment(direction string, requested, effective Limit) string {
	if requested.Burst < effective.Burst {
		return fmt.Sprintf("%s burst of %d bit is shorter than two frames of full size, of which none could pass: %d "+
			"bit is used",
			direction, requested.Burst, effective.Burst)
	}

	sending := time.Duration(float64(requested.Burst) / float64(requested.Rate) * float64(time.Second))
	return fmt.Sprintf("%s burst of %d bit would defeat the rate: it is what %s takes %s to send; %d bit is used",
		direction, requested.Burst, formatRate(requested.Rate), sending.Round(time.Millisecond), effective.Burst)
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
// per second. Each limit with a rate has a burst, long enough to reach the rate, and short enough to limit it. For each
// configured burst that Effective changes, except by rounding, adjustments contains an explanation for the operator.
// Calling Effective on its own result, with the same MTU, changes nothing. Errors match tombolo.ErrInvalid.
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

// effective returns the limit that Ensure enforces. Its rate is in whole bytes. Its burst has at least leastBurst
// frames of the MTU in bytes, and is at most longestBurst, unless the frames need more.
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

	// The kernel queues a packet whole if it fits into the bucket. It splits longer packets into frames before it
	// queues them. So the queue needs room for the longest packet, but no more than the bucket has.
	longest := min(uint64(b.Burst), segmented)
	b.Limit = uint32(min(max(queue, longest), mostBytes))
	return b
}

// Check compares the state of a target in the kernel with the limits s, and returns the differences. Ensure repairs
// them, except a missing port and a link that is not our ifb. In a direction without a limit, a qdisc of another
// program is no difference.
func (c *Conn) Check(ctx context.Context, t Target, s Shape) ([]tombolo.Difference, error) {
	want, err := c.prepare(&t, s)
	var have *installation
	if err == nil {
		have, err = c.look(ctx, &t)
	}

	if errors.Is(err, fs.ErrNotExist) {
		return []tombolo.Difference{{Object: "port " + t.Port, What: "link", Want: t.Port}}, nil
	}

	if err != nil {
		return nil, err
	}

	found, port := diff.List{}, "port "+t.Port
	compareShaper(&found, port, "ingress shaper", want.Ingress, t.MTU, have.ingress)
	compareRedirect(&found, port, want.Egress.Rate != 0, &t, have)
	before := len(found)
	compareIFB(&found, "link "+t.IFB, want.Egress, &t, have)
	if have.ifb != nil && t.checkOwner(have.ifb) != nil {
		for i := range found[before:] {
			found[before+i].Remedy = tombolo.RemedyConfigure // Ensure would refuse this link
		}
	}

	return found, nil
}

// compareShaper compares a root qdisc with a limit, and adds the difference, if any, to list.
func compareShaper(list *diff.List, object, what string, want Limit, mtu int, have tc.Qdisc) {
	switch {
	case want.Rate == 0 && have.Ours():
		list.Add(object, what, "", describe(have))
	case want.Rate != 0 && !have.Is(want.bucket(mtu)):
		list.Add(object, what, describeBucket(want.bucket(mtu)), describe(have))
	}
}

// compareRedirect compares the filter at the port with the expected one, and adds the difference, if any, to list.
func compareRedirect(list *diff.List, object string, expected bool, t *Target, have *installation) {
	switch {
	case expected && len(have.own) == 0:
		list.Add(object, "filter", "to "+t.IFB, "")
	case expected && have.ifb != nil && !have.redirects():
		list.Add(object, "filter", "to "+t.IFB, "another")
	case !expected && len(have.own) > 0:
		list.Add(object, "filter", "", "to "+t.IFB)
	}
}

// compareIFB compares the ifb with the expected one, and adds the differences, if any, to list.
func compareIFB(list *diff.List, object string, want Limit, t *Target, have *installation) {
	switch {
	case have.ifb == nil && want.Rate != 0:
		list.Add(object, "link", t.IFB, "")
	case have.ifb == nil:
	case want.Rate == 0:
		if t.checkOwner(have.ifb) == nil {
			list.Add(object, "link", "", t.IFB)
		}
	case have.ifb.Kind != "ifb":
		list.Add(object, "kind", "ifb", strconv.Quote(have.ifb.Kind))
	default:
		list.Up(object, have.ifb.Up())
		list.Add(object, "alias", strconv.Quote(cmp.Or(t.Alias, have.ifb.Alias)), strconv.Quote(have.ifb.Alias))
		compareShaper(list, object, "egress shaper", want, t.MTU, have.egress)
	}
}

// describeBucket returns the parameters of a tbf in a format similar to the output of tc.
func describeBucket(w tc.Bucket) string {
	return fmt.Sprintf("tbf rate %s burst %db limit %db", formatRate(w.Rate*8), w.Burst, w.Limit)
}

// describe returns a short description of a root qdisc, or "" for the kernel's default qdisc.
func describe(q tc.Qdisc) string {
	switch {
	case q.Kind == "" || q.Handle == 0:
		return "" // the default, which the kernel may not even list
	case !q.Ours():
		return fmt.Sprintf("%s %x:", q.Kind, q.Handle>>16)
	case q.Peaked:
		return "tbf with a peak rate"
	default:
		return describeBucket(tc.Bucket{Rate: q.Rate, Burst: min(q.Burst(), mostBytes), Limit: q.Limit})
	}
}

// installation holds the state of a target in the kernel. Missing parts have zero values.
type installation struct {
	ifb    *link.Info // nil if no link has the name Target.IFB, or if Ensure must not change this link
	egress tc.Qdisc   // root qdisc of the ifb

	ingress tc.Qdisc // root qdisc of the port
	// place is the port's qdisc with the handle ffff:, to which filters attach. It is a clsact, or an ingress qdisc
	// of another program. Only one of them can exist.
	place tc.Qdisc
	// own lists the filters with our priority at the port's ingress, including other entries that u32 lists with
	// them.
	own []tc.Filter
	// others is the number of filters of other programs at the port. They would be lost if clsact were deleted.
	others int
}

// port returns the port in the form that package tc needs.
func (t *Target) port() tc.Device { return tc.Device{Name: t.Port, Index: t.PortIndex} }

// findPort looks up the port by name if t.PortIndex or t.MTU is zero. It sets t.PortIndex, and t.MTU if that is zero.
// If the port does not exist, the error matches fs.ErrNotExist.
func (c *Conn) findPort(t *Target) error {
	if t.PortIndex != 0 && t.MTU != 0 {
		return nil
	}
	l, err := link.Find(context.Background(), c.nl, t.Port, 0, unix.IFLA_MTU)
	if err != nil {
		return err
	}
	t.PortIndex = l.Index
	t.MTU = cmp.Or(t.MTU, l.MTU)
	return nil
}

// look reads the target's state. If the port has no clsact and the ifb does not exist, this takes one round trip. If
// the port does not exist, the error matches fs.ErrNotExist.
func (c *Conn) look(ctx context.Context, t *Target) (_ *installation, err error) {
	var have installation
	var ifb link.Info
	var b nl.Batch
	link.Get(&b, t.IFB, 0, &ifb)
	t.port().GetQdisc(&b, tc.Root, &have.ingress)
	t.port().GetQdisc(&b, tc.Clsact, &have.place)
	if err := tc.Look(ctx, c.nl, &b); err != nil {
		return nil, err
	}

	if err := b.Err(1); errors.Is(err, unix.ENODEV) {
		return nil, err
	}

	if b.Err(0) == nil {
		// The name does not show the owner: the ifb may belong to another program. The caller must check that.
		have.ifb = &ifb
		b.Reset()
		tc.Device{Name: t.IFB, Index: ifb.Index}.GetQdisc(&b, tc.Root, &have.egress)
		if err := tc.Look(ctx, c.nl, &b); err != nil {
			return nil, err
		}
	}

	if have.place.Kind == "" {
		// The port has no clsact, as is usual for a new port. So it has no filters to list.
		return &have, nil
	}

	have.own, have.others, err = t.port().Filters(ctx, c.nl, tc.Ingress, tc.Egress)
	return &have, err
}

// redirects reports whether exactly one filter sends all packets from the port to the ifb.
func (have *installation) redirects() bool {
	var n int
	for _, f := range have.own {
		// Skip the entries that u32 lists before the filter, for itself and for its hash table.
		if f.Handle&0xfff == 0 {
			continue
		}
		n++
		if f.Kind != "u32" || f.Protocol != unix.ETH_P_ALL || !f.MatchAll || have.ifb == nil ||
			f.Redirect != have.ifb.Index {
			return false
		}
	}

	return n == 1
}
