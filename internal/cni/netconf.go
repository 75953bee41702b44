package cni

import (
	"cmp"
	"context"
	"encoding/json"
	"net"
	"net/netip"

	"github.com/containernetworking/cni/pkg/types"
	current "github.com/containernetworking/cni/pkg/types/100"

	"github.com/tombolo-cni/tombolo/bridge/vlan"
	"github.com/tombolo-cni/tombolo/internal/ident"
	"github.com/tombolo-cni/tombolo/ipam"
	"github.com/tombolo-cni/tombolo/network"
	"github.com/tombolo-cni/tombolo/nft"
)

// NetConf is a network's configuration in JSON, of Tombolo's own plugin and of the reference plugin bridge. A boolean
// whose default is not always false is a pointer. docs/config.md describes each field.
type NetConf struct {
	Common
	Type         string          `json:"type"`
	Capabilities map[string]bool `json:"capabilities"`
	IPAM         Section         `json:"ipam"`
	DNS          types.DNS       `json:"dns"`

	ValidAttachments json.RawMessage `json:"cni.dev/valid-attachments"` // set by a runtime

	// The fields from Bridge to VLANConf have the same meaning as in the reference plugin bridge.
	Bridge                    string  `json:"bridge"`
	IsGateway                 *bool   `json:"isGateway"`
	IsDefaultGateway          *bool   `json:"isDefaultGateway"`
	ForceAddress              bool    `json:"forceAddress"`
	IPMasq                    *bool   `json:"ipMasq"`
	IPMasqBackend             *string `json:"ipMasqBackend"`
	MTU                       int     `json:"mtu"`
	HairpinMode               *bool   `json:"hairpinMode"`
	EnableDAD                 bool    `json:"enabledad"`
	PromiscMode               bool    `json:"promiscMode"`
	MACSpoofCheck             bool    `json:"macspoofchk"`
	DisableContainerInterface bool    `json:"disableContainerInterface"`
	PortIsolation             bool    `json:"portIsolation"`
	VLANConf

	// IngressPolicy has the same meaning as in the reference plugin firewall, and Bandwidth as in the plugin bandwidth.
	IngressPolicy string `json:"ingressPolicy"`
	Bandwidth

	// The fields from Mode to BridgeNFCall are Tombolo's own.
	Mode string `json:"mode"`
	LANConf
	podPolicy
	PublishAdmission   *bool          `json:"publishAdmission"`
	Guard              bool           `json:"guard"`
	Internal           bool           `json:"internal"`
	Annotations        []string       `json:"annotations"`
	NonMasqueradeCIDRs []netip.Prefix `json:"nonMasqueradeCIDRs"`
	BridgeNFCall       *bool          `json:"bridgeNFCall"`

	bridge bool // the program was called as the reference plugin bridge
}

const (
	modeGateway = "gateway"
	modeLAN     = "lan"
	modeL2      = "l2"

	// These are the kernel's limits for the MTU of a veth and a bridge, in bytes. IPv6 needs at least 1280.
	mtuMin, mtuMax = 68, 65535
)

// run runs a verb of Tombolo's own plugin, or of the reference plugin bridge.
func (c *NetConf) run(ctx context.Context, request *call) (*current.Result, error) {
	node, err := request.open(request.allocators(c))
	if err != nil {
		return nil, err
	}

	switch request.verb {
	case "ADD":
		return request.add(ctx, node, c)
	case "DEL":
		return nil, request.del(ctx, node, c)
	case "GC":
		return nil, request.gc(ctx, node, c)
	case "CHECK":
		return nil, request.check(ctx, node, c)
	default: // STATUS: readEnvironment has checked the verb
		return nil, request.status(ctx, node, c)
	}
}

// complete fills in the defaults that depend on the mode or on the plugin's name. For ADD, it applies the pod's
// annotations.
func (c *NetConf) complete(request *call) {
	c.Common.complete(request)
	if c.bridge {
		c.asBridge()
	}
	if c.Mode == modeLAN && isEmpty(c.IPAM.JSON) {
		_ = c.IPAM.UnmarshalJSON([]byte(`{"type":"` + typeDHCP + `"}`))
	}

	if request.verb == "ADD" && len(c.RuntimeConfig.Annotations) > 0 {
		request.note(c.annotate())
	}
}

// problems returns the errors that can be found without a request to the kernel, except errors in the ipam section,
// which newAllocator and the method dhcp return.
func (c *NetConf) problems() []error {
	p := problems(c.Common.problems())
	p.add(c.Mode != "" && c.Mode != modeGateway && c.Mode != modeLAN && c.Mode != modeL2,
		`mode %q is not known: use "gateway", "lan" or "l2"`, c.Mode)
	backend := orZero(c.IPMasqBackend)
	p.add(backend != "nftables" && backend != "" && (!c.bridge || backend != "iptables"),
		`ipMasqBackend %q is not supported: masquerade is done with nf_tables, so leave the field out or set it to `+
			`"nftables"`, backend)
	p.add(c.MTU != 0 && (c.MTU < mtuMin || c.MTU > mtuMax),
		"mtu %d is not within %d and %d: use 0 for the MTU of the default route's link", c.MTU, mtuMin, mtuMax)
	p.add(c.Bridge != "" && !ident.IsLinkName(c.Bridge),
		"bridge %q cannot name a link: it takes 1 to 15 bytes without '/', ':', '%%' and space", c.Bridge)
	p.add(c.PromiscMode && orDefault(c.HairpinMode, false),
		"promiscMode and hairpinMode exclude each other: leave one of them out")
	p.policy(c.IngressPolicy)
	p.policies(c.podPolicy, func(field string) string { return field }, c.settings())
	p.policies(c.RuntimeConfig.podPolicy, func(field string) string {
		return c.source(field, "runtimeConfig."+field+" or args.cni."+field)
	}, c.settings())
	p.add(c.Internal && cmp.Or(c.Mode, modeGateway) != modeGateway,
		"internal is not for mode %q, in which others reach the containers", c.Mode)
	p.add(c.DisableContainerInterface && c.IPAM.Type != "",
		"disableContainerInterface leaves the pod's interface down, so it cannot have addresses: leave out ipam, or "+
			"disableContainerInterface")
	for _, cidr := range c.NonMasqueradeCIDRs {
		p.add(cidr.Addr().Is4In6(), "nonMasqueradeCIDRs: %s is an IPv4 network in IPv6 notation", cidr)
	}

	c.lanProblems(&p)
	c.vlanProblems(&p)
	c.annotationProblems(&p)
	p.limits("the configuration", c.Bandwidth)
	return p
}

// settings returns the network that the configuration describes, with all defaults.
func (c *NetConf) settings() network.Network {
	gateway := c.Mode != modeL2 && c.Mode != modeLAN

	// With DHCP the host is no gateway by default, since a DHCP server mostly names another router.
	dhcp := c.IPAM.Type == typeDHCP
	s := network.Network{
		Name:         c.Name,
		Bridge:       c.Bridge,
		MTU:          c.MTU,
		Gateway:      orDefault(c.IsGateway, gateway && !dhcp),
		ForceAddress: c.ForceAddress,
		Masquerade:   orDefault(c.IPMasq, gateway && !c.Internal),
		Hairpin:      orDefault(c.HairpinMode, c.Mode != modeL2 && !c.PromiscMode),
		NFCall:       c.BridgeNFCall,
		Routed:       gateway,
		Isolated:     c.PortIsolation,
		DAD:          c.EnableDAD,
		LeaveIPv6:    c.Mode == modeL2 && c.IPAM.Type == "" && c.IPv6 == "",
		Down:         c.DisableContainerInterface,
		Policy:       policyOf(c.IngressPolicy),
		Internal:     c.Internal,
		Egress:       nft.Egress(c.EgressPolicy.policy()),
		PublishFrom:  c.PublishFrom.policy(),
		Unadmitted:   !orDefault(c.PublishAdmission, true),
		Origin:       network.Origin{Type: c.IPAM.Type, Dir: c.IPAM.DataDir},
	}

	// As in the reference plugin, isDefaultGateway implies isGateway. If isGateway is false, isDefaultGateway is false
	// by default.
	s.DefaultGateway = orDefault(c.IsDefaultGateway, gateway && s.Gateway && !c.Internal)
	s.Gateway = s.Gateway || s.DefaultGateway
	for _, p := range c.NonMasqueradeCIDRs {
		s.NonMasquerade = append(s.NonMasquerade, p.Masked())
	}

	// The reference plugin enforces the policy isolated by iptables, so bridged packets must traverse the host's
	// firewall. Isolated bridge ports make that unnecessary.
	s.Isolated = s.Isolated || s.Policy == nft.Isolated
	if c.PromiscMode {
		s.Promiscuous = &c.PromiscMode
	}

	s.NoDefaultRoute = dhcp && !c.bridge && !orDefault(c.IsDefaultGateway, true)
	if c.bridge {
		s.Routed, s.DefaultMTU = false, ethernetMTU
	}

	c.lan(&s)
	s.VLAN = c.membership()
	if s.Egress != "" {
		// Bridged packets must traverse the host's firewall, and pods may send only from their own addresses.
		s.NFCall = cmp.Or(s.NFCall, new(true))
		if s.Guard == "" || s.Guard == nft.GuardMAC {
			s.Guard = nft.GuardAddresses
		}
	}

	if gateway {
		s.Bridge = cmp.Or(s.Bridge, "cbr0")
	}

	s.Bridge = cmp.Or(s.Bridge, "br0")

	if s.Down {
		s.Masquerade, s.Gateway, s.DefaultGateway = false, false, false
	}

	return s
}

// policies adds a problem for each policy that is invalid, or that a network with the settings s cannot enforce. source
// returns the origin of a field's policy, for the error.
func (p *problems) policies(policy podPolicy, source func(field string) string, s network.Network) {
	s.Egress, s.PublishFrom = nft.Egress(policy.EgressPolicy.policy()), ""
	err := s.CheckPolicies()
	p.add(err != nil, "%s: %v", source("egressPolicy"), err)
	s.Egress, s.PublishFrom = "", policy.PublishFrom.policy()
	err = s.CheckPolicies()
	p.add(err != nil, "%s: %v", source("publishFrom"), err)
}

// policy adds a problem unless name is empty or a value of ingressPolicy.
func (p *problems) policy(name string) {
	p.add(name != "" && policyOf(name).String() != name,
		`ingressPolicy %q is not known: use "open", "same-bridge" or "isolated"`, name)
}

// policyOf returns the ingress policy called name, or nft.Open for any other name.
func policyOf(name string) (p nft.Policy) {
	if name != "" {
		_ = p.UnmarshalText([]byte(name)) // an error leaves p unchanged
	}
	return p
}

// orDefault returns *v, or def if v is nil.
func orDefault(v *bool, def bool) bool { return *cmp.Or(v, &def) }

// podMAC returns the MAC requested for the pod, or nil if there is none. The first of these sources that has a MAC
// counts: runtimeConfig.mac, args.cni.mac, MAC in CNI_ARGS, the annotation.
func (c *Common) podMAC(cniArgs map[string]string) (net.HardwareAddr, error) {
	for _, source := range []struct{ where, mac string }{
		{"runtimeConfig.mac", c.RuntimeConfig.MAC},
		{"args.cni.mac", c.argMAC},
		{"MAC in CNI_ARGS", cniArgs["MAC"]},
		{c.source("mac", ""), c.annotated.MAC},
	} {
		if source.mac == "" {
			continue
		}
		mac, err := net.ParseMAC(source.mac)
		if err != nil || len(mac) != 6 || mac[0]&1 != 0 {
			return nil, newError(codeInvalidConfig, "%s %q is not the MAC of one interface, such as 02:00:5e:10:00:01",
				source.where, source.mac)
		}
		if source.where == c.source("mac", "none") && mac[0] == ident.DerivedMAC {
			return nil, newError(codeInvalidConfig, "%s %q: a MAC that begins with %02x may be another pod's, since "+
				"Tombolo derives such MACs: use one that begins with 02", source.where, source.mac, mac[0])
		}
		return mac, nil
	}

	return nil, nil
}

// VLANConf holds the fields of the reference plugin bridge about VLANs.
type VLANConf struct {
	VLAN                uint16  `json:"vlan"`
	VLANTrunk           []Trunk `json:"vlanTrunk"`
	PreserveDefaultVLAN bool    `json:"preserveDefaultVlan"`
}

// Trunk is an element of the list vlanTrunk. It selects the VLANs from MinID to MaxID, both included, or the single
// VLAN ID. It may have all three fields.
type Trunk struct {
	MinID *uint16 `json:"minID"`
	MaxID *uint16 `json:"maxID"`
	ID    *uint16 `json:"id"`
}

// ranges returns the VLANs that the element selects.
func (t *Trunk) ranges() (list []vlan.Range) {
	for _, r := range [][2]*uint16{{t.MinID, t.MaxID}, {t.ID, t.ID}} {
		if r[0] != nil && r[1] != nil {
			list = append(list, vlan.Range{First: *r[0], Last: *r[1]})
		}
	}
	return list
}

// membership returns the VLANs of the pods' ports. It is zero if the fields select no VLAN.
func (c *VLANConf) membership() vlan.Membership {
	m := vlan.Membership{ID: c.VLAN, KeepDefault: c.PreserveDefaultVLAN}
	for _, t := range c.VLANTrunk {
		m.Trunk = append(m.Trunk, t.ranges()...)
	}
	if m.IsZero() {
		m = vlan.Membership{} // without a VLAN, KeepDefault has no effect
	}
	return m
}

// vlanProblems adds problems for invalid VLAN numbers, and for VLANs that the network's other settings exclude.
func (c *NetConf) vlanProblems(p *problems) {
	const most = 4094
	p.add(c.VLAN > most, "vlan %d is not within 0 and %d", c.VLAN, most)
	for i, t := range c.VLANTrunk {
		for _, r := range t.ranges() {
			p.add(r.First < 1 || r.Last > most, "vlanTrunk[%d]: VLANs are from 1 to %d", i, most)
			p.add(r.First > r.Last, "vlanTrunk[%d]: minID %d is more than maxID %d", i, r.First, r.Last)
		}
		p.add((t.MinID == nil) != (t.MaxID == nil), "vlanTrunk[%d] has one of minID and maxID: it takes both, or id", i)
	}

	// If VLAN.Check returns an error, the problems of single fields were added above.
	s := c.settings()
	err := s.CheckVLAN()
	p.add(s.VLAN.Check() == nil && err != nil, "%v", err)
}

// nameBridge is the name of the reference plugin bridge, which NetConf implements with other defaults.
const nameBridge = "bridge"

// asBridge sets the defaults of the reference plugin bridge. It clears the fields outside Common that the reference
// plugin does not have. It also clears the fields of runtimeConfig that the reference plugin ignores.
func (c *NetConf) asBridge() {
	c.Mode, c.LANConf, c.NonMasqueradeCIDRs, c.BridgeNFCall = "", LANConf{}, nil, nil
	c.IngressPolicy, c.Internal, c.Annotations, c.Bandwidth = "", false, nil, Bandwidth{}
	c.podPolicy, c.PublishAdmission, c.Guard = podPolicy{}, nil, false
	for _, field := range []**bool{&c.IsGateway, &c.IsDefaultGateway, &c.IPMasq, &c.HairpinMode} {
		if *field == nil {
			*field = new(bool)
		}
	}

	c.Bridge = cmp.Or(c.Bridge, "cni0")
	c.RuntimeConfig = runtimeConfig{MAC: c.RuntimeConfig.MAC, RequestedAddresses: c.RuntimeConfig.RequestedAddresses}
	if s := &c.IPAM; s.DataDir == "" && s.Type == "host-local" {
		s.DataDir = ipam.DefaultDir
	}
}
