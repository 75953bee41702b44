package cni

import (
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/network"
	"github.com/tombolo-cni/tombolo/nft"
)

func TestSettingsOfModeLAN(t *testing.T) {
	t.Parallel()
	lan := settings{StateDir: "/run/tombolo", LeaseDir: "/var/lib/tombolo/leases", Mark: 0x10,
		Network: network.Network{Name: "pods", Origin: network.Origin{Type: "dhcp"}, Bridge: "br0", Hairpin: true, Guard: nft.GuardUntrusted,
			Uplink: "eth0", Exit: network.ExitRouter, DefaultGateway: true}}
	l2 := settings{StateDir: "/run/tombolo", LeaseDir: "/var/lib/tombolo/leases", Mark: 0x10,
		Network: network.Network{Name: "pods", Bridge: "br0", LeaveIPv6: true, Uplink: "eth0"}}
	for _, tt := range []struct {
		name   string
		fields string
		from   settings
		change func(*settings)
	}{
		{"an uplink is all that it needs", `"mode": "lan", "uplink": "eth0"`, lan, nil},
		{"without a guard", `"mode": "lan", "uplink": "eth0", "lanGuard": false`, lan, func(s *settings) { s.Guard = "" }},
		{"the reference's guard alone", `"mode": "lan", "uplink": "eth0", "lanGuard": false, "macspoofchk": true`, lan, func(s *settings) { s.Guard = nft.GuardMAC }},
		{"a guard alone", `"mode": "lan", "uplink": "eth0", "lanGuard": false, "guard": true, "macspoofchk": true`, lan, func(s *settings) { s.Guard = nft.GuardAddresses }},
		{"the reference's guard beside lanGuard", `"mode": "lan", "uplink": "eth0", "macspoofchk": true`, lan, nil},
		{"to the router", `"mode": "lan", "uplink": "eth0", "defaultRoute": "router"`, lan, nil},
		{"to the host", `"mode": "lan", "uplink": "eth0", "defaultRoute": "host"`, lan,
			func(s *settings) { s.Exit, s.DefaultGateway, s.NFCall = network.ExitHost, false, ptr(true) }},
		{"to nobody", `"mode": "lan", "uplink": "eth0", "isDefaultGateway": false`, lan, func(s *settings) { s.NoDefaultRoute, s.DefaultGateway = true, false }},
		{"no firewall for what is bridged", `"mode": "lan", "uplink": "eth0", "bridgeNFCall": false`, lan, func(s *settings) { s.NFCall = ptr(false) }},
		{"with IPv6", `"mode": "lan", "uplink": "eth0", "ipv6": "slaac"`, lan, func(s *settings) { s.SLAAC = true }},
		{"every field", `"mode": "lan", "uplink": "enp1s0", "bridge": "lan0", "hairpinMode": false, "mtu": 1400`, lan,
			func(s *settings) {
				s.Bridge, s.Uplink, s.Hairpin, s.MTU = "lan0", "enp1s0", false, 1400
			}},
		{"an uplink of a plain bridge", `"mode": "l2", "uplink": "eth0"`, l2, nil},
		{"a guarded one", `"mode": "l2", "uplink": "eth0", "lanGuard": true`, l2, func(s *settings) { s.Guard = nft.GuardUntrusted }},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			want := tt.from
			if tt.change != nil {
				tt.change(&want)
			}
			expect.NoDiff(t, cmp.Diff(want, settingsOf(parsed(t, tt.fields)), cmp.AllowUnexported(settings{})), "settings")
		})
	}
}

func TestModeLANLeasesUnlessToldOtherwise(t *testing.T) {
	t.Parallel()
	for fields, want := range map[string]string{
		`"mode": "lan", "uplink": "eth0"`:             "dhcp",
		`"mode": "lan", "uplink": "eth0", "ipam": {}`: "dhcp",
		`"mode": "lan", "uplink": "eth0", "ipam": {"type": "static", "addresses": [{"address": "10.0.0.2/24"}]}`: "static",
		`"mode": "l2", "uplink": "eth0"`: "",
	} {
		expect.Equal(t, parsed(t, fields).IPAM.Type, want, "%s: ipam", fields)
	}
	// DEL has to find the lease by the same default.
	conf, err := parseLenient([]byte(`{"cniVersion": "1.1.0", "name": "pods", "type": "tombolo", "mode": "lan"}`))
	if err != nil || conf.IPAM.Type != typeDHCP {
		t.Errorf("for DEL: ipam %q, %v", conf.IPAM.Type, err)
	}
}
