package addr

import (
	"errors"
	"net/netip"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/tombolo-cni/tombolo/internal/nl"
	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
)

// option pads what stands behind an option's type and length to its length.
func option(typ byte, lifetime byte, data string) string {
	b := []byte{typ, 0, 0, 0, 0, 0, 0, lifetime}
	b = append(b, data...)
	for len(b)%optionUnit != 0 {
		b = append(b, 0)
	}
	b[1] = byte(len(b) / optionUnit)
	return string(b)
}

func TestOptionsThatMakeNoSenseArePassedOver(t *testing.T) {
	t.Parallel()
	const home = "\x04home\x07example\x00"
	server := string(netip.MustParseAddr("2001:db8::53").AsSlice())
	long := strings.Repeat("\x3f"+strings.Repeat("a", 63), 4)
	for _, tt := range []struct {
		name    string
		options string
		want    nameService
	}{
		{"nothing", "", nameService{}},
		{"an option of no length", "\x1f\x00" + option(optionSearch, 1, home), nameService{}},
		{"an option that is longer than all", "\x1f\x09\x00\x00\x00\x00\x00\x01" + home, nameService{}},
		{"an option that is cut short", option(optionSearch, 1, home)[:9], nameService{}},
		{"another option first", option(37, 1, "https://portal") + option(optionSearch, 1, home), nameService{search: []string{"home.example"}}},
		{"no names", option(optionSearch, 1, ""), nameService{}},
		{"a name without an end", option(optionSearch, 1, "\x07example"), nameService{}},
		{"a name whose label is longer than the option", option(optionSearch, 1, "\x20example"), nameService{}},
		{"a compressed name", option(optionSearch, 1, "\xc0\x04"+home), nameService{}},
		{"a name with a line break between two", option(optionSearch, 1, home+"\x0ea\nnameserver b\x00\x03lan\x00"), nameService{search: []string{"home.example", "lan"}}},
		{"a name with a dot in a label", option(optionSearch, 1, "\x03a.b\x00"), nameService{}},
		{"a name that is too long", option(optionSearch, 1, long+"\x00"+home), nameService{search: []string{"home.example"}}},
		{"a name twice", option(optionSearch, 1, home+home), nameService{search: []string{"home.example"}}},
		{"a server's address that is cut short", option(optionServers, 1, server[:8]), nameService{}},
		{"servers that nobody can be", option(optionServers, 1, string(make([]byte, 16))+server+"\xff\x02"+server[2:]+string(netip.IPv6Loopback().AsSlice())),
			nameService{servers: []netip.Addr{netip.MustParseAddr("2001:db8::53")}}},
		{"a server that is unknown and goes", option(optionServers, 0, server), nameService{}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			var got nameService
			got.update([]byte(tt.options))
			expect.NoDiff(t, cmp.Diff(tt.want, got, cmp.AllowUnexported(nameService{}), cmpopts.EquateComparable(netip.Addr{}), cmpopts.EquateEmpty()))
		})
	}
}

// FuzzUserOptions reads what might be an announcement.
// Its seeds are what a kernel sent.
func FuzzUserOptions(f *testing.F) {
	f.Fuzz(func(t *testing.T, data []byte) {
		_, options, err := decodeUserOptions(data)
		wantMalformed(t, err)
		must.That(t, len(options) <= len(data), "%d bytes of options in %d", len(options), len(data))
		var n nameService
		n.update(options)
		for _, d := range n.search {
			expect.That(t, d != "" && len(d) <= 253 && !strings.ContainsAny(d, " \t\r\n#;\x00"), "search domain %q", d)
		}
		for _, s := range n.servers {
			expect.That(t, s.IsGlobalUnicast() || s.IsLinkLocalUnicast(), "server %s", s)
		}
	})
}

func wantMalformed(t *testing.T, err error) {
	t.Helper()
	must.That(t, err == nil || errors.Is(err, nl.ErrMalformed), "%v is not %v", err, nl.ErrMalformed)
}
