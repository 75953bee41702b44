package lease

import (
	"bytes"
	"encoding/json"
	"errors"
	"strings"
	"testing"

	"github.com/tombolo-cni/tombolo/internal/file"
	"github.com/tombolo-cni/tombolo/internal/state"
	"github.com/tombolo-cni/tombolo/internal/testutil/golden"
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
	line, err := encode(sampleHost())
	if err != nil {
		t.Fatal(err)
	}
	var text bytes.Buffer
	if err := json.Indent(&text, line, "", "  "); err != nil {
		t.Fatal(err)
	}
	golden.Compare(t, "record-host.json", text.Bytes())
	got, err := decode(text.Bytes())
	if err != nil {
		t.Fatal(err)
	}
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
			if line, err := encode(r); err == nil {
				t.Errorf("encoded as %s", line)
			}
			if _, err := decode(state.Encode(&r.Version, r)); !errors.Is(err, file.ErrDamaged) {
				t.Errorf("decoded with %v, want %v", err, file.ErrDamaged)
			}
		})
	}
}

func TestTroublesAreBelowTheTable(t *testing.T) {
	t.Parallel()
	r := sampleHost()
	r.Error = "no server renews the lease"
	var b bytes.Buffer
	if err := WriteTable(&b, []*Record{r}, at(0)); err != nil {
		t.Fatal(err)
	}
	if got := b.String(); !strings.Contains(got, "bound") || !strings.HasSuffix(got, "\n(host) eth0: no server renews the lease\n") {
		t.Errorf("listed as\n%s", got)
	}
}
