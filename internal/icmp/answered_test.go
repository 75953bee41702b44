package icmp

import (
	"bytes"
	"net/netip"
	"os/exec"
	"testing"

	"golang.org/x/net/icmp"
	"golang.org/x/net/ipv4"
	"golang.org/x/net/ipv6"

	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/netns"
)

func echo(tb testing.TB, typ icmp.Type, id, seq int, data string) []byte {
	tb.Helper()
	b, err := (&icmp.Message{Type: typ, Body: &icmp.Echo{ID: id, Seq: seq, Data: []byte(data)}}).Marshal(nil)
	must.Succeed(tb, err)
	return b
}

// asked is a pinger that sent requests 0 and 1.
func asked(is4 bool) *pinger {
	p := &pinger{request: ipv6.ICMPTypeEchoRequest, reply: ipv6.ICMPTypeEchoReply, id: 5, data: []byte("token123"), sent: 2}
	if is4 {
		p.request, p.reply = ipv4.ICMPTypeEcho, ipv4.ICMPTypeEchoReply
	}
	return p
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
		{"IPv4", v4, true, true},
		{"IPv4 for IPv6", v4, false, false},
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
		expect.Equal(t, asked(tt.is4).isAnswer(tt.packet), tt.want, tt.name)
	}
}

// A machine that is busy with others may give no CPU until the time is up.
func TestAnswerThatIsThereCountsThoughTheTimeIsUp(t *testing.T) {
	ns := must.Of(netns.New()).Get(t)
	defer ns.Close()
	must.Succeed(t, ns.Do(func() error { return exec.Command("ip", "link", "set", "lo", "up").Run() }))
	p := asked(true)
	p.sent, p.IPConn = 0, must.Of(dial(ns, netip.MustParseAddr("127.0.0.1"), Echo{})).Get(t)
	defer p.Close()
	expect.Is(t, p.run(t.Context(), 0), ErrNoReply, "without an answer")
	must.Succeed(t, p.send())
	expect.Success(t, p.run(t.Context(), 0), "with one")
}

func FuzzAnswered(f *testing.F) {
	v6 := echo(f, ipv6.ICMPTypeEchoReply, 5, 1, "token123")
	f.Add(v6, false)
	f.Add(echo(f, ipv4.ICMPTypeEchoReply, 5, 1, "token123"), true)
	f.Fuzz(func(t *testing.T, packet []byte, is4 bool) {
		expect.That(t, !asked(is4).isAnswer(packet) || bytes.HasSuffix(packet, []byte("token123")), "%x was taken for the answer", packet)
	})
}
