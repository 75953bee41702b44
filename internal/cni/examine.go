package cni

import (
	"strings"

	"github.com/tombolo-cni/tombolo/internal/cni/ipamconf"
	"github.com/tombolo-cni/tombolo/internal/cni/reference"
	"github.com/tombolo-cni/tombolo/internal/cni/reference/firewall"
	"github.com/tombolo-cni/tombolo/internal/cni/reference/limits"
	"github.com/tombolo-cni/tombolo/internal/cni/reference/portmap"
	"github.com/tombolo-cni/tombolo/internal/cni/reference/tuning"
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
		pass = func(string, string) bool { return true }
	}
	if run, _ := c.named(); run != nil {
		_ = strict.Lenient(data, &conf)
		note(c.accept(&conf))
		note(c.examineChained())
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
		_, err := ipamconf.New(r)
		note(err)
	}
	s.Subnets = ipamconf.Subnets(data)
	return &s.Network, found
}

// examineChained says what ADD of a plugin that works on interfaces of others would find wrong with the configuration,
// by that alone; nil by any other name.
func (c *call) examineChained() error {
	examine := map[string]func(*reference.Call) error{
		"bandwidth": limits.Examine, "firewall": firewall.Examine, "portmap": portmap.Examine, "tuning": tuning.Examine,
	}[c.Name]
	if examine == nil {
		return nil
	}
	return examine(&reference.Call{Name: c.Name, Stdin: c.stdin})
}
