package bridge

import (
	"errors"
	"testing"

	"github.com/tombolo-cni/tombolo"
	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
)

func TestMissingModuleSaysWhatToDo(t *testing.T) {
	t.Parallel()
	var asked string
	probe := func(exists bool) error { return probeNetfilter(func(path string) bool { asked = path; return exists }) }
	expect.Success(t, probe(true))
	expect.Equal(t, asked, "net/bridge/bridge-nf-call-iptables", "asked for")
	err := probe(false)
	expect.Is(t, err, ErrNoNetfilter)
	var opErr *tombolo.OpError
	expect.That(t, errors.As(err, &opErr) && opErr.Object == "br_netfilter", "%v is not an OpError of the module", err)
	for _, word := range []string{"modprobe br_netfilter", "/etc/modules-load.d"} {
		expect.Contains(t, err.Error(), word, "%v does not name", err)
	}
}
