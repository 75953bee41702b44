package uplink_test

import (
	"encoding/json"
	"errors"
	"flag"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo"
	"github.com/tombolo-cni/tombolo/addr"
	"github.com/tombolo-cni/tombolo/internal/routing"
	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/golden"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
	"github.com/tombolo-cni/tombolo/network/internal/uplink"
	"github.com/tombolo-cni/tombolo/route"
)

var (
	record = flag.Bool("record", false, "record the snapshots that plans are made from anew, as root")
)

// recorded gives the snapshots of hosts, by name.
func recorded(tb testing.TB) map[string]*uplink.Snapshot {
	tb.Helper()
	files, err := filepath.Glob("testdata/snapshots/*.json")
	must.That(tb, err == nil && len(files) > 0, "no snapshots: %v", err)
	list := map[string]*uplink.Snapshot{}
	for _, f := range files {
		list[strings.TrimSuffix(filepath.Base(f), ".json")] = load(tb, f)
	}
	return list
}

func load(tb testing.TB, file string) *uplink.Snapshot {
	tb.Helper()
	b := must.Of(os.ReadFile(file)).Get(tb)
	var s uplink.Snapshot
	must.Succeed(tb, json.Unmarshal(b, &s), "%s", file)
	return &s
}

func plain(tb testing.TB) *uplink.Snapshot { return load(tb, "testdata/snapshots/plain.json") }

// TestRecordSnapshots writes what plans are tested with.
func TestRecordSnapshots(t *testing.T) {
	if !*record {
		t.Skip("records only with -record")
	}
	for _, name := range []string{"plain", "labels, secondaries, scopes and metrics", "policy routing with five tables", "multipath"} {
		l := newLAN(t, hosts()[name]...)
		s := must.Of(l.conn.Snapshot(t.Context(), "eth0", "br0")).Get(t)
		b := must.Of(json.MarshalIndent(s, "", " ")).Get(t)
		file := strings.NewReplacer(" ", "-", ",", "").Replace(name)
		must.Succeed(t, os.WriteFile("testdata/snapshots/"+file+".json", append(b, '\n'), 0o644))
	}
}

func TestPlansOfRecordedHosts(t *testing.T) {
	t.Parallel()
	for name, s := range recorded(t) {
		was := must.Of(json.Marshal(s)).Get(t)
		plan := must.Of(uplink.PlanOf(s, toBridge())).Get(t, "%s", name)
		golden.Compare(t, filepath.Join("plans", name+".txt"), plan.Steps)
		expect.That(t, len(plan.Warnings) == 0, "%s: warnings %q", name, plan.Warnings)
		is := must.Of(json.Marshal(s)).Get(t)
		expect.Equal(t, string(is), string(was), "%s: the snapshot", name)
	}
}

// link adds a link to a snapshot.
func link(l uplink.Link) func(*uplink.Snapshot, *uplink.Uplink) {
	return func(s *uplink.Snapshot, _ *uplink.Uplink) {
		l.Index = 99
		if l.Lower != 0 {
			l.Lower = s.NIC.Index
		}
		s.Links = append(s.Links, l)
	}
}

func TestWhatCannotBeTakenIsRefusedByName(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		name   string
		change func(*uplink.Snapshot, *uplink.Uplink)
		want   string
	}{
		{"a tunnel", func(s *uplink.Snapshot, _ *uplink.Uplink) { s.NIC.Type = 65534 }, "is not Ethernet (its type is 65534)"},
		{"Wi-Fi", func(s *uplink.Snapshot, _ *uplink.Uplink) { s.Wireless = true }, "is a Wi-Fi interface"},
		{"a bridge", func(s *uplink.Snapshot, _ *uplink.Uplink) { s.NIC.Kind = "bridge" }, "is a bridge itself"},
		{"a macvlan", func(s *uplink.Snapshot, _ *uplink.Uplink) { s.NIC.Kind = "macvlan" }, "of kind macvlan, which cannot carry other MACs"},
		{"a bond's slave", func(s *uplink.Snapshot, _ *uplink.Uplink) {
			s.NIC.Master, s.NIC.PortOf = 98, "bond"
			s.Links = append(s.Links, uplink.Link{Index: 98, Name: "bond0", Kind: "bond"})
		}, "is a port of bond0 (bond) already; name bond0 as the NIC"},
		{"a port of a bridge that cannot be seen", func(s *uplink.Snapshot, _ *uplink.Uplink) { s.NIC.Master, s.NIC.PortOf = 98, "openvswitch" }, "a port of link 98 (openvswitch)"},
		{"a port of the bridge", func(s *uplink.Snapshot, _ *uplink.Uplink) {
			s.Bridge = &uplink.Link{Index: 50, Name: "br0", Kind: "bridge"}
			s.NIC.Master, s.NIC.PortOf, s.Links = 50, "bridge", append(s.Links, *s.Bridge)
		}, "is a port of bridge br0 already, which networks use as it is"},
		{"down", func(s *uplink.Snapshot, _ *uplink.Uplink) { s.NIC.Flags &^= unix.IFF_UP }, "set it up with `ip link set eth0 up`"},
		{"no cable", func(s *uplink.Snapshot, _ *uplink.Uplink) { s.NIC.Flags &^= unix.IFF_LOWER_UP }, "check its cable"},
		{"a macvlan above", link(uplink.Link{Name: "mv0", Kind: "macvlan", Lower: 1}), "mv0, of kind macvlan, rests on eth0"},
		{"an ipvlan above", link(uplink.Link{Name: "iv0", Kind: "ipvlan", Lower: 1}), "iv0, of kind ipvlan, rests on eth0"},
		{"a tunnel above", link(uplink.Link{Name: "gre1", Kind: "gre", Lower: 1}), "the tunnel gre1, of kind gre, sends by eth0 alone"},
		{"a VXLAN tunnel to one host", link(uplink.Link{Name: "vx0", Kind: "vxlan", Lower: 1}), "the tunnel vx0, of kind vxlan, sends by eth0 alone"},
		{"a bridge that is there", func(s *uplink.Snapshot, _ *uplink.Uplink) {
			s.Bridge = &uplink.Link{Index: 50, Name: "br0", Kind: "bridge"}
		}, "br0 is there already; have your system make eth0 a port of it"},
		{"another link's route behind the NIC's", func(s *uplink.Snapshot, _ *uplink.Uplink) {
			s.Behind = []route.Route{{Family: unix.AF_INET, Dst: nstest.Prefix("10.0.0.0/24"), Link: 7}}
		}, "another link has a route to 10.0.0.0/24 too"},
		{"a default route by a nexthop object", func(s *uplink.Snapshot, _ *uplink.Uplink) {
			s.Routes = append(s.Routes, route.Route{Family: unix.AF_INET, Dst: nstest.Prefix("0.0.0.0/0"), Link: s.NIC.Index, NexthopID: 9})
		}, "the route to everywhere goes by nexthop object 9, which stays on eth0"},
		{"a route by a nexthop object", func(s *uplink.Snapshot, _ *uplink.Uplink) {
			s.Routes = append(s.Routes, route.Route{Family: unix.AF_INET, Dst: nstest.Prefix("172.16.0.0/12"), Link: s.NIC.Index, NexthopID: 9})
		}, "the route to 172.16.0.0/12 goes by nexthop object 9, which stays on eth0"},
		{"a rule that names it", func(s *uplink.Snapshot, _ *uplink.Uplink) {
			s.Rules = append(s.Rules, routing.Rule{Family: unix.AF_INET, Priority: 7, IIF: "eth0", Table: 9})
		}, `the rule "7: from all iif eth0 table 9" names eth0`},
		{"no NIC", func(_ *uplink.Snapshot, u *uplink.Uplink) { u.NIC = "" }, `its name is ""`},
		{"no bridge", func(_ *uplink.Snapshot, u *uplink.Uplink) { u.Bridge = "" }, `the bridge's name is ""`},
		{"a bridge with the NIC's name", func(_ *uplink.Snapshot, u *uplink.Uplink) { u.Bridge = "eth0" }, `the bridge's name is "eth0"`},
		{"a bridge to be numbered", func(_ *uplink.Snapshot, u *uplink.Uplink) { u.Bridge = "br%d" }, `the bridge's name is "br%d"`},
		{"a NIC to be numbered", func(_ *uplink.Snapshot, u *uplink.Uplink) { u.NIC = "eth%d" }, `"eth%d"`},
		{"a long name", func(_ *uplink.Snapshot, u *uplink.Uplink) { u.Bridge = "sixteen-letters-" }, `the bridge's name is "sixteen-letters-"`},
		{"a leased address", func(s *uplink.Snapshot, _ *uplink.Uplink) { s.Addresses[0].Valid = new(time.Hour) }, "for a limited time"},
		{"a router's address", func(s *uplink.Snapshot, _ *uplink.Uplink) {
			s.Addresses = append(s.Addresses, addr.Address{Prefix: nstest.Prefix("2001:db8::5/64"), Link: s.NIC.Index, Valid: new(time.Hour)})
		}, "2001:db8::5/64 for a limited time"},
		{"a DHCP client's default route", func(s *uplink.Snapshot, _ *uplink.Uplink) {
			s.Routes = append(s.Routes, route.Route{Family: unix.AF_INET, Dst: nstest.Prefix("0.0.0.0/0"), Link: s.NIC.Index, Gateway: nstest.Addr("10.0.0.1"), Protocol: unix.RTPROT_DHCP})
		}, "gave eth0 its default route by 10.0.0.1"},
		{"a router's default route", func(s *uplink.Snapshot, _ *uplink.Uplink) {
			s.Routes = append(s.Routes, route.Route{Family: unix.AF_INET6, Dst: nstest.Prefix("::/0"), Link: s.NIC.Index, Gateway: nstest.Addr("fe80::1"), Protocol: unix.RTPROT_RA})
		}, "mode \"lan\" shares eth0 without taking it"},
		{"a stale default route", func(s *uplink.Snapshot, _ *uplink.Uplink) {
			s.Routes = append(s.Routes, route.Route{Family: unix.AF_INET6, Dst: nstest.Prefix("::/0"), Link: s.NIC.Index, Gateway: nstest.Addr("2001:db8:7::1")})
		}, "ip -6 route delete default via 2001:db8:7::1 dev eth0"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			s, u := plain(t), toBridge()
			tt.change(s, &u)
			_, err := uplink.PlanOf(s, u)
			if !errors.Is(err, uplink.ErrRefused) && !errors.Is(err, tombolo.ErrInvalid) || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("plan: %v\nwant %s", err, tt.want)
			}
		})
	}
}

func TestEveryReasonIsGiven(t *testing.T) {
	t.Parallel()
	s := plain(t)
	s.Wireless = true
	s.NIC.Flags &^= unix.IFF_LOWER_UP
	link(uplink.Link{Name: "mv0", Kind: "macvlan", Lower: 1})(s, nil)
	_, err := uplink.PlanOf(s, toBridge())
	for _, want := range []string{"Wi-Fi", "cable", "mv0"} {
		expect.That(t, err != nil && strings.Contains(err.Error(), want),
			"plan: %v, want %s among the reasons", err, want)
	}
}

func TestAVLANThatStaysIsWarnedOf(t *testing.T) {
	t.Parallel()
	s := plain(t)
	link(uplink.Link{Name: "eth0.7", Kind: "vlan", Lower: 1})(s, nil)
	plan := must.Of(uplink.PlanOf(s, toBridge())).Get(t)
	const want = "VLAN eth0.7 stays on eth0"
	expect.Contains(t, plan.Steps, "warning: "+want, "the plan")
	expect.Contains(t, strings.Join(plan.Warnings, "\n"), want, "warnings")
}
