package lease

import (
	"bytes"
	"encoding/json"
	"errors"
	"net/netip"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/file"
	"github.com/tombolo-cni/tombolo/internal/golden"
	"github.com/tombolo-cni/tombolo/internal/state"
	"github.com/tombolo-cni/tombolo/route"
)

// sampleHost is a record of the host's own lease, with every field of Host set.
func sampleHost() *Record {
	r := sample()
	r.Six = nil
	r.State, r.Network, r.ContainerID, r.IfName, r.Pod, r.NetNS, r.HostIf = Adopting, hostName, hostName, "eth0", "", "", ""
	r.Policy = Policy{NoRoutes: true}
	r.Host = &Host{
		NIC: "eth0", Permanent: true,
		Routes: []HostRoute{{
			Dst: netip.MustParsePrefix("0.0.0.0/0"), Via: netip.MustParseAddr("192.0.2.1"), Source: netip.MustParseAddr("192.0.2.9"),
			Table: 254, Metric: 1024, Protocol: 16, Scope: 253, TOS: 4, OnLink: true, MTU: 1400, AdvMSS: 1300, Metrics: []route.Metric{{Number: unix.RTAX_INITCWND, Value: 20}},
		}},
	}
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
	r := sample()
	r.Six = nil
	r.State = Adopting
	if _, err := encode(r); err == nil {
		t.Error("a pod's lease is being adopted")
	}
}

func TestHostRoutesAreKeptWhole(t *testing.T) {
	t.Parallel()
	scope := route.Scope(unix.RT_SCOPE_LINK)
	for _, want := range []route.Route{
		{Dst: netip.MustParsePrefix("192.0.2.0/24"), Link: 7, Source: netip.MustParseAddr("192.0.2.9"), Priority: 1024, Table: 254, Scope: &scope, Protocol: route.ProtocolKernel},
		{Dst: netip.MustParsePrefix("0.0.0.0/0"), Gateway: netip.MustParseAddr("192.0.2.1"), Link: 7, OnLink: true, Priority: 100, Table: 1000, Scope: new(route.Scope),
			Protocol: route.ProtocolDHCP, TOS: 8, MTU: 1400, AdvMSS: 1300, Metrics: []route.Metric{{Number: unix.RTAX_INITCWND, Value: 20}}},
	} {
		if got := HostRouteOf(want).Route(7); !got.Matches(want) || got.Table != want.Table {
			t.Errorf("%v became %v", want, got)
		}
	}
	if got := HostRouteOf(route.Route{Family: unix.AF_INET}).Dst; got != netip.MustParsePrefix("0.0.0.0/0") {
		t.Errorf("a default route became one to %s", got)
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
	if got := b.String(); !strings.Contains(got, "adopting") || !strings.HasSuffix(got, "\n(host) eth0: no server renews the lease\n") {
		t.Errorf("listed as\n%s", got)
	}
}
