package cni

import (
	"bytes"
	"net"

	"github.com/containernetworking/cni/pkg/types"
	current "github.com/containernetworking/cni/pkg/types/100"

	"github.com/tombolo-cni/tombolo/internal/strict"
)

// encode writes a result in the version of the configuration.
func (c *call) encode(r *current.Result) ([]byte, error) {
	if c.conf.CNIVersion == "1.0.0" || c.conf.CNIVersion == "1.1.0" {
		r.CNIVersion = c.conf.CNIVersion
		return encodeResult(r), nil
	}
	families := map[bool]int{}
	for _, ip := range r.IPs {
		families[ip.Address.IP.To4() != nil]++
	}
	if c.conf.CNIVersion < "0.3.0" && max(families[true], families[false]) > 1 {
		return nil, newError(codeInvalidConfig, "a result of CNI %s has one address of each family, and the pod has more: use cniVersion 0.3.0 or later", c.conf.CNIVersion)
	}
	var out bytes.Buffer
	older, err := r.GetAsVersion(c.conf.CNIVersion)
	if err == nil {
		err = older.PrintTo(&out)
	}
	if err != nil {
		return nil, newError(codeIncompatibleVersion, "write the result as CNI %s: %v", c.conf.CNIVersion, err)
	}
	return out.Bytes(), nil
}

// A resultObject is a result of CNI 1.0 and 1.1, as the specification's section 5 has it. The
// library's types take four passes, which is a tenth of an ADD.
type resultObject struct {
	CNIVersion string               `json:"cniVersion,omitempty"`
	Interfaces []*current.Interface `json:"interfaces,omitempty"`
	IPs        []ipObject           `json:"ips,omitempty"`
	Routes     []routeConf          `json:"routes,omitempty"`
	DNS        *types.DNS           `json:"dns,omitempty"`
}

type ipObject struct {
	Interface *int   `json:"interface,omitempty"`
	Address   string `json:"address"`
	Gateway   net.IP `json:"gateway,omitempty"`
}

func encodeResult(r *current.Result) []byte {
	object := resultObject{CNIVersion: r.CNIVersion, Interfaces: r.Interfaces}
	for _, ip := range r.IPs {
		object.IPs = append(object.IPs, ipObject{ip.Interface, ip.Address.String(), ip.Gateway})
	}
	for _, route := range r.Routes {
		conf, _ := confOf(route)
		object.Routes = append(object.Routes, conf)
	}
	if !r.DNS.IsEmpty() {
		object.DNS = &r.DNS
	}
	return append(strict.Append(nil, &object), '\n')
}
