package lease

import (
	"bytes"
	"encoding/json"
	"testing"

	"github.com/tombolo-cni/tombolo/internal/file"
	"github.com/tombolo-cni/tombolo/internal/state"
	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/golden"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
)

// sampleHost is a record of the host's own lease, with every field of Host set.
func sampleHost() *Record {
	r := sample()
	r.Six = nil
	r.State, r.Network, r.ContainerID, r.IfName, r.Pod, r.NetNS, r.HostIf = Bound, hostName, hostName, "eth0", "", "", ""
	r.Policy = Policy{Priority: 1024}
	r.Host = &Host{NIC: "eth0", Permanent: true}
	return r
}

func TestTheFormatOfTheHostsRecordStaysWhatItIs(t *testing.T) {
	t.Parallel()
	line := must.Of(encode(sampleHost())).Get(t)
	var text bytes.Buffer
	must.Succeed(t, json.Indent(&text, line, "", "  "))
	golden.Compare(t, "record-host.json", text.Bytes())
	got := must.Of(decode(text.Bytes())).Get(t)
	want := sampleHost()
	same(t, want, got)
}

func TestHostsRecordsThatCannotBeUsedAreRefused(t *testing.T) {
	t.Parallel()
	for name, spoil := range map[string]func(*Record){
		"of a network":         func(r *Record) { r.Network = "lan" },
		"of a container":       func(r *Record) { r.ContainerID = "c1" },
		"of another interface": func(r *Record) { r.IfName = "eth1" },
		"of no NIC":            func(r *Record) { r.Host = nil },
		"sticky":               func(r *Record) { r.State = Sticky },
		"being added":          func(r *Record) { r.State = Adding },
		"without a lease":      func(r *Record) { r.Lease = nil },
		"without a bridge":     func(r *Record) { r.Bridge = "" },
	} {
		t.Run(name, func(t *testing.T) {
			r := sampleHost()
			spoil(r)
			line, err := encode(r)
			expect.That(t, err != nil, "encoded as %s", line)
			expect.Is(t, expect.Err(decode(state.Encode(&r.Version, r))), file.ErrDamaged, "decoded with")
		})
	}
}
