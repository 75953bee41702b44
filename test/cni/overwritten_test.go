package cni

import (
	"fmt"
	"path/filepath"
	"regexp"
	"slices"
	"testing"

	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
)

// An installer's cp gives one name back to the reference while pods run, and the others stay Tombolo's: each pod of
// either keeps its host port, or gets one. Once the name is Tombolo's again, DEL leaves nothing of either.
func TestOneNameGoesBackWithPodsRunning(t *testing.T) {
	t.Parallel()
	list := func(port int) []string {
		return []string{
			`{"type":"bridge","isGateway":true,"ipMasq":true,"hairpinMode":true,"ipam":{"type":"host-local","dataDir":"DATA/n","subnet":"10.5.0.0/24","routes":[{"dst":"0.0.0.0/0"}]}}`,
			portmapping("", fmt.Sprintf(`{"hostPort":%d,"containerPort":80,"protocol":"tcp"}`, port)),
			`{"type":"firewall","ingressPolicy":"same-bridge"}`,
			`{"type":"bandwidth","ingressRate":80000000,"ingressBurst":800000,"egressRate":80000000,"egressBurst":800000}`,
		}
	}
	for _, name := range []string{"bridge", "host-local", "portmap", "firewall", "bandwidth"} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			peers := referenceDir(t)
			s := newSide(t, peers, nil)
			s.outside()
			ports := map[string]int{"a": 8080, "b": 8081, "c": 8082}
			add := func(id string) {
				t.Helper()
				s.chain("ADD", id, list(ports[id]))
				s.of(id).serve(t, "tcp", 80)
			}
			must.Succeed(t, s.operate("install", "--names", "all", s.programs).err(), "install")
			add("a")
			must.Succeed(t, copyProgram(filepath.Join(peers, name), filepath.Join(s.programs, name)))
			add("b")
			s.chain("DEL", "a", list(ports["a"])) // by other plugins than its ADD was by
			add("c")
			for _, id := range []string{"b", "c"} {
				wantPing(t, s.of(id).NS, outside4)
				expect.Success(t, expect.Err(askPort(t, s.ns, "tcp", uplink4, ports[id])), "host port of %s", id)
			}
			must.Succeed(t, s.operate("install", "--names", "all", s.programs).err(), "install")
			s.chain("DEL", "b", list(ports["b"]))
			s.chain("DEL", "c", list(ports["c"]))
			all := s.run("iptables-save") + s.run("ip", "link", "show")
			if left := regexp.MustCompile(`(?m)^-A CNI-(DN-|FORWARD -[sd]).*|-j CNI-[0-9a-f]{24}|bwp.*`).FindAllString(all, -1); len(left) > 0 {
				t.Errorf("left of the reference's: %q", left)
			}
			for id := range ports {
				vanish(t, s.of(id).path)
			}
			expect.Success(t, s.operate("gc", "--state", s.state).err(), "gc")
			if left := s.owners(); slices.ContainsFunc(left, func(owner string) bool { return owner != "net" }) {
				t.Errorf("elements are left: %q", left)
			}
			left := s.reservations(filepath.Join(s.data, "n", "net"))
			expect.That(t, len(left) == 0, "addresses are left: %v", left)
		})
	}
}
