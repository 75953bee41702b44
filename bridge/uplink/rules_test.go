package uplink

import (
	"testing"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/route"
)

// What is taken for the same rule is not put back where one of two is lost.
func TestRulesAreTheSameOnlyIfAllOfThemIs(t *testing.T) {
	t.Parallel()
	rec := Record{Uplink: Uplink{NIC: "eth0", Bridge: "br0"}}
	group := uint32(7)
	rule := route.Rule{Family: unix.AF_INET, Priority: 9, IIF: "eth0", Table: 7, DstPorts: route.PortRange{First: 80, Last: 80}, SuppressGroup: &group}
	for name, tt := range map[string]struct {
		change func(*route.Rule)
		same   bool
	}{
		"itself":                 {func(*route.Rule) {}, true},
		"on the bridge":          {func(r *route.Rule) { r.IIF = "br0" }, true},
		"the same, read again":   {func(r *route.Rule) { again := group; r.SuppressGroup = &again }, true},
		"another port":           {func(r *route.Rule) { r.DstPorts.Last = 81 }, false},
		"another link":           {func(r *route.Rule) { r.IIF = "eth1" }, false},
		"users":                  {func(r *route.Rule) { r.UIDs = &route.UIDRange{} }, false},
		"realms":                 {func(r *route.Rule) { r.Other = []netlink.Attribute{{Type: unix.FRA_FLOW}} }, false},
		"another group of links": {func(r *route.Rule) { r.SuppressGroup = nil }, false},
	} {
		other := rule
		tt.change(&other)
		if got := rec.sameRule(&rule, &other); got != tt.same {
			t.Errorf("%s: the same: %t, want %t", name, got, tt.same)
		}
	}
}
