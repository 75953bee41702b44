package cni

import (
	"strings"

	"github.com/tombolo-cni/tombolo/internal/cni/ipamconf"
	"github.com/tombolo-cni/tombolo/network"
)

// Examine gives what a configuration stands for where the program is called by a name, and all that
// ADD would find wrong with it one by one, without asking the kernel or the disk. The network is nil by
// the names of plugins that make none.
func Examine(name string, data []byte) (*network.Network, []string) {
	c := (&Plugin{Name: name}).newCall()
	var found []string
	note := func(errs ...error) {
		for _, err := range errs {
			if err != nil {
				found = append(found, strings.Split(err.Error(), "\n")...)
			}
		}
	}
	note(c.parse(data))
	note(c.wrong()...)
	note(c.accept(), c.conf.acceptName())
	if f, ok := c.configuration.(*portmapConf); ok {
		note(f.unsupported())
	}
	conf, ok := c.configuration.(*NetConf)
	if !ok {
		return nil, found
	}
	s := conf.settings()
	if conf.IPAM.Type == ipamconf.TypeDHCP {
		_, err := conf.dhcp()
		note(err)
	} else {
		r := c.ipamRequest(conf, true)
		r.All = true
		of, err := ipamconf.New(r)
		note(err)
		s.Subnets = ipamconf.Subnets(of)
	}
	return &s, found
}
