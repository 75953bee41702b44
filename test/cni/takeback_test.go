package cni

import (
	"os"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
)

// A takeback is a node that changed over, whose names an installer gave back to the reference,
// and a container that was restarted by that: its ID is the same.
type takeback struct {
	*side
	plugins []string
}

// newTakeback has the pod a attached by this program, which was deleted and attached again by the
// reference's. It gives what the node had before.
func newTakeback(t *testing.T, address string) (_ *takeback, before string) {
	t.Helper()
	_, s := sides(t)
	b := &takeback{side: s, plugins: []string{
		`{"type":"bridge","bridge":"cni0","isGateway":true,"ipMasq":true,"ipam":{"type":"host-local","dataDir":"DATA/n","subnet":"10.5.0.0/24"` + address + `}}`,
		`{"type":"portmap","runtimeConfig":{"portMappings":[{"hostPort":8080,"containerPort":80,"protocol":"tcp"}]}}`,
		`{"type":"firewall"}`,
		`{"type":"bandwidth","egressRate":100000000,"egressBurst":1000000}`,
	}}
	// What pods share stays when they go.
	for _, run := range []func(what, id string, plugins []string) string{b.chain, b.byReference} {
		run("ADD", "b", b.plugins)
		run("DEL", "b", b.plugins)
	}
	before = b.holds()
	b.chain("ADD", "a", b.plugins)
	b.byReference("DEL", "a", b.plugins)
	vanish(b, b.of("a").path)
	delete(b.pods, "a")
	b.byReference("ADD", "a", b.plugins)
	return b, before
}

func (b *takeback) byReference(what, id string, plugins []string) string {
	b.Helper()
	named := b.programs
	defer func() { b.programs = named }()
	b.programs = os.Getenv(peersVar)
	return b.chain(what, id, plugins)
}

// What the reference made for a container goes with it, also where a record of its life before is left.
func TestDELFindsWhatTheReferenceMadeForARestartedContainer(t *testing.T) {
	t.Parallel()
	b, before := newTakeback(t, "")
	b.chain("DEL", "a", b.plugins)
	b.end("a")
	diff := cmp.Diff(before, b.holds())
	expect.That(t, diff == "", "left (+):\n%s", diff)
}

// The address of a container that the reference restarted is not given away when the rest of its
// life before is reclaimed.
func TestReclaimingLeavesTheAddressOfARestartedContainer(t *testing.T) {
	t.Parallel()
	b, _ := newTakeback(t, `,"rangeStart":"10.5.0.9","rangeEnd":"10.5.0.9"`)
	if o := b.operate("gc", "--state", b.state); o.status != 0 || !strings.Contains(o.stdout, "reclaimed") {
		t.Fatalf("nothing is reclaimed, so nothing is shown: %+v", o)
	}
	if !strings.Contains(b.files(), "10.5.0.9") {
		t.Error("the reservation is gone: " + b.files())
	}
	b.chain("DEL", "a", b.plugins)
	if strings.Contains(b.files(), "10.5.0.9") {
		t.Error("the reservation stays after DEL: " + b.files())
	}
}
