package ipamconf

import (
	"encoding/json"
	"net/netip"
)

// Subnets gives the subnets that the ipam section of host-local and static gives addresses of.
// What cannot be read is not for it to say.
func Subnets(stdin []byte) []netip.Prefix {
	type subnet struct {
		Subnet string `json:"subnet"`
	}
	var conf struct {
		IPAM struct {
			subnet
			Ranges    [][]subnet `json:"ranges"`
			Addresses []struct {
				Address string `json:"address"`
			} `json:"addresses"`
		} `json:"ipam"`
	}
	if json.Unmarshal(stdin, &conf) != nil {
		return nil
	}
	texts := []string{conf.IPAM.Subnet}
	for _, set := range conf.IPAM.Ranges {
		for _, r := range set {
			texts = append(texts, r.Subnet)
		}
	}
	for _, a := range conf.IPAM.Addresses {
		texts = append(texts, a.Address)
	}
	var list []netip.Prefix
	for _, text := range texts {
		if p, err := netip.ParsePrefix(text); err == nil {
			list = append(list, p.Masked())
		}
	}
	return list
}
