package cni

import (
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/containernetworking/cni/pkg/types"

	"github.com/tombolo-cni/tombolo/internal/cni/ipamconf"
	"github.com/tombolo-cni/tombolo/internal/ident"
	"github.com/tombolo-cni/tombolo/internal/lease"
	"github.com/tombolo-cni/tombolo/internal/strict"
	"github.com/tombolo-cni/tombolo/network"
	"github.com/tombolo-cni/tombolo/nft"
)

// NetConf is a network's configuration as it stands in JSON. Booleans whose
// default depends on the mode are pointers. docs/config.md describes each field.
type NetConf struct {
	CNIVersion   string          `json:"cniVersion"`
	Name         string          `json:"name"`
	Type         string          `json:"type"`
	Capabilities map[string]bool `json:"capabilities"`
	IPAM         json.RawMessage `json:"ipam"`
	DNS          types.DNS       `json:"dns"`

	// What a runtime puts in. None of it is held to known fields.
	RuntimeConfig    json.RawMessage `json:"runtimeConfig"`
	Args             json.RawMessage `json:"args"`
	PrevResult       json.RawMessage `json:"prevResult"`
	ValidAttachments json.RawMessage `json:"cni.dev/valid-attachments"`

	// Fields of the reference bridge plugin, with its meaning.
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

	// Fields of the reference's firewall and bandwidth plugins, with their meaning.
	IngressPolicy string `json:"ingressPolicy"`
	Bandwidth

	// Fields of ours.
	Mode string `json:"mode"`
	LANConf
	Guard              bool              `json:"guard"`
	NonMasqueradeCIDRs []netip.Prefix    `json:"nonMasqueradeCIDRs"`
	BridgeNFCall       *bool             `json:"bridgeNFCall"`
	StateDir           string            `json:"stateDir"`
	LeaseDir           string            `json:"leaseDir"`
	ForwardMark        Mark              `json:"forwardMark"`
	Deadline           ipamconf.Duration `json:"deadline"`
	LogFile            string            `json:"logFile"`
	LogLevel           string            `json:"logLevel"`

	section *ipamSection // what ipam has read
	bridge  bool         // it is one of the reference's plugin of that name
}

const (
	modeGateway = "gateway"
	modeLAN     = "lan"
	modeL2      = "l2"

	defaultDeadline = 60 * time.Second
	defaultMark     = Mark(0x1000)

	// The kernel's bounds for a veth and a bridge. IPv6 needs 1280.
	mtuMin, mtuMax = 68, 65535
)

// Mark is one bit of a packet's mark, written as a number or as "0x1000".
type Mark uint32

// UnmarshalJSON reads both forms.
func (m *Mark) UnmarshalJSON(b []byte) error {
	s := strings.Trim(string(b), `"`)
	v, err := strconv.ParseUint(s, 0, 32)
	if err != nil || v == 0 || v&(v-1) != 0 {
		return fmt.Errorf("%s is not one bit of 32, such as %q", b, "0x1000")
	}
	*m = Mark(v)
	return nil
}

// JSONExpects says what to write.
func (Mark) JSONExpects() string { return `one bit of 32, as a number or as "0x1000"` }

// exempt names the keys that no field has and that are no error: what the runtime
// may put in for others, and a comment's leading underscore.
func exempt(path, key string) bool {
	return path == "" && (strings.HasPrefix(key, "cni.dev/") || strings.HasPrefix(key, "_"))
}

// parseStrict reads a configuration for a verb that must not guess.
func (c *call) parseStrict() (*NetConf, error) {
	var conf NetConf
	pass := exempt
	if c.Name == nameBridge {
		pass = func(string, string) bool { return true }
	}
	if err := strict.Unmarshal(c.stdin, &conf, pass); err != nil {
		return nil, configError(err)
	}
	conf.complete(c.Name)
	if p := conf.problems(); len(p) > 0 {
		return nil, p[0]
	}
	return &conf, nil
}

// parseLenient reads what it can of a configuration, for verbs that take down:
// beyond the network's name nothing in it may stop them.
func (c *call) parseLenient() (*NetConf, error) {
	var conf NetConf
	err := strict.Lenient(c.stdin, &conf)
	var syntax *strict.SyntaxError
	if errors.As(err, &syntax) {
		return nil, newError(codeDecoding, "decode the network's configuration: %v", syntax)
	}
	conf.complete(c.Name)
	return &conf, nil
}

// complete fills in what a mode, or the plugin of a name, has in place of what is missing.
func (c *NetConf) complete(name string) {
	if name == nameBridge {
		c.asBridge()
	}
	if c.Mode == modeLAN && isEmptyJSON(c.IPAM) {
		c.IPAM = json.RawMessage(`{"type":"` + ipamconf.TypeDHCP + `"}`)
	}
}

func configError(err error) error {
	if errors.As(err, new(*strict.SyntaxError)) {
		return newError(codeDecoding, "decode the network's configuration: %v", err)
	}
	return ipamconf.ConfigError(err)
}

// problems are all that is wrong with a configuration, the first first.
type problems []error

func (p *problems) add(holds bool, format string, args ...any) {
	if holds {
		*p = append(*p, newError(codeInvalidConfig, format, args...))
	}
}

// problems are those that can be seen from one field, or from a few, without asking the kernel.
func (c *NetConf) problems() problems {
	var p problems
	p.add(c.Mode != "" && c.Mode != modeGateway && c.Mode != modeLAN && c.Mode != modeL2, `mode %q is not known: use "gateway", "lan" or "l2"`, c.Mode)
	if b := c.IPMasqBackend; b != nil {
		p.add(*b != "nftables" && *b != "" && (!c.bridge || *b != "iptables"), `ipMasqBackend %q is not supported: masquerade is done with nf_tables, so leave the field out or set it to "nftables"`, *b)
	}
	p.add(c.MTU != 0 && (c.MTU < mtuMin || c.MTU > mtuMax), "mtu %d is not within %d and %d: use 0 for that of the default route's link", c.MTU, mtuMin, mtuMax)
	p.add(c.Bridge != "" && !ident.IsLinkName(c.Bridge), "bridge %q cannot name a link: it takes 1 to 15 bytes without '/', ':', '%%' and space", c.Bridge)
	p.add(c.StateDir != "" && !filepath.IsAbs(c.StateDir), "stateDir %q is not an absolute path", c.StateDir)
	p.add(c.LeaseDir != "" && !filepath.IsAbs(c.LeaseDir), "leaseDir %q is not an absolute path", c.LeaseDir)
	p.add(c.LogFile != "" && !filepath.IsAbs(c.LogFile), "logFile %q is not an absolute path", c.LogFile)
	p.add(c.PromiscMode && orDefault(c.HairpinMode, false), "promiscMode and hairpinMode exclude each other: leave one of them out")
	p.add(c.IngressPolicy != "" && policyOf(c.IngressPolicy).String() != c.IngressPolicy, `ingressPolicy %q is not known: use "open", "same-bridge" or "isolated"`, c.IngressPolicy)
	p.add(c.DisableContainerInterface && c.ipamType() != "", "disableContainerInterface leaves the pod's interface down, so it cannot have addresses: leave out ipam, or disableContainerInterface")
	for _, cidr := range c.NonMasqueradeCIDRs {
		p.add(cidr.Addr().Is4In6(), "nonMasqueradeCIDRs: %s is an IPv4 network in IPv6 notation", cidr)
	}
	c.lanProblems(&p)
	c.vlanProblems(&p)
	if _, err := c.Bandwidth.shape("the configuration"); err != nil {
		p = append(p, err)
	}
	_, err := parseLevel(c.LogLevel)
	p.add(err != nil, `logLevel %q is not known: use "debug", "info", "warn" or "error"`, c.LogLevel)
	return p
}

func isEmptyJSON(raw json.RawMessage) bool {
	switch strings.TrimSpace(string(raw)) {
	case "", "null", "[]", "{}":
		return true
	}
	return false
}

// ipamType is empty where there is no IPAM.
func (c *NetConf) ipamType() string { return c.ipam().Type }

// dataDir is where the IPAM was told to keep its reservations, if it was.
func (c *NetConf) dataDir() string { return c.ipam().DataDir }

// ipamSection is what of the ipam section is not the allocator's alone.
type ipamSection struct {
	Type    string `json:"type"`
	DataDir string `json:"dataDir"`
}

func (c *NetConf) ipam() *ipamSection {
	if c.section == nil {
		c.section = &ipamSection{}
		if !isEmptyJSON(c.IPAM) {
			// What is wrong with the section is for the allocator to say.
			_ = strict.Lenient(c.IPAM, c.section)
		}
	}
	return c.section
}

// settings are a configuration with its defaults filled in: the network, and what is not
// the network's.
type settings struct {
	network.Network
	StateDir string
	LeaseDir string
	Mark     uint32
}

func (c *NetConf) deadline() time.Duration {
	if c.Deadline == 0 {
		return defaultDeadline
	}
	return time.Duration(c.Deadline)
}

func (c *NetConf) settings() settings {
	gateway := c.Mode != modeL2 && c.Mode != modeLAN
	// The router that a DHCP server names is somebody else's address in general.
	dhcp := c.ipamType() == ipamconf.TypeDHCP
	s := settings{
		StateDir: c.StateDir,
		LeaseDir: c.LeaseDir,
		Mark:     uint32(c.ForwardMark),
		Network: network.Network{
			Name:         c.Name,
			Bridge:       c.Bridge,
			MTU:          c.MTU,
			Gateway:      orDefault(c.IsGateway, gateway && !dhcp),
			ForceAddress: c.ForceAddress,
			Masquerade:   orDefault(c.IPMasq, gateway),
			Hairpin:      orDefault(c.HairpinMode, c.Mode != modeL2 && !c.PromiscMode),
			NFCall:       c.BridgeNFCall,
			Routed:       gateway,
			Isolated:     c.PortIsolation,
			DAD:          c.EnableDAD,
			LeaveIPv6:    c.Mode == modeL2 && c.ipamType() == "" && c.IPv6 == "",
			Down:         c.DisableContainerInterface,
			Policy:       policyOf(c.IngressPolicy),
			Origin:       network.Origin{Type: c.ipamType(), Dir: c.dataDir()},
		},
	}
	// As in the reference, a default gateway is a gateway. A network that says it
	// has none gets no default route from the mode.
	s.DefaultGateway = orDefault(c.IsDefaultGateway, gateway && s.Gateway)
	s.Gateway = s.Gateway || s.DefaultGateway
	for _, p := range c.NonMasqueradeCIDRs {
		s.NonMasquerade = append(s.NonMasquerade, p.Masked())
	}
	// The reference's policy needs its traffic to pass the firewall. The bridge
	// itself keeps isolated ports apart, so this holds without that too.
	s.Isolated = s.Isolated || s.Policy == nft.Isolated
	if c.PromiscMode {
		s.Promiscuous = &c.PromiscMode
	}
	s.NoDefaultRoute = dhcp && !c.bridge && !orDefault(c.IsDefaultGateway, true)
	if c.bridge {
		s.Routed, s.DefaultMTU = false, ethernetMTU
	}
	c.lan(&s)
	s.VLAN, _ = c.membership()
	if s.VLAN.ID != 0 && c.DefaultRoute == "" && s.Exit != "" {
		s.Exit = network.ExitRouter // the host is not in the VLAN
		s.DefaultGateway = !s.NoDefaultRoute
	}
	if s.StateDir == "" || !filepath.IsAbs(s.StateDir) {
		s.StateDir = network.DefaultStateDir
	}
	if s.LeaseDir == "" || !filepath.IsAbs(s.LeaseDir) {
		s.LeaseDir = lease.DefaultDir
	}
	if s.Mark == 0 {
		s.Mark = uint32(defaultMark)
	}
	if s.Bridge == "" {
		s.Bridge = "cbr0"
		if !gateway {
			s.Bridge = "br0"
		}
	}
	if s.Down {
		s.Masquerade, s.Gateway, s.DefaultGateway = false, false, false
	}
	return s
}

// vlanProblems are about VLANs that there cannot be, and about those that a network cannot be in.
func (c *NetConf) vlanProblems(p *problems) {
	if _, err := c.membership(); err != nil {
		p.add(true, "%v", err)
		return
	}
	s := c.settings()
	if err := s.CheckVLAN(); err != nil {
		p.add(true, "%v", err)
	}
}

func policies() []nft.Policy { return []nft.Policy{nft.Open, nft.SameBridge, nft.Isolated} }

// policyOf is the open one for what names none.
func policyOf(name string) nft.Policy {
	for _, p := range policies() {
		if p.String() == name {
			return p
		}
	}
	return nft.Open
}

func orDefault(v *bool, def bool) bool {
	if v == nil {
		return def
	}
	return *v
}

// runtimeConfig is what of the capabilities' arguments concerns us; the IPAM reads
// its own.
type runtimeConfig struct {
	MAC          string        `json:"mac"`
	PortMappings []PortMapping `json:"portMappings"`
	Bandwidth    *Bandwidth    `json:"bandwidth"`
	DNS          struct {
		Servers  []string `json:"servers"`
		Searches []string `json:"searches"`
		Options  []string `json:"options"`
	} `json:"dns"`
}

func (c *NetConf) runtimeConfig() (*runtimeConfig, error) {
	var rc runtimeConfig
	if isEmptyJSON(c.RuntimeConfig) {
		return &rc, nil
	}
	// What is for others is passed over, whatever it is called.
	if err := strict.Unmarshal(c.RuntimeConfig, &rc, func(_, _ string) bool { return true }); err != nil {
		return nil, newError(codeInvalidConfig, "runtimeConfig: %v", err)
	}
	return &rc, nil
}

// podMAC finds the MAC that was asked for the pod: runtimeConfig.mac, else
// args.cni.mac, else MAC in CNI_ARGS; nil if none was.
func (c *NetConf) podMAC(rc *runtimeConfig, cniArgs map[string]string) (net.HardwareAddr, error) {
	var args struct {
		CNI struct {
			MAC string `json:"mac"`
		} `json:"cni"`
	}
	if !isEmptyJSON(c.Args) && json.Unmarshal(c.Args, &args) != nil {
		args.CNI.MAC = "" // data of others, whose shape is not ours to judge
	}
	for _, source := range []struct{ where, mac string }{
		{"runtimeConfig.mac", rc.MAC},
		{"args.cni.mac", args.CNI.MAC},
		{"MAC in CNI_ARGS", cniArgs["MAC"]},
	} {
		if source.mac == "" {
			continue
		}
		mac, err := net.ParseMAC(source.mac)
		if err != nil || len(mac) != 6 || mac[0]&1 != 0 {
			return nil, newError(codeInvalidConfig, "%s %q is not the MAC of one interface, such as 02:00:5e:10:00:01", source.where, source.mac)
		}
		return mac, nil
	}
	return nil, nil
}
