package conflist

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
)

func TestAllThatIsWrongIsSaid(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		name, file string
		says       []string // one problem each, in any order
	}{
		{"no JSON", `{"name": `, []string{"not valid JSON at line 1, column 10"}},
		{"no plugins", `{"cniVersion": "1.0.0", "name": "n", "plugins": []}`, []string{"it has no plugins"}},
		{"another's", `{"cniVersion": "1.0.0", "name": "n", "plugins": [{"type": "calico"}, {"type": "ptp"}]}`, []string{"none of its plugins is tombolo: calico, ptp"}},
		{"another's, alone", `{"cniVersion": "1.0.0", "name": "n", "type": "calico"}`, []string{"its plugin is not tombolo: calico"}},
		{"by names", `{"cniVersion": "0.2.0", "name": "n", "plugins": [{"type": "portmap", "conditionsV4": ["-s"], "capabilities": {"portMappings": true}},
			{"type": "bridge", "isGateway": "yes", "vlan": 5000, "nosuch": 1, "ipam": {"type": "host-local", "subnet": "10.1.0.0"}}, {"type": "calico"},
			{"type": "bandwidth", "ingressRate": 8}, {"type": "firewall", "ingressPolicy": "none"}, {"type": "tuning", "mac": "x"}]}`,
			[]string{"plugins[0]: conditionsV4", "plugins[0]: portmap works on the interface that a plugin before it makes", `plugins[1]: field "isGateway"`, "vlan 5000 is not within 0 and 4094", "10.1.0.0",
				`plugins[3]: cniVersion "0.2.0"`, "plugins[3]: ingressRate 8", `plugins[4]: cniVersion "0.2.0"`, `plugins[4]: ingressPolicy "none"`, "plugins[5]"}},
		{"all at once", `{"cniVersion": "9.9.9", "name": "n", "plugins": [
			{"type": "tombolo", "mode": "router", "mtu": 7, "bridge": "a/b", "nosuch": 1, "ipMasq": "yes", "logFile": "x", "logLevel": "loud",
			 "vlan": 5000, "ingressPolicy": "none", "capabilities": {"portMappings": true},
			 "ipam": {"type": "host-local", "nosuch": 1, "dataDir": 7, "ranges": [[{"subnet": "10.1.0.0"}]]}},
			{"type": "portmap", "capabilities": {"portMappings": true}}]}`,
			[]string{`cniVersion "9.9.9"`, `mode "router"`, "mtu 7", `bridge "a/b"`, `"nosuch"`, "ipMasq", "logFile", `logLevel "loud"`,
				"vlan 5000 is not within 0 and 4094", `ingressPolicy "none"`, `ipam.nosuch`, "ipam.dataDir", "10.1.0.0", "plugins[1]: portmap and tombolo"}},
		{"a range", `{"cniVersion": "1.0.0", "name": "n", "type": "tombolo", "ipam": {"type": "host-local", "routes": [{"dst": "x"}],
			"ranges": [[{"subnet": "x"}, {"subnet": "10.1.0.0/24", "rangeStart": 7}]]}}`,
			[]string{"ranges[0][0].subnet", "ranges[0][1].rangeStart", "routes[0].dst"}},
		{"what a range means", `{"cniVersion": "1.0.0", "name": "n", "type": "tombolo", "mtu": 7, "ipam": {"type": "host-local", "ranges": [[{"subnet": "10.1.0.5/24"}]]}}`,
			[]string{"mtu 7", "ranges[0][0]: subnet 10.1.0.5/24 has host bits"}},
		{"mode lan", `{"cniVersion": "1.0.0", "name": "n", "type": "tombolo", "mode": "lan", "isGateway": true, "promiscMode": true}`,
			[]string{"needs an uplink", "neither isGateway", "exclude each other"}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			r := Examine([]byte(tt.file))
			expect.That(t, len(r.Plan) == 0, "it has a plan: %q", r.Plan)
			for _, text := range tt.says {
				expect.That(t, slices.ContainsFunc(r.Problems, func(p string) bool { return strings.Contains(p, text) }),
					"no problem says %s", text)
			}
			expect.That(t, len(r.Problems) == len(tt.says),
				"%d problems, want %d:\n%s", len(r.Problems), len(tt.says), strings.Join(r.Problems, "\n"))
		})
	}
}

func TestWhatAConfigurationWouldDo(t *testing.T) {
	t.Parallel()
	r := Examine([]byte(`{"cniVersion": "1.0.0", "name": "pods", "plugins": [{"type": "tuning"}, {"type": "tombolo", "guard": true,
		"nonMasqueradeCIDRs": ["10.0.0.0/8"], "capabilities": {"portMappings": true},
		"ipam": {"type": "host-local", "ranges": [[{"subnet": "10.22.0.0/16"}], [{"subnet": "fd22::/64"}]]}}]}`))
	text := strings.Join(append(r.Problems, r.Plan...), "\n")
	for _, want := range []string{`network "pods" is on bridge cbr0`, "10.22.0.0/16, fd22::/64 (host-local)", "the bridge has the gateways' addresses",
		"get the host's address, except to 10.0.0.0/8", "policy open", "can send only from their own MAC", "published on the host", "after tuning"} {
		expect.Contains(t, text, want, "nothing")
	}
	r = Examine([]byte(`{"cniVersion": "1.0.0", "name": "lan", "type": "tombolo", "mode": "lan", "uplink": "eth0"}`))
	text = strings.Join(append(r.Problems, r.Plan...), "\n")
	for _, want := range []string{"eth0 stays the host's", "by DHCP", "leads to the router; the host forwards only if pods publish ports", "none can be published"} {
		expect.Contains(t, text, want, "nothing")
	}
	r = Examine([]byte(`{"cniVersion": "1.0.0", "name": "n", "type": "tombolo", "capabilities": {"ipRanges": true}, "ipam": {"type": "host-local"}}`))
	if text = strings.Join(append(r.Problems, r.Plan...), "\n"); !strings.Contains(text, "addresses: from the ranges that the runtime hands over") || len(r.Problems) > 0 {
		t.Errorf("ranges of the runtime's:\n%s", text)
	}
}

// The lists are those that documentation has: test/cni runs them.
func TestListsOfTheReferencesNamesAreReadByThem(t *testing.T) {
	t.Parallel()
	for file, want := range map[string][]string{
		"kubernetes": {"names: read as", `network "containerd-net" is on bridge cni0`, "from 10.88.0.0/16, 2001:db8:4860::/64 (host-local), reserved in /var/lib/cni/networks/containerd-net", "MTU 1500", "pods get the routes of the ipam section", "get the host's address", "portmap: ports that"},
		"podman":     {"on bridge cni-podman0", "firewall: other firewalls", "tuning: kernel"},
		"nerdctl":    {"on bridge nerdctl0"},
		"nomad":      {"loopback: lo is", "on bridge nomad", "chain: it runs after loopback"},
	} {
		data, err := os.ReadFile("../../../../test/cni/testdata/dropin/" + file + ".conflist")
		must.Succeed(t, err)
		r := Examine(data)
		text := strings.Join(r.Plan, "\n")
		for _, one := range want {
			expect.Contains(t, text, one, "%s", file)
		}
		expect.That(t, len(r.Problems)+len(r.Warnings) == 0 && !strings.Contains(text, "ports: "),
			"%s: problems %q, warnings %q", file, r.Problems, r.Warnings)
	}
	r := Examine([]byte(`{"cniVersion": "1.0.0", "name": "n", "plugins": [{"type": "ptp"}, {"type": "portmap", "capabilities": {"portMapping": true}}]}`))
	expect.That(t, len(r.Problems) == 0 && len(r.Warnings) == 2 && strings.Contains(r.Warnings[1], "publishes no ports"),
		"a capability that is misspelt: %+v", r)
	for _, name := range []string{"host-local", "static"} {
		r := Examine([]byte(`{"cniVersion": "1.0.0", "name": "n", "plugins": [{"type": "` + name + `"}]}`))
		expect.That(t, len(r.Problems) == 0 && len(r.Warnings) == 1 && strings.HasPrefix(r.Warnings[0], name+" gives addresses"),
			"an IPAM plugin by itself: %+v", r)
	}
}

func TestWhatIsHardlyMeantIsAWarning(t *testing.T) {
	t.Parallel()
	const ranges = `"ipam": {"type": "host-local", "ranges": [[{"subnet": "10.22.0.0/16"}]]}`
	for file, want := range map[string][]string{
		`"capabilities": {"portMapping": true, "bandwidth": true, "aliases": false}, ` + ranges:                                                                                                                             {`capability "portMapping" has no effect here, since Tombolo does not know it: did you mean "portMappings"?`},
		`"capabilities": {"aliases": true, "mac": true, "ips": true, "ipRanges": true, "dns": true, "portMappings": true, "egressPolicy": true, "publishFrom": true, "io.kubernetes.cri.pod-annotations": true}, ` + ranges: {`capability "aliases" has no effect here, since Tombolo does not know it`},
		`"ipam": null`:                 {"without an ipam section"},
		`"mode": "l2"`:                 nil,
		`"isGateway": false`:           nil,
		`"mtu": 7, "ipam": null`:       nil, // it is an error
		`"ipam": {"type": "whatever"}`: nil,
	} {
		r := Examine([]byte(`{"cniVersion": "1.0.0", "name": "n", "type": "tombolo", ` + file + `}`))
		same := len(r.Warnings) == len(want)
		for i := range want {
			same = same && strings.HasPrefix(r.Warnings[i], want[i])
		}
		expect.That(t, same && (len(r.Plan) == 0) == strings.Contains(file, "mtu"),
			"%s: warnings %q, want %q; problems %q", file, r.Warnings, want, r.Problems)
	}
	r := Examine([]byte(`{"cniVersion": "1.0.0", "name": "n", "type": "tombolo"}`))
	expect.That(t, slices.Contains(r.Plan, "gateway: none, since there are no addresses"), "%q", r.Plan)
}

func TestShippedConfigurationsAreValid(t *testing.T) {
	t.Parallel()
	files := 0
	err := filepath.WalkDir("../../../../deploy", func(path string, e os.DirEntry, err error) error {
		if err != nil || !strings.HasSuffix(path, ".conflist") {
			return err
		}
		files++
		data, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		r := Examine(data)
		expect.That(t, len(r.Problems) == 0 && len(r.Plan) > 0, "%s: %q", path, r.Problems)
		return nil
	})
	expect.That(t, err == nil && files != 0, "%d files, %v", files, err)
}
