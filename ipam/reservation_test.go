package ipam

import (
	"net/netip"
	"strings"
	"testing"

	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
)

func TestReservationFilesAreUnderstood(t *testing.T) {
	t.Parallel()
	held := func(id, ifName, hash string) reservation {
		return reservation{Owner{id, ifName}, hash}
	}
	tests := map[string]struct {
		content string
		want    reservation
		state   reservationState
	}{
		"the reference's":          {"abc123\r\neth0", held("abc123", "eth0", ""), stateComplete},
		"without an interface":     {"abc123", reservation{}, stateForeign},
		"with space around":        {" abc123\r\neth0\n", held("abc123", "eth0", ""), stateComplete},
		"by hash":                  {"tombolo:0123456789a\r\n", held("", "", "0123456789a"), stateComplete},
		"by hash, with interface":  {"tombolo:0123456789a\r\neth0", held("", "", "0123456789a"), stateComplete},
		"by hash, no line break":   {"tombolo:0123456789a", held("", "", "0123456789a"), stateComplete},
		"empty":                    {"", reservation{}, stateTruncated},
		"white space":              {" \r\n", reservation{}, stateTruncated},
		"zero bytes":               {"\x00\x00\x00\x00", reservation{}, stateTruncated},
		"cut before the interface": {"abc123\r\n", reservation{}, stateForeign},
		"hash of no digits":        {"tombolo:\r\n", reservation{}, stateForeign},
		"hash in capitals":         {"tombolo:ABC\r\n", reservation{}, stateForeign},
		"not an ID":                {"hello world", reservation{}, stateForeign},
		"leading dot":              {".abc\r\neth0", reservation{}, stateForeign},
		"other line break":         {"abc123\neth0", reservation{}, stateForeign},
		"odd interface":            {"abc123\r\neth 0", reservation{}, stateForeign},
		"long interface":           {"abc123\r\n" + strings.Repeat("e", 16), reservation{}, stateForeign},
		"three lines":              {"abc123\r\neth0\r\nx", reservation{}, stateForeign},
		"space before the break":   {"abc123 \r\neth0", reservation{}, stateForeign},
		"too long":                 {strings.Repeat("a", maxReservation+1), reservation{}, stateForeign},
		"JSON":                     {`{"version":1}`, reservation{}, stateForeign},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			got, state := parseReservation([]byte(tt.content))
			expect.That(t, got == tt.want && state == tt.state,
				"got %+v, state %d; want %+v, state %d", got, state, tt.want, tt.state)
		})
	}
}

// FuzzReservation: what is held can be written again, and reads the same; and where it names a container, the reference
// would find it by the same container and interface.
func FuzzReservation(f *testing.F) {
	for _, content := range []string{"abc\r\neth0", "abc", "tombolo:0123456789a\r\n", "", "\x00", "abc\r", " a_b.c-d\r\nnet1\n"} {
		f.Add([]byte(content))
	}
	f.Fuzz(func(t *testing.T, content []byte) {
		held, state := parseReservation(content)
		if state != stateComplete {
			must.That(t, held == (reservation{}), "%q is not held, but gives %+v", content, held)
			return
		}
		again, state := parseReservation([]byte(held.content()))
		must.That(t, again == held && state == stateComplete, "%q gave %+v, and written again %+v", content, held, again)
		if held.hash == "" && strings.TrimSpace(string(content)) != held.content() {
			t.Fatalf("the reference would not find %q as %q", content, held.content())
		}
	})
}

// FuzzLast: the loader of last_reserved_ip takes anything, and reads what is written.
func FuzzLast(f *testing.F) {
	for _, content := range []string{"10.1.0.2", "fd00::1", "10.1.0.2\n", "", "10.1.0", "::ffff:10.1.0.2", "fe80::1%eth0", "\x00"} {
		f.Add([]byte(content))
	}
	f.Fuzz(func(t *testing.T, content []byte) {
		addr := parseLast(content)
		if !addr.IsValid() {
			return
		}
		must.That(t, !addr.Is4In6() && addr.Zone() == "", "%q gave %s", content, addr)
		again := parseLast([]byte(addr.String()))
		must.That(t, again == addr, "%q gave %s, and written again %s", content, addr, again)
		must.That(t, len(addr.String()) <= maxLast, "%s does not fit", addr)
	})
}

func TestLastReservedAddressesAreUnderstood(t *testing.T) {
	t.Parallel()
	for content, want := range map[string]netip.Addr{
		"10.1.0.2":        netip.MustParseAddr("10.1.0.2"),
		"fd00::1\n":       netip.MustParseAddr("fd00::1"),
		"::ffff:10.1.0.2": netip.MustParseAddr("10.1.0.2"),
		"":                {},
		"10.1.0":          {},
		"10.1.0.2x":       {},
		"fe80::1%eth0":    {},
	} {
		expect.Equal(t, parseLast([]byte(content)), want, "%q", content)
	}
}
