package cni

import (
	"encoding/json"
	"fmt"
	"net/netip"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/tombolo-cni/tombolo/internal/ident"
	"github.com/tombolo-cni/tombolo/internal/state"
)

func addrs(texts ...string) []netip.Addr {
	var list []netip.Addr
	for _, s := range texts {
		list = append(list, netip.MustParseAddr(s))
	}
	return list
}

func manyAddrs(n int) []netip.Addr {
	var list []netip.Addr
	for i := range n {
		list = append(list, netip.MustParseAddr(fmt.Sprintf("2001:db8:1111:2222:3333:4444:5555:%x", 0x1000+i)))
	}
	return list
}

func TestAliasComesBackAsItWas(t *testing.T) {
	t.Parallel()
	hash := ident.Hash("pods", "c1", "eth0")
	long := strings.Repeat("n", 250) // the longest name of a network
	for _, tt := range []struct {
		name      string
		network   string
		addresses []netip.Addr
		want      string
		lost      bool // the addresses do not fit
	}{
		{"dual-stack", "pods", addrs("10.61.0.2", "fd61::2"), "tombolo:1:" + hash + ":pods:10.61.0.2,fd61::2", false},
		{"no address", "pods", nil, "tombolo:1:" + hash + ":pods:", false},
		{"a long network", long, addrs("10.61.0.2"), "tombolo:1:" + hash + ":#" + ident.Hash(long, "", "") + ":10.61.0.2", false},
		{"the longest name that stays", long[:64], addrs("fd61::2"), "tombolo:1:" + hash + ":" + long[:64] + ":fd61::2", false},
		{"too many addresses", "pods", manyAddrs(9), "tombolo:1:" + hash + ":pods:", true},
		{"too many for a long network", long, manyAddrs(6), "tombolo:1:" + hash + ":#" + ident.Hash(long, "", "") + ":", true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			got := formatAlias(hash, tt.network, tt.addresses)
			if got != tt.want {
				t.Errorf("alias is %q\nwant     %q", got, tt.want)
			}
			want := alias{hash: hash, network: networkToken(tt.network), addresses: tt.addresses}
			if tt.lost {
				want.addresses = nil
			}
			back, ok := parseAlias(got)
			if diff := cmp.Diff(want, back, netipValues(), cmp.AllowUnexported(alias{})); diff != "" || !ok {
				t.Errorf("read back: %t (-want +got):\n%s", ok, diff)
			}
			if !strings.HasPrefix(got, aliasOwner(hash)) {
				t.Errorf("the alias does not begin with its owner's %q", aliasOwner(hash))
			}
		})
	}
}

func TestAliasFillsTheKernelsBufferAndNoMore(t *testing.T) {
	t.Parallel()
	hash := ident.Hash("pods", "c1", "eth0")
	lengths := map[bool]int{}
	for n := range 64 {
		network := strings.Repeat("n", n+1)
		for count := range 10 {
			got := formatAlias(hash, network, manyAddrs(count))
			if len(got) > 255 {
				t.Fatalf("%d bytes: %s", len(got), got)
			}
			a, _ := parseAlias(got)
			lengths[len(a.addresses) == count] = max(lengths[len(a.addresses) == count], len(got))
		}
	}
	if lengths[true] != 255 {
		t.Errorf("the longest alias with its addresses has %d bytes: one of 255 would do", lengths[true])
	}
}

func TestAliasesOfOthers(t *testing.T) {
	t.Parallel()
	for _, s := range []string{
		"", "eth0", "tombolo", "tombolo:1:", "tombolo:1:0123456789a", "tombolo:1:0123456789a:pods", "tombolo:2:0123456789a:pods:10.0.0.1",
		"tombolo:1:0123456789:pods:10.0.0.1", "tombolo:1:0123456789ab:pods:10.0.0.1", "tombolo:1:::", " tombolo:1:0123456789a:pods:",
		"tombolo:1:0123456789A:pods:", "tombolo:1:0123456789/:pods:", "tombolo:1:0123456789x:pods:",
	} {
		if a, ok := parseAlias(s); ok {
			t.Errorf("%q is taken for %+v", s, a)
		}
	}
	// What a later version may add to the addresses is passed over.
	a, ok := parseAlias("tombolo:1:0123456789a:pods:10.0.0.1,later,fd00::1")
	if diff := cmp.Diff(addrs("10.0.0.1", "fd00::1"), a.addresses, netipValues()); diff != "" || !ok {
		t.Errorf("addresses (-want +got):\n%s", diff)
	}
}

func TestNetworkTokensDiffer(t *testing.T) {
	t.Parallel()
	long := strings.Repeat("n", 65)
	if a, b := networkToken(long+"a"), networkToken(long+"b"); a == b || len(a) > 64 || isIdentifier(a) {
		t.Errorf("long names give %q and %q", a, b)
	}
	if got := networkToken(long[:64]); got != long[:64] {
		t.Errorf("a name of 64 bytes gives %q", got)
	}
}

// The short name of an attachment is the same wherever it stands.
func TestHashesAgree(t *testing.T) {
	t.Parallel()
	c := &call{network: "pods", containerID: "c1", ifName: "eth0"}
	rec := &state.Attachment{Network: "pods", ContainerID: "c1", IfName: "eth0"}
	if rec.Hash() != c.hash() || c.hostName() != "veth"+c.hash() {
		t.Errorf("record %s, call %s, port %s", rec.Hash(), c.hash(), c.hostName())
	}
}

// results of one attachment as the versions have it.
func prevResult(version string) string {
	switch version {
	case "0.1.0", "0.2.0":
		return `{"ip4": {"ip": "10.61.0.2/24", "gateway": "10.61.0.1", "routes": [{"dst": "0.0.0.0/0"}]},
			"ip6": {"ip": "fd61::2/64", "gateway": "fd61::1"}}`
	case "0.3.0", "0.3.1", "0.4.0":
		return `{"interfaces": [{"name": "eth0", "sandbox": "/p"}],
			"ips": [{"version": "4", "interface": 0, "address": "10.61.0.2/24", "gateway": "10.61.0.1"},
				{"version": "6", "interface": 0, "address": "fd61::2/64"}], "routes": [{"dst": "0.0.0.0/0"}]}`
	}
	return `{"interfaces": [{"name": "eth0", "sandbox": "/p"}],
		"ips": [{"interface": 0, "address": "10.61.0.2/24", "gateway": "10.61.0.1"},
			{"interface": 0, "address": "fd61::2/64"}], "routes": [{"dst": "0.0.0.0/0"}]}`
}

func TestPrevResultOfEachVersion(t *testing.T) {
	t.Parallel()
	for _, version := range SupportedVersions() {
		t.Run(version, func(t *testing.T) {
			t.Parallel()
			own, _ := strings.CutPrefix(prevResult(version), "{")
			for name, raw := range map[string]string{
				"the configuration's version": prevResult(version),
				"a version of its own":        `{"cniVersion": "` + version + `", ` + own,
			} {
				confVersion := version
				if name == "a version of its own" {
					confVersion = "1.1.0"
				}
				res, err := parsePrevResult(&NetConf{PrevResult: json.RawMessage(raw)}, confVersion)
				if err != nil {
					t.Errorf("%s: %v", name, err)
					continue
				}
				h := &host{call: &call{ifName: "eth0"}}
				if diff := cmp.Diff(addrs("10.61.0.2", "fd61::2"), h.addressesIn(res), netipValues()); diff != "" {
					t.Errorf("%s: addresses (-want +got):\n%s", name, diff)
				}
				if len(res.Routes) != 1 || res.CNIVersion != "1.1.0" {
					t.Errorf("%s: %+v", name, res)
				}
			}
		})
	}
}

func TestNoPrevResult(t *testing.T) {
	t.Parallel()
	for _, raw := range []string{"", "null", "{}", " {} "} {
		res, err := parsePrevResult(&NetConf{PrevResult: json.RawMessage(raw)}, "1.1.0")
		if res != nil || err != nil {
			t.Errorf("%q: %v, %v", raw, res, err)
		}
	}
}

func TestPrevResultsThatAreRubbish(t *testing.T) {
	t.Parallel()
	var report strings.Builder
	for _, tt := range []struct{ version, json string }{
		{"1.1.0", `[1]`}, {"1.1.0", `"x"`}, {"1.1.0", `7`},
		{"1.1.0", `{"cniVersion": "9.9.9"}`},
		{"0.4.0", `{"IPs": [null]}`}, {"0.4.0", `{"ips": [null], "IPS": []}`},
		{"1.1.0", `{"ips": {}}`}, {"1.1.0", `{"ips": [null]}`}, {"0.4.0", `{"ips": [null]}`},
		{"1.1.0", `{"ips": [{"address": "10.0.0.1"}]}`},
		{"1.0.0", `{"interfaces": [{"name": "a"}, null]}`}, {"0.3.0", `{"interfaces": [null]}`},
		{"1.1.0", `{"routes": [null]}`}, {"0.3.1", `{"routes": [null]}`},
		{"1.1.0", `{"interfaces": [{"name": "a"}], "ips": [{"address": "10.0.0.1/8", "interface": 1}]}`},
		{"1.1.0", `{"ips": [{"address": "10.0.0.1/8", "interface": -1}]}`},
	} {
		_, err := parsePrevResult(&NetConf{PrevResult: json.RawMessage(tt.json)}, tt.version)
		fmt.Fprintf(&report, "%s %s\n    %s\n", tt.version, tt.json, describe(err))
	}
	golden(t, "prevresult-errors.txt", report.String())
}

// A result of a chain has the addresses of other interfaces too.
func TestAddressesOfTheAttachmentAlone(t *testing.T) {
	t.Parallel()
	res, err := parsePrevResult(&NetConf{PrevResult: json.RawMessage(`{
		"interfaces": [{"name": "cbr0"}, {"name": "eth0", "sandbox": "/p"}, {"name": "net1", "sandbox": "/p"}],
		"ips": [{"address": "10.61.0.1/24", "interface": 0}, {"address": "10.61.0.2/24", "interface": 1},
			{"address": "10.62.0.2/24", "interface": 2}, {"address": "fd61::2/64"}]}`)}, "1.1.0")
	if err != nil {
		t.Fatal(err)
	}
	h := &host{call: &call{ifName: "eth0"}}
	if diff := cmp.Diff(addrs("10.61.0.2", "fd61::2"), h.addressesIn(res), netipValues()); diff != "" {
		t.Errorf("addresses (-want +got):\n%s", diff)
	}
}

func TestConfigurationFromARecord(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		rec  state.Attachment
		want string
	}{
		{state.Attachment{Network: "pods"}, `{"cniVersion":"1.0.0","ipam":{},"name":"pods","type":"tombolo"}`},
		{state.Attachment{Network: "pods", IPAMType: "host-local", DataDir: "/d"},
			`{"cniVersion":"1.0.0","ipam":{"dataDir":"/d","type":"host-local"},"name":"pods","type":"tombolo"}`},
	} {
		if diff := cmp.Diff(tt.want, string(recordedConfig("1.0.0", &tt.rec))); diff != "" {
			t.Errorf("configuration (-want +got):\n%s", diff)
		}
	}
}

func TestWhatTheHostSideOfARecordIs(t *testing.T) {
	t.Parallel()
	on := true
	rec := &state.Attachment{
		Network: "pods", ContainerID: "c1", IfName: "eth0", HostIf: "veth1", Bridge: "cbr0", MTU: 1400, Up: true, Masquerade: true,
		MAC: "02:00:00:00:00:01", HostMAC: "02:00:00:00:00:02", Addresses: dualStack(), Port: state.Port{Hairpin: &on},
	}
	p := portOf(rec)
	if p.Alias != formatAlias(rec.Hash(), "pods", addressesOf(rec)) || p.MAC.String() != rec.HostMAC || p.PeerMAC.String() != rec.MAC ||
		!p.Hairpin || p.Isolated || p.Down || p.MTU != 1400 || p.Name != "veth1" || p.Peer != "eth0" || p.Bridge != "cbr0" {
		t.Errorf("port is %+v", p)
	}
	ep := endpointOf(rec)
	if string(ep.Owner) != rec.Hash() || ep.Network != "pods" || ep.Bridge != "cbr0" || ep.MAC.String() != rec.MAC || !ep.Masquerade {
		t.Errorf("endpoint is %+v", ep)
	}
	if diff := cmp.Diff(addrs("10.61.0.2", "fd61::2"), ep.Addrs, netipValues()); diff != "" {
		t.Errorf("endpoint's addresses (-want +got):\n%s", diff)
	}
	// A record without MACs, as one that never came to its end: nothing is made up.
	if p := portOf(&state.Attachment{}); p.MAC != nil || p.PeerMAC != nil || !p.Down {
		t.Errorf("port of an empty record is %+v", p)
	}
}

// A bridge that is made anew answers under the MAC that its pods have in their
// neighbour tables.
func TestBridgesMACIsTheSameForALife(t *testing.T) {
	t.Parallel()
	one := &host{epoch: state.Epoch{Boot: "b", ID: "1"}}
	mac := one.bridgeMAC("cbr0")
	if len(mac) != 6 || mac[0]&3 != 2 {
		t.Errorf("%s is not a unicast MAC that is locally administered", mac)
	}
	if again := one.bridgeMAC("cbr0"); again.String() != mac.String() {
		t.Errorf("%s, then %s", mac, again)
	}
	later := &host{epoch: state.Epoch{Boot: "b", ID: "2"}}
	for what, other := range map[string]string{"bridge": one.bridgeMAC("br0").String(), "life": later.bridgeMAC("cbr0").String()} {
		if other == mac.String() {
			t.Errorf("another %s has the same, %s", what, other)
		}
	}
}
