package cni

import (
	"bytes"
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/containernetworking/cni/pkg/types"
	"github.com/google/go-cmp/cmp"

	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
)

// routing is a case of testdata/routes.jsonl: the addresses and routes that a pod gets.
type routing struct {
	Name, From, Version string
	IPAM                map[string]any  `json:"ipam"`   // the section of host-local or static
	Answer              json.RawMessage `json:"answer"` // the result of another plugin
	Bridge              map[string]any  `json:"bridge"` // fields of the reference's bridge
	Net1                map[string]any  `json:"net1"`   // the section of the pod's second network
	// Differs is the part of docs/drop-in.md that names the difference to the reference. Ours are parts of our outcome.
	Differs string
	Ours    []string
}

// conf returns the configuration of the pod's first network, or of its second.
func (r *routing) conf(ifName string) string {
	fields := map[string]any{"cniVersion": "1.0.0", "name": "of-" + ifName, "type": "bridge", "stateDir": "STATE"}
	fields["bridge"] = "br-" + ifName
	ipam := maps.Clone(r.IPAM)
	switch {
	case ifName == "net1":
		ipam = maps.Clone(r.Net1)
	case ipam == nil:
		ipam = map[string]any{"type": fakeIPAM, "log": "DATA/log", "answer": r.Answer}
	}
	if ipam["type"] == "host-local" {
		ipam["dataDir"] = "DATA/n"
	}
	if ifName == "eth0" {
		maps.Copy(fields, r.Bridge)
		if r.Version != "" {
			fields["cniVersion"] = r.Version
		}
	}
	fields["ipam"] = ipam
	text, _ := json.Marshal(fields)
	return string(text)
}

// inPod lists addresses and routes of the pod's interfaces, of all tables, in the kernel's order.
func (s *side) inPod(p *pod) []string {
	s.Helper()
	var list []string
	for _, args := range []string{"-4 route show table all", "-6 route show table all", "address"} {
		var objects []map[string]any
		must.Succeed(s, json.Unmarshal([]byte(nstest.Run(s, p.NS, "ip", strings.Fields("-j "+args)...)), &objects))
		for _, o := range objects {
			if infos, ok := o["addr_info"].([]any); ok {
				for _, info := range infos {
					if a := info.(map[string]any); a["scope"] == "global" {
						list = append(list, fmt.Sprint(o["ifname"], " has ", a["local"], "/", a["prefixlen"]))
					}
				}
				continue
			}
			text := o["dst"].(string)
			isKernels := strings.HasPrefix(text, "fe80::") || strings.HasPrefix(text, "ff00::")
			if o["dev"] == "lo" || o["table"] == "local" || isKernels {
				continue
			}
			for _, key := range strings.Fields("type gateway via dev table scope prefsrc metric metrics nexthops flags") {
				if value, ok := o[key]; ok && fmt.Sprint(value) != "[]" {
					text += fmt.Sprint(" ", key, " ", value)
				}
			}
			list = append(list, text)
		}
	}
	return list
}

// An IPAM's routes and gateways come to the same as with the reference's bridge: in the pod, in the result and for
// CHECK. Each difference is a sentence of docs/drop-in.md.
func TestRoutesAreAsTheReferences(t *testing.T) {
	t.Parallel()
	doc := strings.Join(strings.Fields(string(must.Of(os.ReadFile("../../docs/drop-in.md")).Get(t))), " ")
	for line := range bytes.Lines(must.Of(os.ReadFile("testdata/routes.jsonl")).Get(t)) {
		var r routing
		must.Succeed(t, json.Unmarshal(line, &r), "%s", line)
		nstest.RunParallel(t, r.Name, func(t *testing.T) {
			expect.Contains(t, doc, r.Differs, "docs/drop-in.md")
			orders := [][]string{{"eth0"}}
			if r.Net1 != nil {
				orders = [][]string{{"eth0", "net1"}, {"net1", "eth0"}}
			}
			for _, order := range orders {
				theirs, ours := sides(t)
				want, got := r.run(theirs, order, false), r.run(ours, order, true)
				diff := cmp.Diff(want, got)
				expect.That(t, (diff == "") == (r.Differs == ""), "DEL in the order %v (-theirs, +ours):\n%s", order, diff)
				for _, part := range r.Ours {
					expect.Contains(t, strings.Join(got, "\n"), part, "the outcome")
				}
			}
		})
	}
}

// run adds a pod to the case's networks, deletes it from them in the given order, and returns the answers and the pod's
// addresses and routes after each step. On our side it also expects CHECK, check and validate to agree with ADD.
func (r *routing) run(s *side, order []string, ours bool) (outcomes []string) {
	s.Helper()
	must.Succeed(s, os.Symlink(must.Of(os.Executable()).Get(s), filepath.Join(s.programs, fakeIPAM)))
	p, results := s.of("a"), map[string]string{}
	call := func(verb, ifName, conf string) outcome {
		o := s.call(bridgeVerb(verb, ifName, conf))
		text := said(s, o.stdout)
		if e := failure(o.stdout); e != nil {
			text = "fails"
			if r.Differs != "" {
				text = fmt.Sprintf("error %d: %s", e.Code, e.Msg)
			}
		}
		outcomes = append(outcomes, fmt.Sprint(verb, " of ", ifName, ": ", text))
		return o
	}
	for _, name := range slices.Sorted(slices.Values(order)) {
		o := call("ADD", name, r.conf(name))
		if ours {
			r.validate(s, r.conf(name), o)
		}
		if results[name] = o.stdout; o.status != 0 {
			return outcomes
		}
	}
	outcomes = append(outcomes, s.inPod(p)...)
	for _, name := range order {
		o := call("CHECK", name, strings.TrimSuffix(r.conf(name), "}")+`,"prevResult":`+results[name]+"}")
		hasCheck := r.Version == "" || r.Version >= "0.4.0"
		expect.That(s, o.status == 0 || !ours || !hasCheck, "CHECK of %s after ADD: %s", name, o.stdout)
	}
	if ours {
		expect.Success(s, s.operate("check", "--state", s.state).err(), "tombolo check")
	}
	for _, name := range order {
		call("DEL", name, r.conf(name))
		outcomes = append(outcomes, s.inPod(p)...)
	}
	return outcomes
}

func bridgeVerb(what, ifName, conf string) verb {
	return verb{plugin: "bridge", verb: what, id: "a", ifName: ifName, conf: conf}
}

// validate expects tombolo validate to accept a configuration if its ADD succeeded, and to refuse it if ADD called the
// configuration invalid.
func (r *routing) validate(s *side, conf string, added outcome) {
	s.Helper()
	nstest.PutFile(s, s.data, "net.conf", strings.NewReplacer("DATA", s.data, "STATE", s.state).Replace(conf))
	v := s.operate("validate", filepath.Join(s.data, "net.conf"))
	if e := failure(added.stdout); e == nil || e.Code == types.ErrInvalidNetworkConfig {
		expect.Equal(s, v.status == 0, e == nil, "validate says %s, and ADD %s", v.stdout, added.stdout)
	}
}
