package conflist

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

func TestAllThatIsWrongIsSaid(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		name, file string
		says       []string // one problem each, in any order
	}{
		{"no JSON", `{"name": `, []string{"not valid JSON at line 1, column 10"}},
		{"no plugins", `{"cniVersion": "1.0.0", "name": "n", "plugins": []}`, []string{"it has no plugins"}},
		{"another's", `{"cniVersion": "1.0.0", "name": "n", "plugins": [{"type": "bridge"}]}`, []string{"none of its plugins is tombolo: bridge"}},
		{"all at once", `{"cniVersion": "9.9.9", "name": "n", "plugins": [
			{"type": "tombolo", "mode": "router", "mtu": 7, "bridge": "a/b", "nosuch": 1, "ipMasq": "yes", "logFile": "x", "logLevel": "loud",
			 "vlan": 5, "ingressPolicy": "none", "capabilities": {"portMappings": true},
			 "ipam": {"type": "host-local", "nosuch": 1, "dataDir": 7, "ranges": [[{"subnet": "10.1.0.0"}]]}},
			{"type": "portmap", "capabilities": {"portMappings": true}}]}`,
			[]string{`cniVersion "9.9.9"`, `mode "router"`, "mtu 7", `bridge "a/b"`, `"nosuch"`, "ipMasq", "logFile", `logLevel "loud"`,
				`"vlan"`, `ingressPolicy "none"`, `ipam.nosuch`, "ipam.dataDir", "10.1.0.0", "plugins[1]: portmap and tombolo"}},
		{"mode lan", `{"cniVersion": "1.0.0", "name": "n", "type": "tombolo", "mode": "lan", "isGateway": true, "promiscMode": true}`,
			[]string{"needs an uplink", "neither isGateway", "exclude each other"}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			r := Examine([]byte(tt.file))
			if len(r.Plan) > 0 {
				t.Errorf("it has a plan: %q", r.Plan)
			}
			for _, text := range tt.says {
				if !slices.ContainsFunc(r.Problems, func(p string) bool { return strings.Contains(p, text) }) {
					t.Errorf("no problem says %s", text)
				}
			}
			if len(r.Problems) != len(tt.says) {
				t.Errorf("%d problems, want %d:\n%s", len(r.Problems), len(tt.says), strings.Join(r.Problems, "\n"))
			}
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
		"has the host's address, but to 10.0.0.0/8", "policy open", "held to their own MAC", "published on the host; capabilities: portMappings", "after tuning"} {
		if !strings.Contains(text, want) {
			t.Errorf("nothing says %s:\n%s", want, text)
		}
	}
	r = Examine([]byte(`{"cniVersion": "1.0.0", "name": "lan", "type": "tombolo", "mode": "lan", "uplink": "eth0"}`))
	text = strings.Join(append(r.Problems, r.Plan...), "\n")
	for _, want := range []string{"eth0 becomes a port of br0", "by DHCP", "leads to the host", "none can be published"} {
		if !strings.Contains(text, want) {
			t.Errorf("nothing says %s:\n%s", want, text)
		}
	}
}

func TestShippedConfigurationsAreValid(t *testing.T) {
	t.Parallel()
	files := 0
	err := filepath.WalkDir("../../../deploy", func(path string, e os.DirEntry, err error) error {
		if err != nil || !strings.HasSuffix(path, ".conflist") {
			return err
		}
		files++
		data, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		if r := Examine(data); len(r.Problems) > 0 || len(r.Plan) == 0 {
			t.Errorf("%s: %q", path, r.Problems)
		}
		return nil
	})
	if err != nil || files == 0 {
		t.Errorf("%d files, %v", files, err)
	}
}
