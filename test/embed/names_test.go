package main

import (
	"errors"
	"os/exec"
	"strings"
	"testing"

	"github.com/tombolo-cni/tombolo"
	"github.com/tombolo-cni/tombolo/bridge"
	"github.com/tombolo-cni/tombolo/bridge/bandwidth"
	"github.com/tombolo-cni/tombolo/bridge/share"
	"github.com/tombolo-cni/tombolo/nft"
)

// Whoever names a bridge by an alternative name hears its own, and of a name that is too long hears why.
func TestNamesThatABridgeDoesNotHave(t *testing.T) {
	host, pod, _ := hostAndPod(t)
	ctx := t.Context()
	links, err := bridge.Dial(host)
	if err != nil {
		t.Fatal(err)
	}
	defer links.Close()
	firewall, err := nft.Dial(&nft.Config{NetNS: host})
	if err != nil {
		t.Fatal(err)
	}
	defer firewall.Close()
	if _, err := links.Ensure(ctx, bridge.Bridge{Name: "real0"}); err != nil {
		t.Fatal(err)
	}
	if err := host.Do(func() error {
		return exec.Command("ip", "link", "property", "add", "dev", "real0", "altname", "other0").Run()
	}); err != nil {
		t.Fatal(err)
	}
	port := func(at string) bridge.Port { return bridge.Port{Name: "veth0", Peer: "eth0", Bridge: at} }
	second := func(_ any, err error) error { return err }
	limit := bandwidth.Shape{Egress: bandwidth.Limit{Rate: 1e6}}

	for what, use := range map[string]func(name string) error{
		"bridge.Ensure":  func(name string) error { return second(links.Ensure(ctx, bridge.Bridge{Name: name})) },
		"bridge.Attach":  func(name string) error { return second(links.Attach(ctx, pod, port(name))) },
		"bridge.Enslave": func(name string) error { return links.Enslave(ctx, port(name)) },
		"bridge.EnsureRouting": func(name string) error {
			return host.Do(func() error { return second(links.EnsureRouting(ctx, bridge.Routing{RouteLocalnet: name})) })
		},
		"bridge.CheckRouting": func(name string) error {
			return host.Do(func() error { return second(links.CheckRouting(ctx, bridge.Routing{IPv4: true, Input: name})) })
		},
		"bridge.Remove": func(name string) error { return links.Remove(ctx, name) },
		"share": func(name string) error {
			return second(share.On(links.Socket()).Ensure(ctx, share.Share{Bridge: name, NIC: "lo"}))
		},
		"share, NIC": func(name string) error {
			return second(share.On(links.Socket()).Ensure(ctx, share.Share{Bridge: "real0", NIC: name}))
		},
		"nft.Ensure": func(name string) error { return second(firewall.Ensure(ctx, nft.Network{Name: "pods", Bridge: name})) },
		"nft.Add": func(name string) error {
			return firewall.Add(ctx, nft.Endpoint{Owner: "a", Network: "pods", Bridge: name, MAC: []byte{2, 0, 0, 0, 0, 1}})
		},
		"nft.HasPorts":   func(name string) error { return second(firewall.HasPorts(ctx, name)) },
		"nft.SetHost":    func(name string) error { return firewall.SetHost(ctx, []string{name}, nil, nil) },
		"nft, the share": func(name string) error { return firewall.RemoveShare(ctx, name) },
		"bandwidth": func(name string) error {
			return second(bandwidth.On(links.Socket()).Ensure(ctx, bandwidth.Target{Port: name, IFB: "ifb0"}, limit))
		},
	} {
		if err := use("sixteen-bytes-xx"); !errors.Is(err, tombolo.ErrInvalid) || !strings.Contains(err.Error(), "15 bytes") {
			t.Errorf("%s of a name that is too long: %v", what, err)
		}
		if strings.HasPrefix(what, "nft") || what == "bandwidth" || what == "share, NIC" {
			continue // nft does not look at links; a limit and a NIC are the link's by any name
		}
		if err := use("other0"); !errors.Is(err, tombolo.ErrInvalid) || !strings.Contains(err.Error(), "real0") {
			t.Errorf("%s by an alternative name: %v", what, err)
		}
	}
}
