package cni

import (
	"strings"

	"github.com/tombolo-cni/tombolo/internal/cni/ipamconf"
	"github.com/tombolo-cni/tombolo/internal/strict"
	"github.com/tombolo-cni/tombolo/network"
)

// Examine gives what a plugin's configuration stands for, and all that ADD would find wrong
// with it one by one, without asking the kernel or the disk.
func Examine(data []byte) (*network.Network, []string) {
	var conf NetConf
	var found []string
	note := func(err error) {
		if err != nil {
			found = append(found, strings.Split(err.Error(), "\n")...)
		}
	}
	note(strict.All(data, &conf, exempt))
	conf.complete("")
	for _, err := range conf.problems() {
		note(err)
	}
	c := &call{Plugin: &Plugin{}, stdin: data}
	note(c.accept(&conf))
	s := conf.settings()
	if conf.ipamType() == ipamconf.TypeDHCP {
		_, err := conf.dhcp()
		note(err)
	} else {
		r := c.ipamRequest(&conf, true)
		r.All = true
		_, err := ipamconf.New(r)
		note(err)
	}
	s.Subnets = ipamconf.Subnets(data)
	return &s.Network, found
}
