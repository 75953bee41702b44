package cni

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
)

func hostLocal(ranges ...map[string]any) map[string]any {
	set := []any{}
	for _, r := range ranges {
		set = append(set, []any{r})
	}
	return map[string]any{"type": "host-local", "ranges": set}
}

// What is wrong with the node, or with what was asked for, is said in full, and
// leaves nothing.
func TestADDThatIsRefusedLeavesNothing(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		name    string
		prepare func(*testing.T, *node)
		conf    map[string]any
		want    string // with the code, and STATE for the state directory
	}{
		{"pool is full", addNeighbour, map[string]any{"ipam": hostLocal(map[string]any{"subnet": "10.61.0.0/24", "rangeStart": "10.61.0.2", "rangeEnd": "10.61.0.2"})},
			`code 100: network "pods": range 10.61.0.2-10.61.0.2 of 10.61.0.0/24 is full: 1 of 1 addresses reserved (in STATE/ipam/pods): delete pods, run GC, or give the network more addresses`},
		{"address is taken", addNeighbour, map[string]any{"runtimeConfig": map[string]any{"ips": []string{"10.61.0.2"}}},
			`code 101: network "pods": the requested address 10.61.0.2 is taken by container neighbour`},
		{"interface is there", func(t *testing.T, n *node) {
			nstest.Run(t, n.pod, "ip", "link", "add", "eth0", "type", "bridge")
		}, nil, `code 111: add link eth0: the pod has an interface of this name already`},
		{"bridge is none", func(t *testing.T, n *node) {
			nstest.Run(t, n.host, "ip", "link", "add", "cbr0", "type", "veth", "peer", "name", "other-end")
		}, nil, `code 116: ensure bridge cbr0: the link is not a bridge: it is of kind veth; choose another name for the bridge, or delete the link`},
		{"bridge has another's address", func(t *testing.T, n *node) {
			nstest.Run(t, n.host, "ip", "link", "add", "cbr0", "type", "bridge")
			nstest.Run(t, n.host, "ip", "addr", "add", "10.61.0.7/16", "dev", "cbr0")
		}, nil, `code 112: bridge cbr0 has the address 10.61.0.7/16, which overlaps with the gateway 10.61.0.1/24 of network "pods": set forceAddress to replace it, or choose another bridge`},
		{"no gateway", nil, map[string]any{"ipam": map[string]any{"type": "static", "addresses": []any{map[string]any{"address": "10.61.0.2/24"}}}},
			`code 115: ipam "static" gave 10.61.0.2/24 without a gateway, and the bridge is to be one: name the gateway in the ipam, or set isGateway to false`},
		{"gateway of the other family", nil, map[string]any{"ipam": map[string]any{"type": "static", "addresses": []any{map[string]any{"address": "10.61.0.2/24", "gateway": "fd61::1"}}}},
			`code 7: the ipam's ips[0]: the gateway fd61::1 is not of the family of 10.61.0.2/24`},
		{"deadline", nil, map[string]any{"deadline": "1ns"},
			`code 11: ADD of network "pods" was not done within its deadline of 1ns: network "pods": wait for the lock STATE/ipam/pods/lock: context deadline exceeded`},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			n := newNode(t)
			if tt.prepare != nil {
				tt.prepare(t, n)
			}
			before := n.belongings(t)
			a := n.run(t, n.plugin(), "ADD", tt.conf)
			if a.err == nil {
				t.Fatalf("ADD succeeded: %s", a.stdout)
			}
			expect.NoDiff(t, cmp.Diff(tt.want, strings.ReplaceAll(describe(a.err), n.stateDir, "STATE")), "error")
			n.mustHave(t, before)
		})
	}
}
