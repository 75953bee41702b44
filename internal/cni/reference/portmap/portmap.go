// Package portmap is the reference's plugin of that name: it has ports of the host lead to a pod.
package portmap

import (
	"context"
	"errors"
	"slices"

	"github.com/containernetworking/cni/pkg/types"
	current "github.com/containernetworking/cni/pkg/types/100"

	"github.com/tombolo-cni/tombolo/internal/cni/reference"
	"github.com/tombolo-cni/tombolo/internal/endpoint"
	"github.com/tombolo-cni/tombolo/network"
	"github.com/tombolo-cni/tombolo/nft"
)

// conf is the plugin's configuration.
type conf struct {
	Backend              *string  `json:"backend"`
	SNAT                 *bool    `json:"snat"`
	ConditionsV4         []string `json:"conditionsV4"`
	ConditionsV6         []string `json:"conditionsV6"`
	MasqAll              bool     `json:"masqAll"`
	MarkMasqBit          *int     `json:"markMasqBit"`          // what is masqueraded needs no mark,
	ExternalSetMarkChain *string  `json:"externalSetMarkChain"` // of nobody's
	RuntimeConfig        struct {
		PortMappings []Mapping `json:"portMappings"`
	} `json:"runtimeConfig"`

	ports []network.HostPort
}

const maxBit = 31

func read(c *reference.Call) (*conf, error) {
	var f conf
	if err := c.Unmarshal(&f); err != nil {
		return nil, err
	}
	invalid := func(format string, args ...any) error {
		return reference.Errorf(types.ErrInvalidNetworkConfig, format, args...)
	}
	switch bit, backend := f.MarkMasqBit, f.Backend; {
	case bit != nil && f.ExternalSetMarkChain != nil:
		return nil, invalid("markMasqBit and externalSetMarkChain exclude each other")
	case bit != nil && (*bit < 0 || *bit > maxBit):
		return nil, invalid("markMasqBit %d is not within 0 and %d", *bit, maxBit)
	case backend != nil && *backend != "iptables" && *backend != "nftables":
		return nil, invalid(`backend %q is neither "iptables" nor "nftables"`, *backend)
	}
	return &f, nil
}

// publication is what the node is asked for. As there, masqAll means nothing without snat.
func (f *conf) publication() network.Publication {
	p := network.Publication{Ports: f.ports}
	switch {
	case f.SNAT != nil && !*f.SNAT:
		p.SNAT = nft.SNATNone
	case f.MasqAll:
		p.SNAT = nft.SNATAll
	}
	return p
}

// unsupported says what of the configuration this plugin cannot do.
func (f *conf) unsupported() error {
	field := "conditionsV4"
	switch {
	case len(f.ConditionsV4) > 0:
	case len(f.ConditionsV6) > 0:
		field = "conditionsV6"
	default:
		return nil
	}
	return reference.Errorf(types.ErrUnsupportedField, "%s (conditions of iptables or nft as text) is not supported: leave it out, or have the reference's portmap do this (tombolo install --undo --names portmap DIR)", field)
}

// Run is the plugin of that name.
func Run(ctx context.Context, c *reference.Call) (*current.Result, error) {
	switch c.Verb {
	case "ADD":
		return add(ctx, c)
	case "CHECK":
		return nil, check(ctx, c)
	}
	return nil, c.TakenBack(del(ctx, c))
}

// chained reads the configuration, and the result of the plugins before, which is needed. DEL does without, and
// without a look at whether the mappings can be: those of a pod of before may not.
func chained(c *reference.Call) (*conf, *current.Result, error) {
	f, err := read(c)
	if err != nil {
		return nil, nil, err
	}
	prev, err := c.Chained()
	if err != nil {
		return nil, nil, err
	}
	if f.ports, err = Published(f.RuntimeConfig.PortMappings); err != nil {
		return nil, nil, err
	}
	has := map[bool]bool{}
	for _, a := range c.Addresses(prev) {
		has[a.Is4()] = true
	}
	f.ports = slices.DeleteFunc(f.ports, func(p network.HostPort) bool {
		// As there, this is no error: runtimes name the addresses of both families.
		passed := p.HostAddr.IsValid() && !has[p.HostAddr.Is4()]
		if passed {
			c.Warn("host port " + endpoint.PortText(p) + " leads nowhere: the pod has no address of that family")
		}
		return passed
	})
	return f, prev, nil
}

func add(ctx context.Context, c *reference.Call) (*current.Result, error) {
	f, prev, err := chained(c)
	if err != nil || len(f.ports) == 0 {
		return prev, err
	}
	if err := f.unsupported(); err != nil {
		return nil, err
	}
	node, err := c.Open()
	if err != nil {
		return nil, err
	}
	if err := node.Publish(ctx, c.Key(), f.publication()); err != nil {
		return nil, err
	}
	return prev, nil
}

func del(ctx context.Context, c *reference.Call) error {
	// What no ADD takes keeps no plugin before this one from its DEL.
	f, err := read(c)
	if err == nil && len(f.RuntimeConfig.PortMappings) == 0 {
		return nil
	}
	node, err := c.Open()
	if err != nil {
		return err
	}
	err = node.Publish(ctx, c.Key(), network.Publication{})
	if errors.Is(err, network.ErrNotAttached) {
		return nil
	}
	return err
}

func check(ctx context.Context, c *reference.Call) error {
	f, _, err := chained(c)
	if err != nil || len(f.ports) == 0 {
		return err
	}
	node, err := c.Open()
	if err != nil {
		return err
	}
	asked := f.publication()
	return reference.Differ(node.CheckAsked(ctx, c.Key(), &asked, nil))
}
