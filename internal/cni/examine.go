package cni

import (
	"strings"

	"github.com/tombolo-cni/tombolo/internal/cni/ipamconf"
	"github.com/tombolo-cni/tombolo/internal/strict"
	"github.com/tombolo-cni/tombolo/network"
)

// Examine gives what a configuration stands for where the program is called by a name, and all that
// ADD would find wrong with it one by one, without asking the kernel or the disk. The network is nil by
// the names of plugins that make none.
func Examine(name string, data []byte) (*network.Network, []string) {
	var conf NetConf
	var found []string
	note := func(err error) {
		if err != nil {
			found = append(found, strings.Split(err.Error(), "\n")...)
		}
	}
	c := &call{Plugin: &Plugin{Name: name}, stdin: data}
	pass := exempt
	if name != "" {
		pass = anything
	}
	if n := c.named(); n != nil {
		_ = strict.Lenient(data, &conf)
		note(c.accept(&conf))
		note(n.examine(c))
		return nil, found
	}
	note(strict.All(data, &conf, pass))
	conf.complete(name)
	for _, err := range conf.problems() {
		note(err)
	}
	note(c.accept(&conf))
	s := conf.settings()
	if conf.ipamType() == ipamconf.TypeDHCP {
		_, err := conf.dhcp()
		note(err)
	} else {
		r := c.ipamRequest(&conf, true)
		r.All = true
		of, err := ipamconf.New(r)
		note(err)
		s.Subnets = ipamconf.Subnets(of)
	}
	return &s.Network, found
}
