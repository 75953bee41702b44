package cni

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/tombolo-cni/tombolo/internal/nstest"
)

// inZone lists the sources of a zone of firewalld.
func (f *firewalld) inZone(zone string) string {
	f.Helper()
	list := f.ask(firewalldName+".zone.getSources", zone)
	slices.Sort(list)
	return strings.Join(list, " ")
}

// zoned is a node with the real firewalld, that forwards nothing by itself, and with plugins by names.
type zoned struct {
	*side
	f    *firewalld
	main string // the plugin before firewall
}

func newZoned(t *testing.T, main string, ours []string) *zoned {
	t.Helper()
	s := newSide(t, referenceDir(t), ours)
	f := s.firewalldToBe(t)
	zones := filepath.Join(f.dir, "etc", "zones")
	if err := os.MkdirAll(zones, 0o755); err != nil {
		t.Fatal(err)
	}
	for zone, text := range map[string]string{"public": "<zone/>", "pods": `<zone target="ACCEPT"/>`} { // neither forwards
		if err := os.WriteFile(filepath.Join(zones, zone+".xml"), []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	f.beginBus(t)
	f.begin(t)
	s.bus = f.bus
	const ipam = `"ipam":{"type":"host-local","dataDir":"DATA/n","ranges":[[{"subnet":"10.5.1.0/24"}],[{"subnet":"fd05::/64"}]],"routes":[{"dst":"0.0.0.0/0"},{"dst":"::/0"}]}`
	z := &zoned{side: s, f: f, main: `{"type":"ptp",` + ipam + `}`}
	if main == "bridge" {
		z.main = `{"type":"bridge","bridge":"cni0","isGateway":true,` + ipam + `}`
	}
	return z
}

// list is the chain with a configuration of firewall.
func (z *zoned) list(firewall string) []string { return []string{z.main, firewall} }

// alone calls firewall for a pod that the chain has given a result to before.
func (z *zoned) alone(what, id, firewall string) outcome {
	z.Helper()
	conf := `{"cniVersion":"1.0.0","name":"net","stateDir":"STATE","prevResult":` + z.results[id] + `,` + strings.TrimPrefix(firewall, "{")
	return z.call(verb{plugin: "firewall", verb: what, id: id, conf: conf})
}

// By whichever backend leads to firewalld, the zones have the same sources as with the reference's
// plugin, and packets the same fate.
func TestFirewallByNameHasPodsAddressesInFirewalldsZone(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct{ main, backend, zone string }{
		{"ptp", "firewalld", "pods"}, {"bridge", "", ""}, {"ptp", "iptables", "pods"},
	} {
		t.Run(fmt.Sprint(tt), func(t *testing.T) {
			t.Parallel()
			firewall := fmt.Sprintf(`{"type":"firewall","backend":%q,"firewalldZone":%q}`, tt.backend, tt.zone)
			want := ""
			for _, ours := range [][]string{nil, byName()} {
				z := newZoned(t, tt.main, ours)
				out := z.outside()
				nstest.Run(t, out, "ip", "route", "add", "10.5.1.0/24", "via", uplink4)
				if ours != nil {
					m := z.mindOn(t, z.f.bus, nil)
					m.until(t, "firewalld is attended to", z.attendsFirewalld)
				}
				var got strings.Builder
				tell := func(what string) {
					reaches := nstest.PingWith(t, z.of("a").NS, nstest.Addr(outside4), nstest.Echo{Wait: noAnswer}) == nil
					fmt.Fprintf(&got, "%s: pods %q, trusted %q, outside %t\n", what, z.f.inZone("pods"), z.f.inZone("trusted"), reaches)
				}
				z.chain("ADD", "a", z.list(firewall))
				tell("ADD")
				z.chain("CHECK", "a", z.list(firewall))
				if o := z.operate("check", "--state", z.state); ours != nil && tt.backend != "iptables" && o.status != 0 {
					t.Errorf("check: %+v", o)
				}
				z.chain("ADD", "b", z.list(firewall))
				if o := z.alone("ADD", "b", firewall); o.status != 0 { // it is there
					t.Errorf("again: %+v", o)
				}
				tell("ADD of another")
				z.chain("DEL", "b", z.list(firewall))
				tell("DEL of another")
				z.chain("DEL", "b", z.list(firewall))
				if o := z.alone("DEL", "a", firewall); o.status != 0 {
					t.Errorf("DEL: %+v", o)
				}
				if tt.main == "ptp" { // the bridge is in a zone itself
					tell("DEL by firewall")
				}
				z.chain("DEL", "a", z.list(firewall))
				if want == "" {
					want = got.String()
				}
				if diff := cmp.Diff(want, got.String()); diff != "" {
					t.Errorf("with %q, the reference's (-) and this one's (+):\n%s", ours, diff)
				}
				if reaches := strings.Contains(want, "ADD: pods \"\", trusted \"\""); reaches != (tt.backend == "iptables") {
					t.Errorf("by backend %q the zones are: %s", tt.backend, want)
				}
				if files, _ := filepath.Glob(z.state + "/sources/*"); len(files) > 0 {
					t.Errorf("left: %q", files)
				}
			}
		})
	}
}

// What firewalld refuses is an error of either's ADD, and nothing is left of it.
func TestAnAddressThatFirewalldRefusesFailsTheADD(t *testing.T) {
	t.Parallel()
	for _, ours := range [][]string{nil, byName()} {
		z := newZoned(t, "ptp", ours)
		if ours != nil {
			z.mindOn(t, z.f.bus, nil).until(t, "firewalld is attended to", z.attendsFirewalld)
		}
		z.chain("ADD", "a", []string{z.main})
		z.f.do("firewall-cmd --zone=drop --add-source=fd05::2/128")
		for firewall, words := range map[string]string{
			`{"type":"firewall","backend":"firewalld"}`:                             "fd05::2",
			`{"type":"firewall","backend":"firewalld","firewalldZone":"nowhere"}`:   "INVALID_ZONE",
			`{"type":"firewall","backend":"firewalld","firewalldZone":"no zone\n"}`: "zone",
		} {
			o := z.alone("ADD", "a", firewall)
			e := failure(o.stdout)
			if e == nil || !strings.Contains(e.Msg+e.Details, words) {
				t.Errorf("with %q, %s: %+v", ours, firewall, o)
			}
			if ours != nil {
				if o := z.alone("CHECK", "a", firewall); o.status == 0 {
					t.Errorf("CHECK passes: %s", firewall)
				}
				if zones := z.f.inZone("trusted"); zones != "" {
					t.Errorf("%s leaves %q", firewall, zones)
				}
			}
			if o := z.alone("DEL", "a", `{"type":"firewall","backend":"firewalld"}`); o.status != 0 {
				t.Errorf("DEL: %+v", o)
			}
		}
		if zones := z.f.inZone("drop"); zones != "fd05::2/128" {
			t.Errorf("with %q, the operator's source has become %q", ours, zones)
		}
	}
}

// What firewalld forgets it gets again; without tombolod an ADD says so; and what a killed one has left,
// and what the reference's plugin has made, goes.
func TestPodsAddressesStayInFirewalldsZoneForAsLongAsTheyAskForIt(t *testing.T) {
	t.Parallel()
	z := newZoned(t, "ptp", byName())
	const firewall, both = `{"type":"firewall"}`, "10.5.1.2/32 fd05::2/128"
	z.chain("ADD", "a", []string{z.main})
	for _, backend := range []string{firewall, `{"type":"firewall","backend":"firewalld"}`} {
		if e := failure(z.alone("ADD", "a", backend).stdout); e == nil || e.Code != 117 || !strings.Contains(e.Msg, "systemctl start firewalld tombolod") {
			t.Errorf("ADD without tombolod: %v", e)
		}
	}
	m := z.mindOn(t, z.f.bus, nil)
	m.until(t, "firewalld is attended to", z.attendsFirewalld)
	if o := z.alone("ADD", "a", firewall); o.status != 0 {
		t.Fatalf("ADD: %+v", o)
	}
	is := func(want string) func() bool { return func() bool { return z.f.inZone("trusted") == want } }
	for _, after := range []string{"firewall-cmd --complete-reload", "firewall-cmd --zone=trusted --remove-source=10.5.1.2/32 && firewall-cmd --reload"} {
		z.f.do(after)
		z.f.until(t, "after "+after+" the addresses are there", is(both))
		z.chain("CHECK", "a", z.list(firewall))
	}
	z.f.end(t)
	z.f.begin(t)
	z.f.until(t, "after a restart the addresses are there", is(both))

	if err := m.process.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	m.process.Wait()
	if o := z.alone("CHECK", "a", firewall); o.status == 0 {
		t.Error("CHECK passes without tombolod")
	}
	z.chain("DEL", "a", z.list(firewall))
	if got := z.f.inZone("trusted"); got != both {
		t.Errorf("without tombolod the zone has %q", got)
	}
	z.mindOn(t, z.f.bus, nil)
	z.f.until(t, "the next tombolod takes them out", is(""))

	// The reference's own makes them, and this one is put in its place.
	ours, theirs := filepath.Join(z.programs, "firewall"), filepath.Join(referenceDir(t), "firewall")
	swap := func(to string) {
		if err := os.Remove(ours); err != nil {
			t.Fatal(err)
		}
		if err := os.Symlink(to, ours); err != nil {
			t.Fatal(err)
		}
	}
	swap(theirs)
	z.chain("ADD", "b", z.list(firewall))
	if got := z.f.inZone("trusted"); !strings.Contains(got, "fd05::") {
		t.Errorf("the reference's zone has %q", got)
	}
	swap(plugin())
	z.chain("DEL", "b", z.list(firewall))
	z.f.until(t, "the reference's are taken out", is(""))

	// The permanent configuration's stay.
	z.f.do("firewall-cmd --permanent --zone=trusted --add-source=10.5.1.4/32 && firewall-cmd --reload")
	z.chain("ADD", "c", z.list(firewall))
	z.f.until(t, "c is there", is("10.5.1.4/32 fd05::4/128"))
	z.chain("DEL", "c", z.list(firewall))
	z.f.until(t, "c is gone", is("10.5.1.4/32"))

	// Many at once, while firewalld is reloaded.
	var ids, all []string
	for i := range 8 {
		id := fmt.Sprintf("m%d", i)
		z.chain("ADD", id, []string{z.main})
		ids, all = append(ids, id), append(all, fmt.Sprintf("10.5.1.%d/32", 5+i), fmt.Sprintf("fd05::%x/128", 5+i))
	}
	each := func(what string) {
		var calls sync.WaitGroup
		for _, id := range ids {
			calls.Go(func() {
				if o := z.alone(what, id, firewall); o.status != 0 {
					t.Errorf("%s of %s: %+v", what, id, o)
				}
			})
		}
		if what == "ADD" {
			z.f.do("firewall-cmd --reload")
		}
		calls.Wait()
	}
	each("ADD")
	all = append(all, "10.5.1.4/32")
	slices.Sort(all)
	z.f.until(t, "all are there", is(strings.Join(all, " ")))
	each("DEL")
	z.f.until(t, "all are gone", is("10.5.1.4/32"))
}
