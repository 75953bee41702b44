package icmp

import (
	"bytes"
	"testing"
	"time"

	"golang.org/x/net/icmp"
	"golang.org/x/net/ipv4"
	"golang.org/x/net/ipv6"
	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
)

// header4 is an IPv4 header of so many bytes, as far as it is looked at.
func header4(length int) []byte {
	h := make([]byte, length)
	h[0] = 4<<4 | byte(length/4)
	return h
}

func echo(tb testing.TB, typ icmp.Type, id, seq int, data string) []byte {
	tb.Helper()
	b, err := (&icmp.Message{Type: typ, Body: &icmp.Echo{ID: id, Seq: seq, Data: []byte(data)}}).Marshal(nil)
	must.Succeed(tb, err)
	return b
}

// asked is a pinger that sent requests 0 and 1.
func asked(is4 bool) *pinger {
	return &pinger{is4: is4, id: 5, data: []byte("token123"), sent: []time.Time{time.Now(), time.Now()}}
}

func TestOnlyTheAnswerIsTakenForIt(t *testing.T) {
	t.Parallel()
	const reply4, reply6, token = ipv4.ICMPTypeEchoReply, ipv6.ICMPTypeEchoReply, "token123"
	v4, v6 := echo(t, reply4, 5, 1, token), echo(t, reply6, 5, 1, token)
	for _, tt := range []struct {
		name   string
		packet []byte
		is4    bool
		want   bool
	}{
		{"IPv6", v6, false, true},
		{"IPv4", append(header4(20), v4...), true, true},
		{"IPv4 with options", append(header4(24), v4...), true, true},
		{"IPv4 whose header is longer than the packet", header4(24)[:20], true, false},
		{"IPv4 whose header is too short to be one", append(header4(16), v4...), true, false},
		{"IPv4 without a message", header4(20), true, false},
		{"IPv6 cut short", v6[:7], false, false},
		{"nothing, IPv4", nil, true, false},
		{"nothing, IPv6", nil, false, false},
		{"the request itself", echo(t, ipv6.ICMPTypeEchoRequest, 5, 1, token), false, false},
		{"another's identifier", echo(t, reply6, 6, 1, token), false, false},
		{"a request not sent yet", echo(t, reply6, 5, 2, token), false, false},
		{"another's data", echo(t, reply6, 5, 1, "token124"), false, false},
		{"data that was cut short", echo(t, reply6, 5, 1, token[:7]), false, false},
		{"data with something added", echo(t, reply6, 5, 1, token+"4"), false, false},
	} {
		if seq, ok := asked(tt.is4).answered(tt.packet); ok != tt.want || ok && seq != 1 {
			t.Errorf("%s was taken for the answer to request %d, %t", tt.name, seq, ok)
		}
	}
}

// A machine that is busy with others may give no CPU until the time is up.
func TestAnswerThatIsThereCountsThoughTheTimeIsUp(t *testing.T) {
	t.Parallel()
	ends, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	must.Succeed(t, err)
	defer unix.Close(ends[0])
	defer unix.Close(ends[1])
	p := &pinger{fd: ends[0], id: 5, data: []byte("token123"), buf: make([]byte, packetMax)}
	expect.Is(t, expect.Err(p.try(t.Context(), 0)), ErrNoReply, "without an answer")
	for id := range 2 {
		must.Succeed(t, unix.Send(ends[1], echo(t, ipv6.ICMPTypeEchoReply, 6-id, id, "token123"), 0))
	}
	expect.Success(t, expect.Err(p.try(t.Context(), 0)), "with one")
}

func FuzzAnswered(f *testing.F) {
	v6 := echo(f, ipv6.ICMPTypeEchoReply, 5, 1, "token123")
	f.Add(v6, false)
	f.Add(append(header4(20), echo(f, ipv4.ICMPTypeEchoReply, 5, 1, "token123")...), true)
	f.Fuzz(func(t *testing.T, packet []byte, is4 bool) {
		_, ok := asked(is4).answered(packet)
		expect.That(t, !ok || bytes.HasSuffix(packet, []byte("token123")), "%x was taken for the answer", packet)
	})
}
