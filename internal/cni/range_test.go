package cni

import (
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/ipam"
)

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
