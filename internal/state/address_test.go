package state

import (
	"net/netip"
	"testing"

	"github.com/tombolo-cni/tombolo/ipam"
)

// Nodes in the field have the host's address with each of the pod's.
func TestHostGatewaysAreOnRecordWithTheirAddresses(t *testing.T) {
	t.Parallel()
	const line = `{"version":1,"state":"ready","network":"lan","containerID":"c1","ifName":"eth0","addresses":[` +
		`{"prefix":"10.0.0.9/24","gateway":"10.0.0.6","through":"10.0.0.6","throughAtADD":"10.0.0.5"},` +
		`{"prefix":"fd00::9/64","gateway":"fe80::1"},{"prefix":"10.1.0.9/24","through":"10.1.0.5"}]}` + "\n"
	got, err := decodeAttachment([]byte(line))
	if err != nil {
		t.Fatal(err)
	}
	p, a := netip.MustParsePrefix, netip.MustParseAddr
	want := &Attachment{
		State: Ready, Network: "lan", ContainerID: "c1", IfName: "eth0",
		Addresses: []ipam.Address{
			{Prefix: p("10.0.0.9/24"), Gateway: a("10.0.0.6")}, {Prefix: p("fd00::9/64"), Gateway: a("fe80::1")}, {Prefix: p("10.1.0.9/24")},
		},
		HostGateways: HostGateways{{p("10.0.0.9/24"), a("10.0.0.6"), a("10.0.0.5")}, {p("10.1.0.9/24"), a("10.1.0.5"), netip.Addr{}}},
	}
	if d := diff(want, got); d != "" {
		t.Errorf("read (-want +got):\n%s", d)
	}
	if again, err := encodeAttachment(got); err != nil || string(again) != line {
		t.Errorf("written again: %v\n%swant\n%s", err, again, line)
	}
	// What is not an address of the pod any more is left out.
	got.Addresses = got.Addresses[1:2]
	if again, _ := encodeAttachment(got); string(again) == line || got.HostGateways.Of(p("fd00::9/64")) != (HostGateway{}) {
		t.Errorf("without its first address: %s", again)
	}
}
