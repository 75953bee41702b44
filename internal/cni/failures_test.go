package cni

import (
	"os"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/tombolo-cni/tombolo/internal/state"
	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
)

func TestCallsThatFailAreCountedByVerbAndCode(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	p := n.plugin()
	dir, err := state.Open(n.stateDir)
	must.Succeed(t, err)
	n.run(t, p, "ADD", nil).must(t)
	expect.Failure(t, expect.Err(os.Stat(n.stateDir+"/failures")), "an ADD that succeeds has counted something")
	for _, verb := range []string{"ADD", "ADD", "STATUS"} {
		n.run(t, p, verb, map[string]any{"mtu": map[string]int{"ADD": 0, "STATUS": -1}[verb]})
	}
	n.run(t, p, "CHECK", map[string]any{"unknown": true})
	n.run(t, p, "DEL", map[string]any{"cniVersion": "9.0.0"})
	n.run(t, p, "DEL", nil).must(t)
	list, err := dir.Failures()
	want := []state.Failures{{Verb: "ADD", Code: codeExists, Count: 2}, {Verb: "CHECK", Code: codeUnsupportedField, Count: 1}, {Verb: "DEL", Code: codeIncompatibleVersion, Count: 1}}
	if diff := cmp.Diff(want, list); diff != "" || err != nil {
		t.Errorf("%v, failures (-want +got):\n%s", err, diff)
	}
}
