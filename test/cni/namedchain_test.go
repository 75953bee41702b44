package cni

import (
	"fmt"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
)

// Whole chains at once, by names alone, give each pod what it asks for, and leave nothing.
func TestChainsByNameAtOnce(t *testing.T) {
	t.Parallel()
	const main = `{"type":"bridge","isGateway":true,"ipMasq":true,"ipam":{"type":"host-local","dataDir":"DATA/n","subnet":"10.5.0.0/24"}}`
	s := newSide(t, referenceDir(t), byName())
	var sides []*side
	for i := range 8 {
		s.of(fmt.Sprint(i))
		one := *s
		one.results = map[string]string{}
		sides = append(sides, &one)
	}
	each := func(what string) {
		t.Helper()
		nstest.NoErrors(t, what, nstest.AtOnce(sides, func(i int, one *side) error {
			one.chain(what, fmt.Sprint(i), []string{
				main, portmapping("", fmt.Sprintf(`{"hostPort":%d,"containerPort":80,"protocol":"tcp"}`, 8000+i)), `{"type":"firewall","ingressPolicy":"same-bridge"}`,
				`{"type":"bandwidth","ingressRate":80000000,"ingressBurst":800000,"egressRate":40000000,"egressBurst":400000}`,
			})
			return nil
		}))
		o := s.operate("check", "--state", s.state)
		expect.That(t, o.status == 0, "check after %s: %s%s", what, o.stdout, o.stderr)
	}
	each("ADD")
	n := strings.Count(s.run("nft", "list", "map", "inet", "tombolo", "hostports4"), "tcp . 80")
	expect.That(t, n == len(sides), "%d ports lead to pods, want %d", n, len(sides))
	each("DEL")
	left, _ := filepath.Glob(s.state + "/*/net/*.json")
	expect.That(t, len(left) == 0, "records are left: %q", left)
	rules := s.run("nft", "list", "table", "inet", "tombolo")
	expect.That(t, !regexp.MustCompile(`10\.5\.0\.[1-9]|tcp \. 80`).MatchString(rules), "elements are left:\n%s", rules)
}
