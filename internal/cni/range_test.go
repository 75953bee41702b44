package cni

import (
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/ipam"
)

// What can be wrong with a range is package ipam's to say, and tested there; here the error
// names the place in the configuration.
func TestBadRangesAreExplainedByTheirPlace(t *testing.T) {
	t.Parallel()
	tests := map[string]struct {
		stdin string
		code  uint
		want  string
	}{
		"no ranges":         {ranged(``), 7, `host-local has no addresses to give: set "ipam.ranges"`},
		"empty set":         {ranged(`[]`), 7, `ipam.ranges[0] is an empty list of ranges`},
		"no subnet":         {ranged(`[{"rangeStart":"10.1.0.2"}]`), 7, `ipam.ranges[0][0]: "subnet" is required`},
		"inline, no subnet": {`{"ipam":{"type":"host-local","gateway":"10.1.0.1","ranges":[[{"subnet":"10.1.0.0/24"}]]}}`, 7, `ipam: "subnet" is required`},
		"host bits":         {ranged(`[{"subnet":"10.1.0.7/24"}]`), 7, `ipam.ranges[0][0]: subnet 10.1.0.7/24 has host bits set: the network is 10.1.0.0/24`},
		"mixed families": {
			ranged(`[{"subnet":"10.1.0.0/24"},{"subnet":"fd00::/64"}]`), 7,
			`ipam.ranges[0] mixes IPv4 and IPv6: put 10.1.0.0/24 and fd00::/64 into sets of their own`,
		},
		"overlap of sets": {
			ranged(`[{"subnet":"10.1.0.0/24","rangeStart":"10.1.0.100"}],[{"subnet":"10.0.0.0/8"}]`), 7,
			`range 10.1.0.100-10.1.0.254 of 10.1.0.0/24 in ipam.ranges[0] overlaps range 10.0.0.0/8 in ipam.ranges[1]`,
		},
		"overlap with runtimeConfig": {
			`{"cniVersion":"1.0.0","ipam":{"type":"host-local","subnet":"10.1.0.0/24"},"runtimeConfig":{"ipRanges":[[{"subnet":"10.1.0.0/24"}]]}}`, 7,
			`range 10.1.0.0/24 in runtimeConfig.ipRanges[0] overlaps range 10.1.0.0/24 in ipam`,
		},
		"misspelt":       {ranged(`[{"subnet":"10.1.0.0/24","rangeStrat":"10.1.0.2"}]`), 2, `unknown field "ipam.ranges[0][0].rangeStrat": "10.1.0.2" (did you mean "rangeStart"?)`},
		"not an address": {ranged(`[{"subnet":"10.1.0.0/24","gateway":"router"}]`), 7, `field "ipam.ranges[0][0].gateway": expected an IP address, got the string "router"`},
		"ranges of one":  {ranged(`{"subnet":"10.1.0.0/24"}`), 7, `field "ipam.ranges[0]": expected a list, got an object`},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			_, err := newAllocator((&ipamRequest{Network: "lan", Strict: true}).fill(tt.stdin))
			wantError(t, err, tt.code, nil, tt.want)
		})
	}
}

func TestRangesComeInTheReferencesOrder(t *testing.T) {
	t.Parallel()
	var conf hostLocalConf
	r := (&ipamRequest{Strict: true}).fill(`{"cniVersion":"1.1.0","ipam":{"type":"host-local","subnet":"10.2.0.0/24","ranges":[[{"subnet":"10.3.0.0/24"}]]},` +
		`"runtimeConfig":{"ipRanges":[[{"subnet":"10.1.0.0/24"}],[{"subnet":"fd00::/64"}]],"other":{"a":1}}}`)
	must.Succeed(t, r.read(&conf))
	var got []string
	for _, set := range conf.sets(&r.Asked) {
		got = append(got, set.Name+" range "+set.Ranges[0].Subnet.String())
	}
	want := []string{
		"runtimeConfig.ipRanges[0] range 10.1.0.0/24", "runtimeConfig.ipRanges[1] range fd00::/64", "ipam range 10.2.0.0/24",
		"ipam.ranges[0] range 10.3.0.0/24",
	}
	expect.NoDiff(t, cmp.Diff(want, got))
}

// Package network puts the ranges on record, by which pools are told of, and goes by the node that it binds to.
func TestAnAllocatorTellsItsRanges(t *testing.T) {
	t.Parallel()
	n := newIPAMNode(t, ranged(small+`,[{"subnet":"fd00::/64"}]`))
	for _, of := range []ipam.Allocator{n.allocator(n.request("a")).allocator, n.allocator(n.request("a")).Bind(ipam.Node{})} {
		expect.Equal(t, len(ipam.RangeSetsOf(of)), 2, "range sets of %T", of)
	}
}
