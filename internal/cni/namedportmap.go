package cni

import (
	"context"
	"slices"

	current "github.com/containernetworking/cni/pkg/types/100"

	"github.com/tombolo-cni/tombolo/internal/endpoint"
	"github.com/tombolo-cni/tombolo/network"
	"github.com/tombolo-cni/tombolo/nft"
)

// portmapConf is the configuration of the reference's plugin portmap.
type portmapConf struct {
	Backend              *string  `json:"backend"`
	SNAT                 *bool    `json:"snat"`
	ConditionsV4         []string `json:"conditionsV4"`
	ConditionsV6         []string `json:"conditionsV6"`
	MasqAll              bool     `json:"masqAll"`
	MarkMasqBit          *int     `json:"markMasqBit"`          // what is masqueraded needs no mark,
	ExternalSetMarkChain *string  `json:"externalSetMarkChain"` // of nobody's
	RuntimeConfig        struct {
		PortMappings []PortMapping `json:"portMappings"`
	} `json:"runtimeConfig"`
}

func (c *call) readPortmap() (*portmapConf, error) {
	var f portmapConf
	if err := c.unmarshal(&f); err != nil {
		return nil, err
	}
	const maxBit = 31
	switch bit, backend := f.MarkMasqBit, f.Backend; {
	case bit != nil && f.ExternalSetMarkChain != nil:
		return nil, newError(codeInvalidConfig, "markMasqBit and externalSetMarkChain exclude each other")
	case bit != nil && (*bit < 0 || *bit > maxBit):
		return nil, newError(codeInvalidConfig, "markMasqBit %d is not within 0 and %d", *bit, maxBit)
	case backend != nil && *backend != "iptables" && *backend != "nftables":
		return nil, newError(codeInvalidConfig, `backend %q is neither "iptables" nor "nftables"`, *backend)
	}
	return &f, nil
}

// unsupported says what of the configuration this plugin cannot do.
func (f *portmapConf) unsupported() error {
	field := "conditionsV4"
	switch {
	case len(f.ConditionsV4) > 0:
	case len(f.ConditionsV6) > 0:
		field = "conditionsV6"
	default:
		return nil
	}
	return newError(codeUnsupportedField, "%s (conditions of iptables or nft as text) is not supported: leave it out, or have the reference's portmap do this (tombolo install --undo --names portmap DIR)", field)
}

// examinePortmap says what ADD would find wrong with a configuration, by that alone.
func (c *call) examinePortmap() error {
	f, err := c.readPortmap()
	if err != nil {
		return err
	}
	return f.unsupported()
}

// publication is what the node is asked for, for a pod with the addresses of a result. As there, masqAll means nothing
// without snat.
func (c *call) publication(f *portmapConf, prev *current.Result) (p network.Publication, _ error) {
	switch {
	case f.SNAT != nil && !*f.SNAT:
		p.SNAT = nft.SNATNone
	case f.MasqAll:
		p.SNAT = nft.SNATAll
	}
	ports, err := publishedPorts(f.RuntimeConfig.PortMappings)
	if err != nil {
		return p, err
	}
	has := map[bool]bool{}
	for _, a := range c.addressesOf(prev) {
		has[a.Is4()] = true
	}
	p.Ports = slices.DeleteFunc(ports, func(p network.HostPort) bool {
		// As there, this is no error: runtimes name the addresses of both families.
		passed := p.HostAddr.IsValid() && !has[p.HostAddr.Is4()]
		if passed {
			c.log.warn("host port " + endpoint.PortText(p) + " leads nowhere: the pod has no address of that family")
		}
		return passed
	})
	return p, nil
}

// portmap is the reference's plugin of that name: it has ports of the host lead to a pod.
func (c *call) portmap(ctx context.Context, conf *NetConf) (*current.Result, error) {
	f, err := c.readPortmap()
	if c.verb == "DEL" {
		// What no ADD takes keeps no plugin before this one from its DEL.
		if err != nil || len(f.RuntimeConfig.PortMappings) > 0 {
			c.takeBack(conf, func(node *network.Node) error { return node.Change(c.key()).Publish(ctx, network.Publication{}) })
		}
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	prev, err := c.chained(conf)
	if err != nil {
		return nil, err
	}
	publish, err := c.publication(f, prev)
	if err != nil {
		return nil, err
	}
	if len(publish.Ports) == 0 {
		if c.verb == "CHECK" {
			prev = nil
		}
		return prev, nil
	}
	node, err := c.open(conf)
	if err != nil {
		return nil, err
	}
	if c.verb == "CHECK" {
		return nil, differ(node.Change(c.key()).Check(ctx, &publish, nil))
	}
	if err := f.unsupported(); err != nil {
		return nil, err
	}
	return prev, node.Change(c.key()).Publish(ctx, publish)
}
