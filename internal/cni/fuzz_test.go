package cni

import (
	"bytes"
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/tombolo-cni/tombolo/internal/ident"
	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/golden"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
)

// seeds are the corpora in testdata/fuzz, which -update writes anew: what runtimes
// send, and what once went wrong.
func seeds() map[string]map[string][]any {
	text := func(s string) []any { return []any{[]byte(s)} }
	results := map[string][]any{
		"null-in-ips":  {[]byte("0.4.0"), []byte(`{"ips": [null]}`)},
		"null-twice":   {[]byte("0.4.0"), []byte(`{"ips": [null], "IPS": [{"address": "10.0.0.1/8"}]}`)},
		"out-of-range": {[]byte("1.1.0"), []byte(`{"ips": [{"address": "10.0.0.1/8", "interface": -1}]}`)},
	}
	for _, v := range []string{"0.2.0", "0.4.0", "1.1.0"} {
		results[v] = []any{[]byte(v), []byte(prevResult(v))}
	}
	return map[string]map[string][]any{
		"FuzzNetConf": {
			"small": text(string(with(""))),
			"full": text(string(with(`"mode": "gateway", "bridge": "cbr0", "mtu": 1400, "isGateway": true, "ipMasq": false, "hairpinMode": null,
				"forwardMark": "0x10", "deadline": "5s", "dns": {"nameservers": ["10.0.0.1"]}, "_comment": [1, {}], "cni.dev/x": null,
				"ipam": {"type": "host-local", "dataDir": "/d"}, "runtimeConfig": {"mac": "02:00:00:00:00:01"}, "args": {"cni": {"mac": "x"}}`))),
			"spoilt":      text(`{"name": "pods", "mtu": "big", "deadline": 5, "forwardMark": 3, "ipMasq": "yes", "bridge": "br7"}`),
			"attachments": text(string(with(`"cni.dev/valid-attachments": [{"containerID": "c1", "ifname": "eth0"}, {"containerID": 7}]`))),
			"twice":       text(`{"name": "a", "name": "b", "ipam": {"type": 7}}`),
		},
		"FuzzPrevResult": results,
		"FuzzRun": {
			"add":     {[]byte("ADD"), []byte("c1"), []byte("eth0"), []byte("/nowhere"), []byte("IgnoreUnknown=1"), with(`"ipam": {"type": "static"}`)},
			"own":     {[]byte("ADD"), []byte("c1"), []byte("eth0"), []byte("/proc/thread-self/ns/net"), []byte(""), with(``)},
			"check":   {[]byte("CHECK"), []byte("c1"), []byte("eth0"), []byte("/nowhere"), []byte(""), with(`"prevResult": ` + prevResult("1.1.0"))},
			"del":     {[]byte("DEL"), []byte("c1"), []byte("eth0"), []byte(""), []byte("="), []byte(`{"name": "pods", "mtu": "big"}`)},
			"gc":      {[]byte("GC"), []byte(""), []byte(""), []byte(""), []byte(""), with(`"cni.dev/valid-attachments": []`)},
			"status":  {[]byte("STATUS"), []byte(""), []byte(""), []byte(""), []byte(""), with(``)},
			"version": {[]byte("VERSION"), []byte(""), []byte(""), []byte(""), []byte(""), []byte(``)},
		},
	}
}

func TestSeedsAreCommitted(t *testing.T) {
	for target, corpus := range seeds() {
		for name, values := range corpus {
			if golden.Updates() {
				nstest.SaveCorpus(t, target, name, values...)
			}
			_, err := os.Stat(filepath.Join("testdata", "fuzz", target, name))
			expect.That(t, err == nil, "%v: -update writes it", err)
		}
	}
}

func FuzzNetConf(f *testing.F) {
	f.Fuzz(func(t *testing.T, data []byte) {
		lenient, lenientErr := parseLenient(data)
		if lenientErr == nil {
			usable(t, lenient)
		} else if code(lenientErr) != codeDecoding {
			t.Errorf("lenient parsing fails for more than its syntax: %v", lenientErr)
		}
		conf, err := parseStrict(data)
		if err != nil {
			c := code(err)
			expect.That(t, c == codeDecoding || c == codeInvalidConfig || c == codeUnsupportedField, "code %d: %v", c, err)
			return
		}
		must.That(t, lenientErr == nil, "ADD takes what DEL does not: %v", lenientErr)
		// An ADD and its DEL have to mean the same network.
		expect.Equal(t, cmp.Diff(conf, lenient, everyField()...), "", "strict and lenient differ (-strict +lenient)")
		usable(t, conf)
		if s := settingsOf(conf); !ident.IsLinkName(s.Bridge) || s.Mark&(s.Mark-1) != 0 || s.MTU != 0 && (s.MTU < mtuMin || s.MTU > mtuMax) {
			t.Errorf("settings are %+v", s)
		}
	})
}

// usable calls for everything that verbs derive from a configuration.
func usable(t *testing.T, conf *NetConf) {
	t.Helper()
	s := settingsOf(conf)
	expect.That(t, s.Mark != 0 && s.Bridge != "" && strings.HasPrefix(s.StateDir, "/"), "settings are %+v", s)
	if s.DefaultGateway && !s.Gateway || s.Down && s.Masquerade {
		t.Errorf("settings contradict themselves: %+v", s)
	}
	if list, err := conf.validAttachments(); err == nil {
		for _, a := range list {
			expect.That(t, a.ContainerID != "" && a.IfName != "", "an attachment without a name: %+v", list)
		}
	}
	if mac, err := conf.podMAC(nil); err == nil && mac != nil && (len(mac) != 6 || mac[0]&1 != 0) {
		t.Errorf("mac %s", mac)
	}
}

func FuzzPrevResult(f *testing.F) {
	f.Fuzz(func(t *testing.T, version, data []byte) {
		res, err := (&Common{PrevResult: data, CNIVersion: string(version)}).prevResult()
		if err != nil {
			if code(err) != codeDecoding {
				t.Errorf("code %d: %v", code(err), err)
			}
			return
		}
		if res == nil {
			return
		}
		// What CHECK, DEL and a chained ADD do with it.
		c := &call{ifName: "eth0", containerID: "c1"}
		for _, a := range c.podAddresses(res) {
			expect.That(t, a.IsValid(), "an invalid address")
		}
		if _, err := routesOf(res.Routes); err != nil && code(err) == 0 {
			t.Errorf("no code: %v", err)
		}
		if _, _, err := c.reported(res); err != nil && code(err) == 0 {
			t.Errorf("no code: %v", err)
		}
		for _, v := range SupportedVersions() {
			if out, err := res.GetAsVersion(v); err == nil {
				expect.Success(t, expect.Err(json.Marshal(out)), "as version %s", v)
			}
		}
	})
}

// FuzzRun is the whole plugin, up to where it would open the kernel.
func FuzzRun(f *testing.F) {
	f.Fuzz(func(t *testing.T, verb, containerID, ifName, netns, args, stdin []byte) {
		if bytes.HasPrefix(netns, []byte("/dev")) {
			t.Skip("opening a device may do something")
		}
		if conf, err := parseLenient(stdin); err == nil && conf.LogFile != "" {
			t.Skip("it would write to any file of this machine")
		}
		env := map[string]string{
			"CNI_COMMAND": string(verb), "CNI_CONTAINERID": string(containerID), "CNI_IFNAME": string(ifName),
			"CNI_NETNS": string(netns), "CNI_ARGS": string(args),
		}
		var out bytes.Buffer
		p := &Plugin{
			Getenv: func(name string) string { return env[name] },
			Stdin:  bytes.NewReader(stdin),
			Stdout: &out,
			Dial:   noKernel,
		}
		status := p.Run()
		switch string(verb) {
		case "VERSION":
			if status != 0 || !json.Valid(out.Bytes()) {
				t.Errorf("status %d: %q", status, out.Bytes())
			}
			return
		case "GC":
			if status == 0 && out.Len() == 0 {
				return // there was no list
			}
		}
		if status != 1 {
			t.Fatalf("status %d: %q", status, out.Bytes())
		}
		decodeError(t, out.Bytes())
	})
}
