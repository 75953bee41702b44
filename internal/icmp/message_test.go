package icmp

import (
	"bytes"
	"encoding/hex"
	"strings"
	"testing"
	"time"

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

func encoded(tb testing.TB, m message, is4 bool) []byte {
	tb.Helper()
	return must.Of(m.encode(is4)).Get(tb)
}

func TestEchoHasTheBytesOfTheRFCs(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		name string
		is4  bool
		m    message
		want string
	}{
		{"IPv4 request", true, message{request, 0x1234, 1, []byte("AB")}, "0800 a488 1234 0001 4142"},
		{"IPv4 reply", true, message{reply, 0x1234, 1, []byte("AB")}, "0000 ac88 1234 0001 4142"},
		{"IPv6 request, whose sum is the kernel's", false, message{request, 0x1234, 1, []byte("AB")}, "8000 0000 1234 0001 4142"},
		{"IPv6 reply", false, message{reply, 0x1234, 1, nil}, "8100 0000 1234 0001"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			want := strings.ReplaceAll(tt.want, " ", "")
			expect.Equal(t, hex.EncodeToString(encoded(t, tt.m, tt.is4)), want)
		})
	}
}

func TestOnlyEchoesAreDecoded(t *testing.T) {
	t.Parallel()
	echo := message{kind: reply, id: 7, seq: 9, data: []byte("data")}
	v4, v6 := encoded(t, echo, true), encoded(t, echo, false)
	other := bytes.Clone(v6)
	other[0] = 135 // a neighbour solicitation
	coded := bytes.Clone(v6)
	coded[1] = 1
	for _, tt := range []struct {
		name   string
		packet []byte
		is4    bool
		ok     bool
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
		{"another type", other, false, false},
		{"a code, which no echo has", coded, false, false},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			got, ok := decode(tt.packet, tt.is4)
			must.That(t, ok == tt.ok, "ok is %t, want %t", ok, tt.ok)
			if ok && (got.kind != echo.kind || got.id != echo.id || got.seq != echo.seq || !bytes.Equal(got.data, echo.data)) {
				t.Errorf("got %+v, want %+v", got, echo)
			}
		})
	}
}

func TestOnlyTheAnswerIsTakenForIt(t *testing.T) {
	t.Parallel()
	p := &pinger{id: 5, data: []byte("token123")}
	p.sent = append(p.sent, time.Now(), time.Now()) // requests 0 and 1
	answer := message{kind: reply, id: 5, seq: 1, data: []byte("token123")}
	seq, ok := p.answered(encoded(t, answer, false))
	expect.That(t, ok && seq == 1, "the answer was taken for that of request %d, %t", seq, ok)
	for name, change := range map[string]func(*message){
		"the request itself":        func(m *message) { m.kind = request },
		"another's identifier":      func(m *message) { m.id++ },
		"a request not sent yet":    func(m *message) { m.seq = 2 },
		"another's data":            func(m *message) { m.data = []byte("token124") },
		"data that was cut short":   func(m *message) { m.data = m.data[:7] },
		"data with something added": func(m *message) { m.data = append(bytes.Clone(m.data), 0) },
	} {
		m := answer
		change(&m)
		_, ok := p.answered(encoded(t, m, false))
		expect.That(t, !ok, "%s was taken for the answer", name)
	}
}

// A machine that is busy with others may give no CPU until the time is up.
func TestAnswerThatIsThereCountsThoughTheTimeIsUp(t *testing.T) {
	t.Parallel()
	ends := must.Of(unix.Socketpair(unix.AF_UNIX, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)).Get(t)
	defer unix.Close(ends[0])
	defer unix.Close(ends[1])
	p := &pinger{fd: ends[0], id: 5, data: []byte("token123"), buf: make([]byte, packetMax)}
	expect.Is(t, expect.Err(p.try(t.Context(), 0)), ErrNoReply, "without an answer")
	other, answer := message{kind: reply, id: 6, data: p.data}, message{kind: reply, id: 5, seq: 1, data: p.data}
	for _, m := range []message{other, answer} {
		must.Succeed(t, unix.Send(ends[1], encoded(t, m, false), 0))
	}
	expect.Success(t, expect.Err(p.try(t.Context(), 0)), "with one")
}

func FuzzDecode(f *testing.F) {
	m := message{kind: request, id: 1, seq: 2, data: []byte("data")}
	f.Add(encoded(f, m, false), false)
	f.Add(append(header4(20), encoded(f, m, true)...), true)
	f.Fuzz(func(t *testing.T, packet []byte, is4 bool) {
		m, ok := decode(packet, is4)
		if !ok {
			return
		}
		// What is decoded is what was encoded, but for the checksum.
		again := encoded(t, m, is4)
		got := packet[len(packet)-len(again):]
		expect.That(t, got[0] == again[0] && got[1] == again[1] && bytes.Equal(got[4:], again[4:]),
			"%x was decoded to %+v", packet, m)
	})
}
