package ipam

import (
	"errors"
	"iter"
	"math"
	"net/netip"
	"strings"
	"testing"

	"github.com/tombolo-cni/tombolo"
	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
)

func mustPool(t *testing.T, sets string) pool {
	t.Helper()
	return must.Of(newPool(rangesOf(t, sets))).Get(t)
}

func TestRangesHaveDefaults(t *testing.T) {
	t.Parallel()
	tests := map[string]struct {
		conf string
		want string // start end gateway
	}{
		"IPv4":             {`{"subnet":"10.1.0.0/24"}`, "10.1.0.1 10.1.0.254 10.1.0.1"},
		"IPv6":             {`{"subnet":"fd00:1::/64"}`, "fd00:1::1 fd00:1::ffff:ffff:ffff:ffff fd00:1::1"},
		"smallest IPv4":    {`{"subnet":"10.1.0.4/30"}`, "10.1.0.5 10.1.0.6 10.1.0.5"},
		"smallest IPv6":    {`{"subnet":"fd00::4/126"}`, "fd00::5 fd00::7 fd00::5"},
		"whole of IPv4":    {`{"subnet":"0.0.0.0/0"}`, "0.0.0.1 255.255.255.254 0.0.0.1"},
		"odd prefix":       {`{"subnet":"10.1.0.0/19"}`, "10.1.0.1 10.1.31.254 10.1.0.1"},
		"all given":        {`{"subnet":"10.1.0.0/24","rangeStart":"10.1.0.10","rangeEnd":"10.1.0.20","gateway":"10.1.0.254"}`, "10.1.0.10 10.1.0.20 10.1.0.254"},
		"network address":  {`{"subnet":"10.1.0.0/24","rangeStart":"10.1.0.0","rangeEnd":"10.1.0.255"}`, "10.1.0.0 10.1.0.255 10.1.0.1"},
		"foreign gateway":  {`{"subnet":"10.1.0.0/24","gateway":"169.254.1.1"}`, "10.1.0.1 10.1.0.254 169.254.1.1"},
		"mapped notation":  {`{"subnet":"10.1.0.0/24","rangeStart":"::ffff:10.1.0.9"}`, "10.1.0.9 10.1.0.254 10.1.0.1"},
		"empty addresses":  {`{"subnet":"10.1.0.0/24","rangeStart":"","gateway":""}`, "10.1.0.1 10.1.0.254 10.1.0.1"},
		"a single address": {`{"subnet":"10.1.0.0/24","rangeStart":"10.1.0.9","rangeEnd":"10.1.0.9"}`, "10.1.0.9 10.1.0.9 10.1.0.1"},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := mustPool(t, "["+tt.conf+"]")[0].Ranges[0]
			got := strings.Join([]string{r.RangeStart.String(), r.RangeEnd.String(), r.Gateway.String()}, " ")
			expect.Equal(t, got, tt.want)
		})
	}
}

func TestBadRangesAreExplained(t *testing.T) {
	t.Parallel()
	tests := map[string]struct {
		sets, want string
	}{
		"empty set":        {`[]`, `ranges[0] is an empty list of ranges`},
		"no subnet":        {`[{"rangeStart":"10.1.0.2"}]`, `ranges[0][0]: "subnet" is required`},
		"host bits":        {`[{"subnet":"10.1.0.7/24"}]`, `ranges[0][0]: subnet 10.1.0.7/24 has host bits set: the network is 10.1.0.0/24`},
		"/31":              {`[{"subnet":"10.1.0.0/31"}]`, `subnet 10.1.0.0/31 is too small to allocate from`},
		"/32":              {`[{"subnet":"10.1.0.0/32"}]`, `too small`},
		"/127":             {`[{"subnet":"fd00::/127"}]`, `too small`},
		"mapped subnet":    {`[{"subnet":"::ffff:10.1.0.0/120"}]`, `subnet ::ffff:10.1.0.0/120 is an IPv4 network in IPv6 notation`},
		"start outside":    {`[{"subnet":"10.1.0.0/24","rangeStart":"10.2.0.1"}]`, `rangeStart 10.2.0.1 is not in subnet 10.1.0.0/24`},
		"end outside":      {`[{"subnet":"10.1.0.0/24","rangeEnd":"10.2.0.1"}]`, `rangeEnd 10.2.0.1 is not in subnet 10.1.0.0/24`},
		"end before start": {`[{"subnet":"10.1.0.0/24","rangeStart":"10.1.0.9","rangeEnd":"10.1.0.8"}]`, `rangeEnd 10.1.0.8 is before rangeStart 10.1.0.9`},
		"end before default start": {
			`[{"subnet":"10.1.0.0/24","rangeEnd":"10.1.0.0"}]`, `rangeEnd 10.1.0.0 is before rangeStart 10.1.0.1`,
		},
		"gateway's family": {`[{"subnet":"10.1.0.0/24","gateway":"fd00::1"}]`, `gateway fd00::1 is not of the family of subnet 10.1.0.0/24`},
		"zone":             {`[{"subnet":"fe80::/64","gateway":"fe80::1%eth0"}]`, `gateway fe80::1%eth0 has a zone`},
		"mixed families": {
			`[{"subnet":"10.1.0.0/24"},{"subnet":"fd00::/64"}]`,
			`ranges[0] mixes IPv4 and IPv6: put 10.1.0.0/24 and fd00::/64 into sets of their own`,
		},
		"overlap in a set": {
			`[{"subnet":"10.1.0.0/24"},{"subnet":"10.1.0.0/25"}]`, `ranges[0]: ranges 10.1.0.0/24 and 10.1.0.0/25 overlap`,
		},
		"overlap of sets": {
			`[{"subnet":"10.1.0.0/24","rangeStart":"10.1.0.100"}],[{"subnet":"10.0.0.0/8"}]`,
			`range 10.1.0.100-10.1.0.254 of 10.1.0.0/24 in ranges[0] overlaps range 10.0.0.0/8 in ranges[1]`,
		},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			wantError(t, expect.Err(newPool(rangesOf(t, tt.sets))), tombolo.ErrInvalid, tt.want)
		})
	}
}

func TestSizeLeavesOutGateways(t *testing.T) {
	t.Parallel()
	tests := map[string]struct {
		sets string
		want uint64
	}{
		"/24":                             {`[{"subnet":"10.1.0.0/24"}]`, 253},
		"/30":                             {`[{"subnet":"10.1.0.0/30"}]`, 1},
		"gateway outside of the range":    {`[{"subnet":"10.1.0.0/24","rangeStart":"10.1.0.10","rangeEnd":"10.1.0.19"}]`, 10},
		"only the gateway":                {`[{"subnet":"10.1.0.0/24","rangeEnd":"10.1.0.1"}]`, 0},
		"two ranges":                      {`[{"subnet":"10.1.0.0/30"},{"subnet":"10.2.0.0/29"}]`, 6},
		"gateway of one inside the other": {`[{"subnet":"10.1.0.0/24","rangeEnd":"10.1.0.9"},{"subnet":"10.1.0.0/24","rangeStart":"10.1.0.10","gateway":"10.1.0.2"}]`, 8 - 1 + 245},
		"/64":                             {`[{"subnet":"fd00::/64"}]`, math.MaxUint64 - 1},
		"/48":                             {`[{"subnet":"fd00::/48"}]`, math.MaxUint64 - 1},
		"two of them":                     {`[{"subnet":"fd00::/48"},{"subnet":"fd01::/48"}]`, math.MaxUint64},
		"over a 64-bit border":            {`[{"subnet":"fd00::/48","rangeStart":"fd00::ffff:ffff:ffff:fff0","rangeEnd":"fd00:0:0:1::f"}]`, 32},
		"a whole half, over the border":   {`[{"subnet":"fd00::/48","rangeStart":"fd00::8","rangeEnd":"fd00:0:0:1::7"}]`, math.MaxUint64},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			p := mustPool(t, tt.sets)
			expect.Equal(t, p[0].size(p), tt.want)
		})
	}
}

func TestCursorGoesRoundOnce(t *testing.T) {
	t.Parallel()
	const two = `[{"subnet":"10.1.0.0/30","gateway":"10.1.0.2"},{"subnet":"10.2.0.0/29","rangeStart":"10.2.0.3","rangeEnd":"10.2.0.4"}]`
	tests := map[string]struct{ sets, last, want string }{
		"from the beginning":        {two, "", "10.1.0.1 10.2.0.3 10.2.0.4"},
		"last is not in the set":    {two, "10.9.0.1", "10.1.0.1 10.2.0.3 10.2.0.4"},
		"last of another family":    {two, "fd00::1", "10.1.0.1 10.2.0.3 10.2.0.4"},
		"after last, and last last": {two, "10.2.0.3", "10.2.0.4 10.1.0.1 10.2.0.3"},
		"after a range's end":       {two, "10.1.0.2", "10.2.0.3 10.2.0.4 10.1.0.1"},
		"after the end":             {two, "10.2.0.4", "10.1.0.1 10.2.0.3 10.2.0.4"},
		"first is the gateway":      {`[{"subnet":"10.1.0.0/29","rangeEnd":"10.1.0.3"}]`, "", "10.1.0.2 10.1.0.3"},
		"last is before a gateway":  {`[{"subnet":"10.1.0.0/29","rangeEnd":"10.1.0.4","gateway":"10.1.0.3"}]`, "10.1.0.2", "10.1.0.4 10.1.0.1 10.1.0.2"},
		"only a gateway":            {`[{"subnet":"10.1.0.0/29","rangeEnd":"10.1.0.1"}]`, "", ""},
		"one address":               {`[{"subnet":"10.1.0.0/30"}]`, "10.1.0.2", "10.1.0.2"},
		"the end of all addresses":  {`[{"subnet":"255.255.255.252/30","rangeEnd":"255.255.255.255"}]`, "255.255.255.255", "255.255.255.254 255.255.255.255"},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			p := mustPool(t, tt.sets)
			last, _ := netip.ParseAddr(tt.last)
			var got []string
			for addr := range p[0].after(last, p) {
				expect.That(t, p[0].rangeOf(addr) != nil, "%s is in no range of %s", addr, p[0].text())
				if got = append(got, addr.String()); len(got) == 100 {
					break
				}
			}
			expect.Equal(t, strings.Join(got, " "), tt.want, "got %q, want %q", got, tt.want)
		})
	}
}

// FuzzRange: any subnet and bounds either give an error or a range that lies in the subnet, and of which each address
// is given once.
func FuzzRange(f *testing.F) {
	f.Add("10.1.0.0/28", "10.1.0.3", "10.1.0.9", "10.1.0.5", "10.1.0.4")
	f.Add("fd00::/124", "", "", "", "fd00::f")
	f.Add("255.255.255.248/29", "", "255.255.255.255", "", "")
	f.Fuzz(func(t *testing.T, subnet, start, end, gateway, last string) {
		conf := Range{Name: "x[0]"}
		conf.Subnet, _ = netip.ParsePrefix(subnet)
		conf.RangeStart, _ = netip.ParseAddr(start)
		conf.RangeEnd, _ = netip.ParseAddr(end)
		conf.Gateway, _ = netip.ParseAddr(gateway)
		set, err := newRangeSet(RangeSet{Name: "x", Ranges: []Range{conf}})
		if err != nil {
			return
		}
		r, p := set.Ranges[0], pool{set}
		must.That(t, r.Subnet.Contains(r.RangeStart) && r.Subnet.Contains(r.RangeEnd) && !r.RangeEnd.Less(r.RangeStart), "bad range %+v", r)
		size := set.size(p)
		lastAddr, _ := netip.ParseAddr(last)
		seen := map[netip.Addr]bool{}
		for addr := range set.after(lastAddr, p) {
			if len(seen) == 1000 {
				return
			}
			must.That(t, !seen[addr] && addr != r.Gateway && r.contains(addr), "%+v gave %s", r, addr)
			seen[addr] = true
		}
		must.That(t, uint64(len(seen)) == size, "%+v has %d addresses, of which %d were given", r, size, len(seen))
	})
}

// FuzzWant: whatever is asked for of whatever ranges, what would be given first is of the range, and no gateway.
func FuzzWant(f *testing.F) {
	f.Add("10.1.0.0/28", "10.1.0.3", "10.1.0.5", "10.2.0.0/29", "10.1.0.4", "10.2.0.3")
	f.Add("fd00::/124", "", "", "10.1.0.0/29", "", "10.1.0.1")
	f.Add("10.1.0.0/24", "", "10.2.0.9", "10.2.0.0/24", "::ffff:10.1.0.9", "10.2.0.9")
	f.Fuzz(func(t *testing.T, subnet, start, gateway, second, wanted, other string) {
		var conf, next Range
		conf.Subnet, _ = netip.ParsePrefix(subnet)
		conf.RangeStart, _ = netip.ParseAddr(start)
		conf.Gateway, _ = netip.ParseAddr(gateway)
		next.Subnet, _ = netip.ParsePrefix(second)
		h, err := NewHostLocal(&Config{Network: "lan", Dir: "/nonexistent", Ranges: []RangeSet{{Ranges: []Range{conf}}, {Ranges: []Range{next}}}})
		if err != nil {
			must.That(t, errors.Is(err, tombolo.ErrInvalid), "%v", err)
			return
		}
		var asked []netip.Addr
		for _, text := range []string{wanted, other} {
			if addr, err := netip.ParseAddr(text); err == nil {
				asked = append(asked, addr)
			}
		}
		if h, err = h.Want(asked...); err != nil {
			must.That(t, errors.Is(err, tombolo.ErrInvalid), "%v", err)
			return
		}
		for i, set := range h.pool {
			addr := h.requested[i]
			if !addr.IsValid() {
				next, stop := iter.Pull(set.after(addr, h.pool))
				addr, _ = next()
				stop()
			}
			must.That(t, !addr.IsValid() || set.rangeOf(addr) != nil && !h.pool.isGateway(addr),
				"%s would be given out of %s", addr, set.text())
		}
	})
}
