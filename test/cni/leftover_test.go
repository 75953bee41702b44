package cni

import (
	"context"
	"fmt"
	"net/netip"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/tombolo-cni/tombolo/nft/foreign"
)

// Rules of the reference's plugins go as by their own DEL, and those of other pods stay.
func TestRulesOfTheReferenceGoAsByItsOwnDEL(t *testing.T) {
	t.Parallel()
	for _, backend := range []string{"iptables", "nftables"} {
		t.Run(backend, func(t *testing.T) {
			t.Parallel()
			theirs, ours := sides(t)
			plugins := []string{"bridge", "portmap", "firewall"}
			confs := map[string]string{
				"bridge": fmt.Sprintf(`{"cniVersion":"1.0.0","name":"net","type":"bridge","bridge":"cni0","isGateway":true,"ipMasq":true,"ipMasqBackend":%q,
					"ipam":{"type":"host-local","dataDir":"DATA/n","ranges":[[{"subnet":"10.5.0.0/24"}],[{"subnet":"fd05::/64"}]]}}`, backend),
				"portmap": fmt.Sprintf(`{"cniVersion":"1.0.0","name":"net","type":"portmap","backend":%q,
					"runtimeConfig":{"portMappings":[{"hostPort":PORT,"containerPort":80,"protocol":"tcp"},{"hostPort":PORT,"containerPort":53,"protocol":"udp"}]}%%s}`, backend),
				"firewall": `{"cniVersion":"1.0.0","name":"net","type":"firewall","ingressPolicy":"same-bridge"%s}`,
			}
			results := map[string]string{}
			conf := func(plugin, id string) string {
				text := strings.ReplaceAll(confs[plugin], "PORT", map[string]string{"a": "8080", "b": "8081"}[id])
				if plugin == "bridge" {
					return text
				}
				return fmt.Sprintf(text, `,"prevResult":`+results[id])
			}
			// The reference makes the tables of the families in no fixed order.
			ruleset := func(s *side) string {
				tables := strings.SplitAfter(s.run("nft", "-s", "list", "ruleset"), "\n}\n")
				slices.Sort(tables)
				return strings.Join(tables, "")
			}
			for _, s := range []*side{theirs, ours} {
				for _, id := range []string{"a", "b"} {
					for _, plugin := range plugins {
						// The links' names are random; nothing compared here has them.
						o := s.reference(verb{plugin: plugin, verb: "ADD", id: id, conf: conf(plugin, id)})
						if o.status != 0 {
							t.Fatalf("%s: %s%s", plugin, o.stdout, o.stderr)
						}
						results[id] = o.stdout
					}
				}
			}
			before := ruleset(ours)
			if diff := cmp.Diff(ruleset(theirs), before); diff != "" {
				t.Fatalf("the nodes differ before:\n%s", diff)
			}
			for _, plugin := range plugins {
				if o := theirs.reference(verb{plugin: plugin, verb: "DEL", id: "a", conf: conf(plugin, "a")}); o.status != 0 {
					t.Fatalf("%s: %s%s", plugin, o.stdout, o.stderr)
				}
			}
			if ruleset(theirs) == before {
				t.Fatal("the reference's DEL deletes nothing, so there is nothing to compare with")
			}
			conn, err := foreign.Dial(&foreign.Config{NetNS: ours.ns})
			if err != nil {
				t.Fatal(err)
			}
			defer conn.Close()
			pod := &foreign.ReferencePod{Network: "net", ContainerID: "a", IfName: "eth0", Addresses: []netip.Addr{netip.MustParseAddr("10.5.0.2"), netip.MustParseAddr("fd05::2")}}
			other := &foreign.ReferencePod{Network: "net", ContainerID: "c", IfName: "eth0", Addresses: []netip.Addr{netip.MustParseAddr("10.5.0.99")}}
			const all = foreign.ReferenceMasquerade | foreign.ReferenceHostPorts | foreign.ReferenceForward
			for _, p := range []*foreign.ReferencePod{nil, {}, other} {
				if removed, err := conn.RemoveReference(context.Background(), p, all); removed || err != nil {
					t.Errorf("%+v: removed %v, %v", p, removed, err)
				}
			}
			if diff := cmp.Diff(before, ruleset(ours)); diff != "" {
				t.Errorf("rules of others are gone:\n%s", diff)
			}
			for _, part := range []foreign.ReferencePart{foreign.ReferenceMasquerade, foreign.ReferenceHostPorts, foreign.ReferenceForward} {
				if removed, err := conn.RemoveReference(context.Background(), pod, part); !removed || err != nil {
					t.Errorf("part %d: removed %v, %v", part, removed, err)
				}
			}
			if removed, err := conn.RemoveReference(context.Background(), pod, all); removed || err != nil {
				t.Errorf("again: removed %v, %v", removed, err)
			}
			// The reference asks iptables in any case, which makes tables when it looks for them.
			made := regexp.MustCompile(`table ip6? nat \{\n\}\n`)
			if diff := cmp.Diff(made.ReplaceAllString(ruleset(theirs), ""), ruleset(ours)); diff != "" {
				t.Errorf("after the reference's DEL (-) and this one (+):\n%s", diff)
			}
		})
	}
}

// reference calls the reference's own plugin, also on the side where the name is ours.
func (s *side) reference(v verb) outcome {
	s.Helper()
	named := s.programs
	defer func() { s.programs = named }()
	s.programs = os.Getenv(peersVar)
	return s.call(v)
}
