package cni

import (
	"context"
	"slices"

	current "github.com/containernetworking/cni/pkg/types/100"

	"github.com/tombolo-cni/tombolo/internal/endpoint"
	"github.com/tombolo-cni/tombolo/internal/state"
	"github.com/tombolo-cni/tombolo/network"
	"github.com/tombolo-cni/tombolo/nft"
)

// portmapConf is the configuration of the reference's plugin of that name: it has ports of the host lead to a pod.
type portmapConf struct {
	Common
	Backend              *string  `json:"backend"`
	SNAT                 *bool    `json:"snat"`
	ConditionsV4         []string `json:"conditionsV4"`
	ConditionsV6         []string `json:"conditionsV6"`
	MasqAll              bool     `json:"masqAll"`
	MarkMasqBit          *int     `json:"markMasqBit"`          // what is masqueraded needs no mark,
	ExternalSetMarkChain *string  `json:"externalSetMarkChain"` // of nobody's
}

func (f *portmapConf) problems() []error {
	p := problems(f.Common.problems())
	const maxBit = 31
	bit, backend := orZero(f.MarkMasqBit), f.Backend
	p.add(f.MarkMasqBit != nil && f.ExternalSetMarkChain != nil, "markMasqBit and externalSetMarkChain exclude each other")
	p.add(bit < 0 || bit > maxBit, "markMasqBit %d is not within 0 and %d", bit, maxBit)
	p.add(backend != nil && *backend != "iptables" && *backend != "nftables", `backend %q is neither "iptables" nor "nftables"`, orZero(backend))
	return p
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

func (f *portmapConf) lacks(rec *state.Attachment) bool {
	ports, err := publishedPorts(f.RuntimeConfig.PortMappings)
	return err == nil && len(ports) > 0 && len(rec.Published) == 0
}

// publication is what the node is asked for, for a pod with the addresses of a result. As there, masqAll means nothing
// without snat.
func (f *portmapConf) publication(c *call, prev *current.Result) (p network.Publication, _ error) {
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
	for _, a := range c.addressesIn(prev) {
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

func (f *portmapConf) run(ctx context.Context, c *call) (*current.Result, error) {
	if c.verb == "DEL" {
		// What no ADD takes keeps no plugin before this one from its DEL.
		if len(c.undecoded) > 0 || len(f.RuntimeConfig.PortMappings) > 0 {
			c.takeBack(func(of network.Change) error { return of.Publish(ctx, network.Publication{}) })
		}
		return nil, nil
	}
	prev, of, err := c.chained()
	if err != nil {
		return nil, err
	}
	publish, err := f.publication(c, prev)
	if err != nil {
		return nil, err
	}
	switch {
	case len(publish.Ports) == 0:
		return c.passOn()
	case c.verb == "CHECK":
		return nil, differ(of.Check(ctx, &publish, nil))
	}
	if err := f.unsupported(); err != nil {
		return nil, err
	}
	return prev, of.Publish(ctx, publish)
}
