package cni

import (
	"crypto/sha256"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/tombolo-cni/tombolo/dhcpc"
	"github.com/tombolo-cni/tombolo/internal/ident"
	"github.com/tombolo-cni/tombolo/internal/strict"
	"github.com/tombolo-cni/tombolo/network"
)

// DHCP is the ipam section of type dhcp. The fields request, provide and priority have the same form as in the
// reference plugin dhcp.
type DHCP struct {
	Type string `json:"type"`

	ClientID        string   `json:"clientID"`
	HostName        *string  `json:"hostName"`
	Timeout         Duration `json:"timeout"`
	Keeper          string   `json:"keeper"`
	RapidCommit     bool     `json:"rapidCommit"`
	DetectConflicts bool     `json:"detectConflicts"`
	Priority        int      `json:"priority"`

	Servers []netip.Addr `json:"servers"`
	Request []request    `json:"request"`
	Provide []provide    `json:"provide"`
	Routes  []struct {
		Dst netip.Prefix `json:"dst"`
		GW  netip.Addr   `json:"gw"`
	} `json:"routes"`

	byName bool // the program was called as the reference plugin bridge
}

// request is an element of the field request: an option that the client requests from the server. SkipDefault leaves
// out the options that the client requests by default.
type request struct {
	SkipDefault bool   `json:"skipDefault"`
	Option      option `json:"option"`
}

// provide is an element of the field provide: an option that the client sends. FromArg, if set, is the key in CNI_ARGS
// that has the option's value. Without FromArg, Value is the value.
type provide struct {
	Option  option `json:"option"`
	Value   string `json:"value"`
	FromArg string `json:"fromArg"`
}

// option is the number of a DHCP option, or 0 for none. In JSON it is a number from 1 to 254, such a number in quotes,
// or one of the names in optionNames.
type option uint8

func optionNames() map[string]uint8 {
	return map[string]uint8{
		"subnet-mask": 1, "routers": 3, "domain-name-servers": 6, "host-name": 12, "domain-name": 15,
		"interface-mtu": 26, "broadcast-address": 28, "static-routes": 33, "ntp-servers": 42,
		"dhcp-lease-time": 51, "vendor-class-identifier": 60,
		"dhcp-client-identifier": 61, "user-class": 77, "domain-search": 119, "classless-static-routes": 121,
	}
}

// UnmarshalJSON parses a number, a number as text, or a name.
func (o *option) UnmarshalJSON(b []byte) error {
	text := strings.Trim(string(b), `"`)
	code, known := optionNames()[text]
	if !known {
		n, err := strconv.ParseUint(text, 10, 8)
		if err != nil || n == 0 || n == 255 {
			return newError(codeInvalidConfig, "%s is no option of DHCP", b)
		}
		code = uint8(n)
	}

	*o = option(code)
	return nil
}

// JSONExpects describes the JSON that the type accepts, for errors.
func (option) JSONExpects() string { return `an option's number, or a name such as "routers"` }

const (
	clientByContainer = "container"
	clientByPod       = "pod"
	clientByMAC       = "mac"

	keeperRequired = "required"
	keeperOptional = "optional"
)

// dhcp decodes the ipam section of type dhcp, and adds defaults and the pod's annotations. It returns the first error
// in the section. If the program was called as the reference plugin bridge, dhcp ignores unknown fields and the field
// routes.
func (c *NetConf) dhcp() (*DHCP, error) {
	conf := DHCP{ClientID: clientByContainer, Keeper: keeperRequired, Timeout: Duration(dhcpc.DefaultTimeout),
		byName: c.bridge}
	r := &ipamRequest{Section: c.IPAM, Strict: true, ByName: c.bridge}
	if err := r.read(&conf); err != nil {
		return nil, err
	}

	if c.bridge {
		conf.Routes = nil
	}

	if c.annotated.HostName != nil {
		conf.HostName = c.annotated.HostName
	}

	if c.annotated.ClientID != "" {
		conf.ClientID = clientByPod
	}

	var p problems
	clients, keepers := []string{clientByContainer, clientByPod, clientByMAC}, []string{keeperRequired, keeperOptional}
	p.add(!slices.Contains(clients, conf.ClientID), "ipam.clientID %q is not known: use one of %q", conf.ClientID,
		clients)
	p.add(!slices.Contains(keepers, conf.Keeper), "ipam.keeper %q is not known: use one of %q", conf.Keeper, keepers)
	p.add(conf.Priority < 0, "ipam.priority %d is negative", conf.Priority)
	for i, r := range conf.Routes {
		p.add(!r.Dst.IsValid() || !r.Dst.Addr().Is4() || r.GW.IsValid() && !r.GW.Is4(),
			"ipam.routes[%d]: a route of IPv4 needs a dst such as 10.0.0.0/8, and may have a gw", i)
	}

	return &conf, strict.Problems(p).First()
}

// identity identifies a pod's interface to a DHCP server.
type identity struct {
	network.Key
	pod string // namespace/name; empty if unknown
}

// longestID is the maximum length in bytes of a client identifier without its type byte.
const longestID = 254

// text returns a text that identifies the interface. The client identifier and the MAC are derived from it. The text
// contains the container ID if basis, the setting ipam.clientID, is "container", or if the pod's name is unknown.
// Otherwise, it contains the pod's name.
func (id *identity) text(basis string) string {
	owner := id.ContainerID
	if id.pod != "" && basis != clientByContainer {
		owner = id.pod
	}
	return owner + "/" + id.Network + "/" + id.IfName
}

// clientID returns the value of option 61, the client identifier. basis is the setting ipam.clientID. With "mac", the
// value is the type of Ethernet and the MAC. With "container" or "pod", it is a zero byte, which means no hardware
// address, and id.text. An operator can recognize this text in the server's list. Its SHA-256 replaces it if it is too
// long. If basis is "pod" and the pod's name is unknown, clientID returns an error.
func (id *identity) clientID(basis string, mac net.HardwareAddr) ([]byte, error) {
	switch {
	case basis == clientByMAC:
		const ethernet = 1
		return append([]byte{ethernet}, mac...), nil
	case basis == clientByPod && id.pod == "":
		return nil, newError(codeInvalidConfig,
			`ipam.clientID "pod": the runtime does not say which pod it is (K8S_POD_NAMESPACE and K8S_POD_NAME `+
				`in CNI_ARGS): use "container" or "mac"`)
	}

	text := id.text(basis)
	if len(text) > longestID {
		sum := sha256.Sum256([]byte(text))
		return append([]byte{0}, sum[:]...), nil
	}

	return append([]byte{0}, text...), nil
}

// mac returns a locally administered MAC derived from the identity. The same identity always gets the same MAC, since
// home routers reserve addresses by MAC.
func (id *identity) mac(basis string) net.HardwareAddr { return MACOf(id.text(basis)) }

// MACOf derives a locally administered MAC from a text. The same text always gives the same MAC.
func MACOf(identity string) net.HardwareAddr {
	sum := sha256.Sum256([]byte("tombolo mac " + identity))
	return net.HardwareAddr{ident.DerivedMAC, sum[0], sum[1], sum[2], sum[3], sum[4]}
}

// Lease returns the settings for leasing an address for one pod. It returns an error if a value from CNI_ARGS or a
// required pod name is missing, or an element of provide names no option. Package network checks the values.
func (conf *DHCP) Lease(id *identity, mac net.HardwareAddr, args Args) (*network.Lease, error) {
	clientID, err := id.clientID(conf.ClientID, mac)
	if err != nil {
		return nil, err
	}

	l := &network.Lease{
		Client: dhcpc.Config{
			MAC: mac, ClientID: clientID, HostName: args["K8S_POD_NAME"], RapidCommit: conf.RapidCommit,
			DetectConflicts: conf.DetectConflicts, Servers: conf.Servers, Timeout: time.Duration(conf.Timeout),
		},
		Sticky: conf.ClientID == clientByPod, KeeperOptional: conf.Keeper == keeperOptional, Priority: conf.Priority,
	}
	if conf.byName {
		l.Client.HostName = ""
	}

	if conf.HostName != nil {
		l.Client.HostName = *conf.HostName
	}

	conf.request(&l.Client)
	for _, r := range conf.Routes {
		l.Routes = append(l.Routes, dhcpc.Route{Dst: r.Dst.Masked(), Gateway: r.GW})
	}

	return l, conf.provide(&l.Client, args)
}

// request sets the options that c requests from the server: those in the configuration, and the client's default
// options unless skipDefault is set. If the program was called as the reference plugin bridge, the mask and the routers
// replace the default options.
func (conf *DHCP) request(c *dhcpc.Config) {
	for _, r := range conf.Request {
		c.RequestOnly = c.RequestOnly || r.SkipDefault
		if r.Option != 0 {
			c.Request = append(c.Request, uint8(r.Option))
		}
	}
	if conf.byName && !c.RequestOnly {
		const mask, routers = 1, 3
		c.RequestOnly, c.Request = true, append(c.Request, routers, mask)
	}
}

// provide adds to c the options that the client sends. An element that has no option is an error. A key FromArg that is
// missing in CNI_ARGS is an error too, unless the program was called as the reference plugin bridge.
func (conf *DHCP) provide(c *dhcpc.Config, args Args) error {
	for i, p := range conf.Provide {
		if p.Option == 0 {
			return newError(codeInvalidConfig, "ipam.provide[%d] names no option", i)
		}

		value, found := args[p.FromArg]
		switch {
		case p.FromArg != "" && found:
		case p.FromArg != "" && !conf.byName:
			return newError(codeInvalidConfig, "ipam.provide[%d]: CNI_ARGS has no %s", i, p.FromArg)
		case p.Value == "" && conf.byName:
			continue
		default:
			value = p.Value
		}

		switch p.Option {
		case 12:
			c.HostName = value
		case 60:
			c.VendorClass = value
		case 61:
			c.ClientID = append([]byte{0}, value...)
			if conf.byName {
				c.ClientID = c.ClientID[1:]
			}
		default:
			c.Provide = append(c.Provide, dhcpc.Option{Code: uint8(p.Option), Value: []byte(value)})
		}
	}

	return nil
}

// Duration is a positive length of time, such as "5s" or "1m30s" in JSON.
type Duration time.Duration

// UnmarshalJSON parses a text in the form of time.ParseDuration. It returns an error for zero and negative durations.
func (d *Duration) UnmarshalJSON(b []byte) error {
	s := strings.Trim(string(b), `"`)
	v, err := time.ParseDuration(s)
	if err != nil || v <= 0 {
		return fmt.Errorf("%q is not a length of time such as %q", s, "5s")
	}
	*d = Duration(v)
	return nil
}

// JSONExpects describes the JSON that the type accepts, for errors.
func (Duration) JSONExpects() string { return `a length of time such as "5s"` }
