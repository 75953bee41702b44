package cni

import (
	"net/netip"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/tombolo-cni/tombolo/bridge/bandwidth"
	"github.com/tombolo-cni/tombolo/internal/endpoint"
	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
	"github.com/tombolo-cni/tombolo/nft"
)

func parsedRuntimeConfig(t *testing.T, text string) *runtimeConfig {
	t.Helper()
	return &parsed(t, `"runtimeConfig": `+text).RuntimeConfig
}

// Containerd's structs have no tags, so that it writes the capabilities with capital
// letters.
func TestCapabilitiesAsContainerdWritesThem(t *testing.T) {
	t.Parallel()
	rc := parsedRuntimeConfig(t, `{"portMappings":[{"HostPort":18080,"ContainerPort":8080,"Protocol":"tcp","HostIP":""},
		{"HostPort":53,"ContainerPort":5353,"Protocol":"udp","HostIP":"192.0.2.1"}],
		"bandwidth":{"IngressRate":8000000,"IngressBurst":4294967295,"EgressRate":4000000,"EgressBurst":4294967295},
		"dns":{"Servers":["10.0.0.10"],"Searches":["default.svc"],"Options":["ndots:5"]}}`)
	published, err := publishedPorts(rc.PortMappings)
	must.Succeed(t, err)
	want := []nft.Port{
		{Protocol: nft.TCP, HostPort: 18080, PodPort: 8080},
		{Protocol: nft.UDP, HostAddr: nstest.Addr("192.0.2.1"), HostPort: 53, PodPort: 5353},
	}
	expect.NoDiff(t, cmp.Diff(want, published, cmpopts.EquateComparable(netip.Addr{})), "ports")
	shape := (&Common{RuntimeConfig: *rc}).limits(Bandwidth{})
	wantShape := bandwidth.Shape{Ingress: bandwidth.Limit{Rate: 8e6, Burst: 4294967295}, Egress: bandwidth.Limit{Rate: 4e6, Burst: 4294967295}}
	expect.That(t, shape == wantShape, "limits %+v; want %+v", shape, wantShape)
	expect.Equal(t, len(rc.DNS.Servers)+len(rc.DNS.Searches)+len(rc.DNS.Options), 3, "DNS is %+v", rc.DNS)
}

func TestPortMappings(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct{ json, want string }{
		{`{"hostPort": 8080, "containerPort": 80}`, "8080/tcp"},
		{`{"hostPort": 8080, "containerPort": 80, "protocol": "SCTP"}`, "8080/sctp"},
		{`{"hostPort": 8080, "containerPort": 80, "hostIP": "0.0.0.0"}`, "8080/tcp"},
		{`{"hostPort": 8080, "containerPort": 80, "hostIP": "::"}`, "8080/tcp"},
		{`{"hostPort": 8080, "containerPort": 80, "hostIP": "::ffff:192.0.2.1"}`, "192.0.2.1:8080/tcp"},
		{`{"hostPort": 8080, "containerPort": 80, "hostIP": "2001:db8::1", "protocol": "udp"}`, "[2001:db8::1]:8080/udp"},
		{`{"hostPort": 0, "containerPort": 80}`, "hostPort 0 is not within 1 and 65535"},
		{`{"hostPort": 65536, "containerPort": 80}`, "hostPort 65536 is not within 1 and 65535"},
		{`{"hostPort": 80}`, "containerPort 0 is not within 1 and 65535"},
		{`{"hostPort": 80, "containerPort": 80, "protocol": "quic"}`, `protocol "quic" is not known: use "tcp", "udp" or "sctp"`},
		{`{"hostPort": 80, "containerPort": 80, "hostIP": "eth0"}`, `hostIP "eth0" is not an address such as 192.0.2.1`},
		{`{"hostPort": 80, "containerPort": 80, "hostIP": "fe80::1%eth0"}`, `hostIP "fe80::1%eth0" is not an address such as 192.0.2.1`},
		{`{"hostPort": 80, "containerPort": 80, "hostIP": "224.0.0.1"}`, "hostIP 224.0.0.1 is a multicast address"},
		{`{"hostPort": 80, "containerPort": 80, "hostIP": "::1"}`, "hostIP ::1: the kernel forwards nothing from there to a pod: use 127.0.0.1"},
	} {
		list, err := publishedPorts(parsedRuntimeConfig(t, `{"portMappings": [`+tt.json+`]}`).PortMappings)
		got := ""
		if err != nil {
			got = strings.TrimPrefix(describe(err), "code 7: runtimeConfig.portMappings[0]: ")
		} else {
			got = endpoint.PortText(list[0])
		}
		expect.That(t, got == tt.want, "%s:\ngot  %s\nwant %s", tt.json, got, tt.want)
	}
}

func TestMappingThatStandsThereTwiceCountsOnce(t *testing.T) {
	t.Parallel()
	const one = `{"hostPort": 8080, "containerPort": 80}`
	expect.Of(publishedPorts(parsedRuntimeConfig(t, `{"portMappings": [`+one+`,`+one+`]}`).PortMappings)).Len(t, 1)
}

func TestTheConfigurationsLimitsGoBeforeTheRuntimes(t *testing.T) {
	t.Parallel()
	rc := parsedRuntimeConfig(t, `{"bandwidth": {"ingressRate": 8000000}}`)
	s := (&Common{RuntimeConfig: *rc}).limits(Bandwidth{EgressRate: 5e6})
	want := (bandwidth.Shape{Egress: bandwidth.Limit{Rate: 5e6}})
	expect.That(t, s == want, "got %+v; want %+v", s, want)
	expect.Says(t, expect.Err(parseStrict(with(`"runtimeConfig": {"bandwidth": {"egressRate": 5}}`))), "bandwidth of runtimeConfig: egress", "a rate of 5")
}
