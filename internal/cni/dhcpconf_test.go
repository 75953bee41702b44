package cni

import (
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/tombolo-cni/tombolo/dhcpc"
	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/network"
)

func dhcpOf(t *testing.T, fields string) (*DHCP, error) {
	t.Helper()
	section := `{"type": "dhcp"`
	if fields != "" {
		section += ", " + fields
	}
	return (&NetConf{IPAM: Section{JSON: []byte(section + "}")}}).dhcp()
}

func TestIdentityOfAPodToItsServer(t *testing.T) {
	t.Parallel()
	id := &identity{network.Key{Network: "lab", ContainerID: "c1", IfName: "eth0"}, "default/db-0"}
	again := &identity{network.Key{Network: "lab", ContainerID: "c2", IfName: "eth0"}, "default/db-0"}
	for by, want := range map[string]string{
		clientByContainer: "\x00c1/lab/eth0",
		clientByPod:       "\x00default/db-0/lab/eth0",
		clientByMAC:       "\x01" + string(id.mac(clientByMAC)),
	} {
		got, err := id.clientID(by, id.mac(by))
		expect.That(t, err == nil && string(got) == want, "%s: %q, %v; want %q", by, got, err, want)
		sameID := must.Of(again.clientID(by, again.mac(by))).Get(t)
		expect.Equal(t, string(got) == string(sameID), (by != clientByContainer), "%s: the pod's next container has the same identity", by)
		mac := id.mac(by)
		expect.That(t, len(mac) == 6 && mac[0]&3 == 2, "%s: MAC %s is none of ours to choose", by, mac)
	}
	nobody := &identity{network.Key{Network: "lab", ContainerID: "c1", IfName: "eth0"}, ""}
	expect.Says(t, expect.Err(nobody.clientID(clientByPod, nil)), "K8S_POD_NAMESPACE", "a pod without a name")
	long := &identity{network.Key{Network: strings.Repeat("n", 250), ContainerID: strings.Repeat("c", 64), IfName: "eth0"}, ""}
	if got, err := long.clientID(clientByContainer, nil); err != nil || len(got) != 33 {
		t.Errorf("an identity that is too long for an option: %d bytes, %v", len(got), err)
	}
}

func TestWhatTheServerIsTold(t *testing.T) {
	t.Parallel()
	conf, err := dhcpOf(t, `"clientID": "pod", "rapidCommit": true,
		"request": [{"skipDefault": true}, {"option": "routers"}, {"option": 6}, {"option": "42"}],
		"provide": [{"option": "vendor-class-identifier", "value": "v1"}, {"option": "user-class", "fromArg": "COLOUR"},
			{"option": "host-name", "value": "printer"}]`)
	must.Succeed(t, err)
	id := &identity{network.Key{Network: "lab", ContainerID: "c1", IfName: "eth0"}, "default/db-0"}
	mac := id.mac(clientByPod)
	args := map[string]string{"K8S_POD_NAME": "db-0", "COLOUR": "red"}
	got, err := conf.Lease(id, mac, args)
	must.Succeed(t, err)
	want := &network.Lease{
		Client: dhcpc.Config{
			MAC: mac, ClientID: []byte("\x00default/db-0/lab/eth0"), HostName: "printer", VendorClass: "v1",
			Request: []uint8{3, 6, 42}, RequestOnly: true, Provide: []dhcpc.Option{{Code: 77, Value: []byte("red")}},
			RapidCommit: true, Timeout: dhcpc.DefaultTimeout,
		},
		Sticky: true,
	}
	expect.NoDiff(t, cmp.Diff(want, got, cmpopts.EquateComparable(netip.Addr{}), cmpopts.IgnoreUnexported(dhcpc.Config{})), "lease")
	expect.Says(t, expect.Err(conf.Lease(id, mac, nil)), "CNI_ARGS has no COLOUR", "an argument that is missing")
	// Otherwise the host name is the pod's.
	plain, err := dhcpOf(t, "")
	must.Succeed(t, err)
	if got, err := plain.Lease(id, mac, args); err != nil || got.Client.HostName != "db-0" || got.Sticky {
		t.Errorf("client %+v, %v", got, err)
	}
	none, err := dhcpOf(t, `"hostName": ""`)
	must.Succeed(t, err)
	if got, err := none.Lease(id, mac, args); err != nil || got.Client.HostName != "" {
		t.Errorf("client %+v, %v", got, err)
	}
}

func TestDurationIsAStringWithAUnit(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		json string
		want time.Duration // 0: refused
	}{
		{`"5s"`, 5 * time.Second}, {`"1m30s"`, 90 * time.Second}, {`"1.5h"`, 90 * time.Minute}, {`"1ns"`, 1},
		{`"0s"`, 0}, {`"-5s"`, 0}, {`"5"`, 0}, {`""`, 0}, {`5`, 0}, {`null`, 0}, {`true`, 0}, {`["5s"]`, 0}, {`"3000000h"`, 0},
	} {
		var d Duration
		err := d.UnmarshalJSON([]byte(tt.json))
		expect.That(t, time.Duration(d) == tt.want && (err == nil) == (tt.want != 0),
			"%s gives %s, %v; want %s", tt.json, time.Duration(d), err, tt.want)
	}
}

func TestAnEmptyObjectMayHaveSpaces(t *testing.T) {
	t.Parallel()
	for text, want := range map[string]bool{"": true, " null ": true, "{}": true, "{ }": true, "{\n\t}": true, `{"type": "dhcp"}`: false, "[]": false} {
		expect.Equal(t, isEmpty([]byte(text)), want, "%q", text)
	}
}
