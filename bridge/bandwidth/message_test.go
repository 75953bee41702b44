package bandwidth

import (
	"net"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/link"
	"github.com/tombolo-cni/tombolo/internal/nl"
	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/golden"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nltest"
)

// TestRequestBytes compares what is sent with a file that says for each request
// which ip-link(8) command it stands for.
func TestRequestBytes(t *testing.T) {
	t.Parallel()
	mac := net.HardwareAddr{2, 0, 0, 0, 0, 1}
	var text string
	for _, c := range []struct {
		command string
		append  func(*nl.Batch)
	}{
		{"ip link add ifbx address 02:00:00:00:00:01 mtu 1279 type ifb", func(b *nl.Batch) { addIFB(b, "ifbx", mac) }},
		{"ip link set ifbx alias whose", func(b *nl.Batch) { setAlias(b, "ifbx", "whose") }},
		{"ip link set 8 up", func(b *nl.Batch) {
			link.Request{Index: 8, Flags: unix.IFF_UP, Change: unix.IFF_UP}.Set(b, "set", "ifbx")
		}},
		{"ip link del 8", func(b *nl.Batch) { link.Request{Index: 8}.Delete(b, "ifbx") }},
		{"ip link del ifbx", func(b *nl.Batch) { link.Request{Name: "ifbx"}.Delete(b, "ifbx") }},
		{"ip link show ifbx", func(b *nl.Batch) { link.Get(b, "ifbx", 0, new(link.Info)) }},
	} {
		var b nl.Batch
		c.append(&b)
		text += "# " + c.command + "\n" + nltest.Text(unix.SizeofIfInfomsg, b.Bytes())
	}
	golden.Compare(t, "requests.golden", text)
}

// A packet that passes the bucket whole must find room in the queue, or it could
// never pass.
func TestQueueHoldsWhatTheBucketLetsThrough(t *testing.T) {
	t.Parallel()
	for rate := minRate; rate <= maxRate; rate *= 2 {
		for _, burst := range []uint64{0, 1, 1e6, 1 << 40} {
			for _, mtu := range []int{68, 1500, 9000, 65535} {
				s, _, err := Shape{Egress: Limit{Rate: rate, Burst: burst}}.Effective(mtu)
				must.Succeed(t, err)
				b := s.Egress.bucket(mtu)
				longest := min(b.Burst, segmented)
				must.That(t, b.Limit >= longest, "%d bit/s, burst %d, MTU %d: %v has no room for a packet of %d bytes", rate, burst, mtu, b, longest)
				must.That(t, b.Rate == rate/8 && uint64(b.Burst)*8 == s.Egress.Burst, "%+v became %v", s.Egress, b)
			}
		}
	}
}

func TestQueueIsShort(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		rate uint64
		want uint32
	}{
		{1e6, 8 * 1518},   // frames count: 97 ms, for want of shorter frames
		{10e6, 18750},     // 15 ms
		{1e9, 1875000},    // 15 ms
		{40e9, 75000000},  // 15 ms
		{1e15, mostBytes}, // what 32 bits hold
	} {
		s, _, err := Shape{Ingress: Limit{Rate: c.rate}}.Effective(1500)
		must.Succeed(t, err)
		expect.Equal(t, s.Ingress.bucket(1500).Limit, c.want, "at %d bit/s the queue is", c.rate)
	}
}

func TestRatesAreWrittenWithTheLargestUnit(t *testing.T) {
	t.Parallel()
	for rate, want := range map[uint64]string{
		0: "0 bit/s", 999: "999 bit/s", 1500: "1500 bit/s", 15000: "15 kbit/s", 1e9: "1 Gbit/s", 25e8: "2500 Mbit/s", 1e15: "1000 Tbit/s",
	} {
		expect.Equal(t, formatRate(rate), want, "%d is", rate)
	}
}
