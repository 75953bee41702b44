package cni

import (
	"net/netip"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/containernetworking/cni/pkg/types"
	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
	"github.com/tombolo-cni/tombolo/network"
	"github.com/tombolo-cni/tombolo/nft"
)

func ptr[T any](v T) *T { return &v }

// with is a small configuration with further fields.
func with(fields string) []byte {
	text := `{"cniVersion": "1.1.0", "name": "pods", "type": "tombolo"`
	if fields != "" {
		text += ", " + fields
	}
	return []byte(text + "}")
}

func parsed(t *testing.T, fields string) *NetConf {
	t.Helper()
	conf, err := parseStrict(with(fields))
	must.Succeed(t, err, "%s", fields)
	return conf
}

func TestSettingsOfAMode(t *testing.T) {
	t.Parallel()
	// What is the same in every mode.
	common := settings{Network: network.Network{Name: "pods"}, StateDir: "/run/tombolo", LeaseDir: "/var/lib/tombolo/leases", Mark: 0x10}
	gateway, l2 := common, common
	gateway.Bridge, gateway.Gateway, gateway.DefaultGateway, gateway.Masquerade, gateway.Hairpin = "cbr0", true, true, true, true
	gateway.Routed = true
	l2.Bridge, l2.LeaveIPv6 = "br0", true // without ipam
	for _, tt := range []struct {
		name   string
		fields string
		from   settings
		change func(*settings)
	}{
		{"no mode is gateway", ``, gateway, nil},
		{"gateway", `"mode": "gateway"`, gateway, nil},
		{"l2", `"mode": "l2"`, l2, nil},

		{"a boolean that is false overrides its mode", `"hairpinMode": false`, gateway, func(s *settings) { s.Hairpin = false }},
		{"a boolean that is null leaves it to the mode", `"hairpinMode": null`, gateway, nil},
		{"a boolean that is true overrides its mode", `"mode": "l2", "hairpinMode": true`, l2, func(s *settings) { s.Hairpin = true }},
		{"ipMasq false", `"ipMasq": false`, gateway, func(s *settings) { s.Masquerade = false }},
		{"ipMasq true in l2", `"mode": "l2", "ipMasq": true`, l2, func(s *settings) { s.Masquerade = true }},

		{"no gateway means no default gateway", `"isGateway": false`, gateway,
			func(s *settings) { s.Gateway, s.DefaultGateway = false, false }},
		{"no default gateway leaves the gateway", `"isDefaultGateway": false`, gateway,
			func(s *settings) { s.DefaultGateway = false }},
		{"a gateway in l2 is no default one", `"mode": "l2", "isGateway": true`, l2,
			func(s *settings) { s.Gateway = true }},
		{"a default gateway is a gateway", `"mode": "l2", "isDefaultGateway": true`, l2,
			func(s *settings) { s.Gateway, s.DefaultGateway = true, true }},
		{"a default gateway is one that is denied elsewhere", `"isGateway": false, "isDefaultGateway": true`, gateway, nil},

		{"the reference's guard is of MACs", `"macspoofchk": true`, gateway, func(s *settings) { s.Guard = nft.GuardMAC }},
		{"a guard implies the reference's", `"macspoofchk": true, "guard": true`, gateway, func(s *settings) { s.Guard = nft.GuardAddresses }},

		{"an interface that stays down has no gateway and no masquerade", `"disableContainerInterface": true`, gateway, func(s *settings) {
			s.Down, s.Gateway, s.DefaultGateway, s.Masquerade = true, false, false, false
		}},
		{"every field", `"bridge": "br7", "mtu": 9000, "forceAddress": true, "portIsolation": true, "enabledad": true,
			"promiscMode": true, "bridgeNFCall": false, "guard": true, "ingressPolicy": "isolated",
			"nonMasqueradeCIDRs": ["10.0.0.1/8", "fd00::/8"], "ingressRate": 5000, "stateDir": "/srv/t", "leaseDir": "/srv/l", "deadline": "1m30s", "forwardMark": "0x40000", "dns": {"domain": "d"}`, gateway, func(s *settings) {
			s.Bridge, s.MTU, s.ForceAddress, s.Isolated, s.DAD = "br7", 9000, true, true, true
			s.Promiscuous, s.NFCall, s.Hairpin = ptr(true), ptr(false), false
			s.Guard, s.Policy = nft.GuardAddresses, nft.Isolated
			s.NonMasquerade = []netip.Prefix{nstest.Prefix("10.0.0.0/8"), nstest.Prefix("fd00::/8")}
			s.LeaseDir = "/srv/l"
			s.StateDir, s.Mark = "/srv/t", 0x40000
		}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			want := tt.from
			if tt.change != nil {
				tt.change(&want)
			}
			expect.NoDiff(t, cmp.Diff(want, settingsOf(parsed(t, tt.fields)), cmpopts.EquateComparable(netip.Prefix{})), "settings")
		})
	}
}

func TestMarkIsOneBit(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		json string
		want Mark // 0: refused
	}{
		{`4096`, 0x1000}, {`"0x1000"`, 0x1000}, {`"4096"`, 0x1000}, {`1`, 1}, {`"0x80000000"`, 1 << 31}, {`2147483648`, 1 << 31},
		{`0`, 0}, {`"0x3"`, 0}, {`-1`, 0}, {`4294967296`, 0}, {`""`, 0}, {`"mark"`, 0}, {`1.0`, 0}, {`null`, 0}, {`{}`, 0},
	} {
		var m Mark
		err := m.UnmarshalJSON([]byte(tt.json))
		if m != tt.want || (err == nil) != (tt.want != 0) {
			t.Errorf("%s gives %#x, %v; want %#x", tt.json, uint32(m), err, uint32(tt.want))
		}
	}
}

func TestWhatAConfigurationMaySay(t *testing.T) {
	t.Parallel()
	for _, fields := range []string{
		``,
		// What runtimes and others put in.
		`"capabilities": {"portMappings": true, "whatever": false}`,
		`"runtimeConfig": {"cgroupPath": "/x", "whatever": 1}`,
		`"args": {"cni": {"labels": [{"key": "a", "value": "b"}], "mtu": "big", "sysctl": 7}, "whatever": 1}`,
		`"prevResult": {"cniVersion": "1.1.0", "whatever": 1}`,
		`"cni.dev/valid-attachments": [{"containerID": "c1", "ifname": "eth0"}], "cni.dev/attachments": 7, "cni.dev/": null`,
		`"_comment": "for humans", "_": [], "_mtu": "not a number"`,
		// Fields of the reference that ask for nothing.
		`"promiscMode": false, "macspoofchk": false, "vlan": 0, "vlanTrunk": [], "preserveDefaultVlan": false`,
		`"vlanTrunk": null`, `"vlanTrunk": [{}]`, `"preserveDefaultVlan": true`,
		// VLANs.
		`"vlan": 2`, `"vlan": 4094, "preserveDefaultVlan": true`, `"vlan": 7, "vlanTrunk": [{"minID": 1, "maxID": 4094, "id": 7}]`,
		`"vlan": 7, "mode": "lan", "uplink": "eth0"`, `"vlan": 1, "mode": "l2"`,
		`"ipMasqBackend": "nftables"`, `"ipMasqBackend": ""`, `"ipMasqBackend": null`,
		// Bounds.
		`"mtu": 0`, `"mtu": 68`, `"mtu": 65535`, `"bridge": "fifteen-bytes-x"`, `"bridge": ""`,
		`"logLevel": "debug"`, `"logLevel": "WARN"`, `"stateDir": ""`, `"logFile": ""`,
		// The ipam's own fields are the ipam's to judge.
		`"ipam": {}`, `"ipam": null`, `"ipam": {"type": "whatever", "x": 1}`,
		`"disableContainerInterface": true, "ipam": {}`,
	} {
		expect.Success(t, expect.Err(parseStrict(with(fields))), "%s", fields)
	}
}

// A field that its first steps leave out is named here: see "Add an option" in CONTRIBUTING.md.
func TestAFieldIsNamedByEachPlaceThatLacksIt(t *testing.T) {
	t.Parallel()
	alone := strings.Fields("cniVersion type prevResult cni.dev/valid-attachments forwardMark ipMasqBackend vlanTrunk preserveDefaultVlan")
	bridge := strings.Fields(`cniVersion name type prevResult cni.dev/valid-attachments stateDir leaseDir forwardMark logFile logLevel
		bridge isGateway isDefaultGateway forceAddress ipMasq ipMasqBackend mtu hairpinMode enabledad promiscMode macspoofchk
		disableContainerInterface portIsolation vlan vlanTrunk preserveDefaultVlan`)
	none, noBridge := new(NetConf).settings(), new(NetConf)
	noBridge.asBridge()
	for _, f := range reflect.VisibleFields(reflect.TypeFor[NetConf]()) {
		name, c := f.Tag.Get("json"), new(NetConf)
		if name == "" {
			continue
		}
		switch v := reflect.ValueOf(c).Elem().FieldByIndex(f.Index); v.Kind() {
		case reflect.Bool:
			v.SetBool(true)
		case reflect.String:
			v.SetString("x")
		case reflect.Int:
			v.SetInt(1)
		case reflect.Uint16, reflect.Uint32, reflect.Uint64:
			v.SetUint(1)
		case reflect.Pointer:
			v.Set(reflect.New(v.Type().Elem()))
			if v.Elem().Kind() == reflect.Bool {
				v.Elem().SetBool(name == "lanGuard")
			}
		case reflect.Slice:
			v.Set(reflect.MakeSlice(v.Type(), 1, 1))
		default: // others read sections of their own
			continue
		}
		expect.That(t, slices.Contains(alone, name) || len(c.problems()) > 0 || !reflect.DeepEqual(c.settings(), none),
			"%s: neither settings nor problems (netconf.go) reads it", name)
		c.asBridge()
		expect.That(t, slices.Contains(bridge, name) || reflect.DeepEqual(c, noBridge),
			"%s: asBridge (netconf.go) keeps it, which the reference's bridge does not know", name)
	}
}

func TestAnExemptKeyIsOneOnlyAtTheTop(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		path, key string
		want      bool
	}{
		{"", "cni.dev/whatever", true}, {"", "_comment", true},
		{"", "cni.dev", false}, {"", "comment", false}, {"", "", false},
		{"dns", "_comment", false}, {"dns", "cni.dev/x", false},
	} {
		expect.Equal(t, exempt(tt.path, tt.key), tt.want, "exempt(%q, %q) =", tt.path, tt.key)
	}
}

func TestLenientParsingKeepsWhatIsThere(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		name, conf string
		want       func(*NetConf)
	}{
		{"unknown fields", `{"name": "pods", "colour": "blue", "bridge": "br7"}`,
			func(c *NetConf) { c.Bridge = "br7" }},
		{"wrong types", `{"mtu": "big", "name": "pods", "deadline": 5, "forwardMark": 3, "portIsolation": "yes", "bridge": "br7"}`,
			func(c *NetConf) { c.Bridge = "br7" }},
		{"the last of two", `{"name": "other", "name": "pods"}`, func(*NetConf) {}},
		{"refused fields", `{"name": "pods", "vlan": 7, "promiscMode": true, "mode": "macvlan"}`,
			func(c *NetConf) { c.VLAN, c.PromiscMode, c.Mode = 7, true, "macvlan" }},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			want := &NetConf{Common: Common{CNIVersion: "0.1.0", Name: "pods"}}
			tt.want(want)
			got, err := parseLenient([]byte(tt.conf))
			must.Succeed(t, err)
			expect.NoDiff(t, cmp.Diff(want, got, everyField()...), "configuration")
			// Teardown goes by the settings: those must be usable whatever was there.
			s := settingsOf(got)
			if s.StateDir == "" || got.deadline() <= 0 || s.Bridge == "" || s.Mark == 0 {
				t.Errorf("settings lack something: %+v", s)
			}
		})
	}
}

func TestLenientParsingNeedsJSON(t *testing.T) {
	t.Parallel()
	for _, conf := range []string{``, `{"name": "pods"`, `{"name" "pods"}`, `{"name": "pods"}}`} {
		_, err := parseLenient([]byte(conf))
		expect.Equal(t, code(err), codeDecoding, "%q: %v, want code %d", conf, err, codeDecoding)
	}
}

// What is not on the list gets deleted, so half a list must never pass for one.
func TestListOfValidAttachments(t *testing.T) {
	t.Parallel()
	one := types.GCAttachment{ContainerID: "c1", IfName: "eth0"}
	for _, tt := range []struct {
		json string
		want []types.GCAttachment
		err  string
	}{
		{"", nil, "no error"},
		{"null", nil, "no error"},
		{"[]", []types.GCAttachment{}, "no error"},
		{`[{"containerID": "c1", "ifname": "eth0", "whatever": 1}]`, []types.GCAttachment{one}, "no error"},
		{`{}`, nil, "code 6: cni.dev/valid-attachments: json: cannot unmarshal object into Go value of type []types.GCAttachment"},
		{`[{"containerID": "c1", "ifname": "eth0"}, {"containerID": 7, "ifname": "eth0"}]`, nil,
			"code 6: cni.dev/valid-attachments: json: cannot unmarshal number into Go struct field GCAttachment.containerID of type string"},
		{`[{"containerID": "c1", "ifname": "eth0"}, null]`, nil, "code 6: cni.dev/valid-attachments[1] lacks its containerID or its ifname"},
		{`[{"containerID": "c1"}]`, nil, "code 6: cni.dev/valid-attachments[0] lacks its containerID or its ifname"},
	} {
		// As a verb gets it.
		conf := `{"name": "pods"}`
		if tt.json != "" {
			conf = `{"name": "pods", "cni.dev/valid-attachments": ` + tt.json + `}`
		}
		c, err := parseLenient([]byte(conf))
		must.Succeed(t, err)
		got, err := c.validAttachments()
		expect.NoDiff(t, cmp.Diff(tt.err, describe(err)), "%s: error", tt.json)
		expect.NoDiff(t, cmp.Diff(tt.want, got), "%s: list", tt.json)
	}
}

func TestTeardownGoesByADirectoryThatItCanUse(t *testing.T) {
	t.Parallel()
	conf := &NetConf{Common: Common{StateDir: "relative"}, Mode: "nonsense"}
	expect.Equal(t, settingsOf(conf).StateDir, network.DefaultStateDir, "stateDir is")
}

func TestIPAMFieldsAreReadFromWhateverIsThere(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct{ ipam, wantType, wantDir string }{
		{``, "", ""}, {`null`, "", ""}, {`[]`, "", ""}, {`"host-local"`, "", ""},
		{`{"type": "host-local", "dataDir": "/d"}`, "host-local", "/d"},
		{`{"type": 7, "dataDir": ["/d"]}`, "", ""},
		{`{"dataDir": "/d"}`, "", "/d"},
	} {
		c := &NetConf{}
		must.Succeed(t, c.IPAM.UnmarshalJSON([]byte(tt.ipam)))
		if c.IPAM.Type != tt.wantType || c.IPAM.DataDir != tt.wantDir {
			t.Errorf("%s: type %q, dataDir %q", tt.ipam, c.IPAM.Type, c.IPAM.DataDir)
		}
	}
}

func TestRuntimeConfig(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct{ json, want string }{
		{`null`, "no error"}, {`{}`, "no error"},
		{`{"mac": "02:00:00:00:00:01", "portMappings": [], "bandwidth": {}, "ips": ["10.0.0.1"]}`, "no error"},
		{`{"portMappings": [{"hostPort":80, "containerPort": 80, "other": 1}], "unknown": {}}`, "no error"},
		{`{"mac": 7}`, `code 7: field "runtimeConfig.mac": expected a string, got the number 7`},
		{`{"ipRanges": [[{"subnet": "x"}]]}`, `code 7: field "runtimeConfig.ipRanges[0][0].subnet": expected an address with a prefix length, like "10.1.0.0/16", got the string "x"`},
	} {
		_, err := parseStrict(with(`"runtimeConfig": ` + tt.json))
		expect.NoDiff(t, cmp.Diff(tt.want, describe(err)), "%s", tt.json)
	}
}

func TestThePodsMACComesFromTheFirstThatNamesOne(t *testing.T) {
	t.Parallel()
	const first, second, third = "02:00:00:00:00:01", "02:00:00:00:00:02", "02:00:00:00:00:03"
	cni := func(mac string) string { return `{"cni": {"mac": "` + mac + `"}}` }
	for _, tt := range []struct {
		name              string
		rc, args, cniArgs string
		want              string // a MAC, or an error
	}{
		{"none", "", "", "", ""},
		{"all three", first, cni(second), third, first},
		{"args over CNI_ARGS", "", cni(second), third, second},
		{"CNI_ARGS", "", "", third, third},
		{"capitals", "", "", "0A:58:0A:3D:00:02", "0a:58:0a:3d:00:02"},
		{"no MAC at all", "nonsense", cni(second), third,
			`code 7: runtimeConfig.mac "nonsense" is not the MAC of one interface, such as 02:00:5e:10:00:01`},
		{"a group's MAC", "", cni("01:00:5e:00:00:01"), "",
			`code 7: args.cni.mac "01:00:5e:00:00:01" is not the MAC of one interface, such as 02:00:5e:10:00:01`},
		{"eight bytes", "", "", "02:00:00:00:00:00:00:01",
			`code 7: MAC in CNI_ARGS "02:00:00:00:00:00:00:01" is not the MAC of one interface, such as 02:00:5e:10:00:01`},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			c := parsed(t, `"runtimeConfig": {"mac": "`+tt.rc+`"}, "args": `+orNull(tt.args))
			mac, err := c.podMAC(map[string]string{"MAC": tt.cniArgs})
			got := mac.String()
			if err != nil {
				got = describe(err)
			}
			if got != tt.want {
				t.Errorf("got  %s\nwant %s", got, tt.want)
			}
		})
	}
}

// everyField compares configurations whole.
func everyField() []cmp.Option {
	ours := cmp.Exporter(func(t reflect.Type) bool { return strings.HasPrefix(t.PkgPath(), "github.com/tombolo-cni/") })
	return []cmp.Option{ours, netipValues()}
}

func orNull(text string) string {
	if text == "" {
		return "null"
	}
	return text
}

// settings are what a configuration stands for.
type settings struct {
	network.Network
	StateDir, LeaseDir string
	Mark               uint32
}

func settingsOf(c *NetConf) settings {
	return settings{c.settings(), c.stateDir(), c.leaseDir(), c.mark()}
}

// parseStrict and parseLenient read configurations of the plugin itself, for an ADD and for a DEL.
func parseStrict(data []byte) (*NetConf, error)  { return parsedFor("ADD", data) }
func parseLenient(data []byte) (*NetConf, error) { return parsedFor("DEL", data) }

func parsedFor(verb string, data []byte) (*NetConf, error) {
	c := (&Plugin{}).newCall()
	c.verb = verb
	if err := c.parse(data); err != nil {
		return nil, err
	}
	if err := c.refuse(); err != nil {
		return nil, err
	}
	return c.configuration.(*NetConf), nil
}

// What another plugin has in its configuration does not keep host-local or static from giving its pods addresses.
func TestAnIPAMPluginByNameTakesTheFieldsOfOthers(t *testing.T) {
	t.Parallel()
	for conf, want := range map[string]string{
		`{"name": "n", "logLevel": 3, "deadline": 5, "mtu": "big", "ipam": {"type": "host-local", "subnet": "10.1.0.0/24"}}`: "no error",
		`{"name": "n", "logLevel": "panic", "stateDir": "x"}`:                                                                "no error",
		`{"name": "n", "args": {"cni": {"ips": 7}}}`:                                                                         `code 7: field "args.cni.ips": expected a list, got the number 7`,
	} {
		c := (&Plugin{Name: "host-local"}).newCall()
		c.verb = "ADD"
		must.Succeed(t, c.parse([]byte(conf)))
		expect.Equal(t, describe(c.refuse()), want, "%s", conf)
	}
}
