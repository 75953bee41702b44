package cni

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/golden"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
	"github.com/tombolo-cni/tombolo/network"
)

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
		nstest.RunParallel(t, version, func(t *testing.T) {
			own, _ := strings.CutPrefix(prevResult(version), "{")
			for name, raw := range map[string]string{
				"the configuration's version": prevResult(version),
				"a version of its own":        `{"cniVersion": "` + version + `", ` + own,
			} {
				confVersion := version
				if name == "a version of its own" {
					confVersion = "1.1.0"
				}
				res, err := (&Common{PrevResult: json.RawMessage(raw), CNIVersion: confVersion}).prevResult()
				if err != nil {
					t.Errorf("%s: %v", name, err)
					continue
				}
				c := &call{ifName: "eth0"}
				expect.NoDiff(t, cmp.Diff(nstest.Addrs("10.61.0.2", "fd61::2"), c.podAddresses(res), netipValues()), "%s: addresses", name)
				expect.That(t, len(res.Routes) == 1 && res.CNIVersion == "1.1.0", "%s: %+v", name, res)
			}
		})
	}
}

func TestNoPrevResult(t *testing.T) {
	t.Parallel()
	for _, raw := range []string{"", "null", "{}", " {} "} {
		res, err := (&Common{PrevResult: json.RawMessage(raw), CNIVersion: "1.1.0"}).prevResult()
		expect.That(t, res == nil && err == nil, "%q: %v, %v", raw, res, err)
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
		_, err := (&Common{PrevResult: json.RawMessage(tt.json), CNIVersion: tt.version}).prevResult()
		fmt.Fprintf(&report, "%s %s\n    %s\n", tt.version, tt.json, describe(err))
	}
	golden.Compare(t, "prevresult-errors.txt", report.String())
}

// A result of a chain has the addresses of other interfaces too.
func TestAddressesOfTheAttachmentAlone(t *testing.T) {
	t.Parallel()
	res, err := (&Common{PrevResult: json.RawMessage(`{
		"interfaces": [{"name": "cbr0"}, {"name": "eth0", "sandbox": "/p"}, {"name": "net1", "sandbox": "/p"}],
		"ips": [{"address": "10.61.0.1/24", "interface": 0}, {"address": "10.61.0.2/24", "interface": 1},
			{"address": "10.62.0.2/24", "interface": 2}, {"address": "fd61::2/64"}]}`), CNIVersion: "1.1.0"}).prevResult()
	must.Succeed(t, err)
	c := &call{ifName: "eth0"}
	expect.NoDiff(t, cmp.Diff(nstest.Addrs("10.61.0.2", "fd61::2"), c.podAddresses(res), netipValues()), "addresses")
}

func TestConfigurationFromARecord(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		origin network.Origin
		want   string
	}{
		{network.Origin{}, `{"cniVersion":"1.0.0","ipam":{},"name":"pods","type":"tombolo"}`},
		{network.Origin{Type: "host-local", Dir: "/d"},
			`{"cniVersion":"1.0.0","ipam":{"dataDir":"/d","type":"host-local"},"name":"pods","type":"tombolo"}`},
	} {
		expect.NoDiff(t, cmp.Diff(tt.want, string(recordedJSON(&tt.origin))), "configuration")
	}
}

func recordedJSON(origin *network.Origin) []byte {
	_, data := recordedConfig("1.0.0", "pods", origin)
	return data
}
