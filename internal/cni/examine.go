package cni

import (
	"strings"

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
	if conf.IPAM.Type == typeDHCP {
		_, err := conf.dhcp()
		note(err)
	} else {
		r := c.ipamRequest(conf, true)
		r.All = true
		of, err := newAllocator(r)
		if note(err); err == nil {
			s.Subnets = of.subnets()
		}
	}
	return &s, found
}
