package cni

import (
	current "github.com/containernetworking/cni/pkg/types/100"

	"github.com/tombolo-cni/tombolo/internal/cni/loopback"
)

// loopback carries out a verb of the plugin of that name.
func (c *call) loopback() error {
	conf, err := parseLenient(c.stdin)
	if err == nil {
		err = c.accept(conf)
	}
	if err != nil {
		return err
	}
	switch c.verb {
	case "ADD":
		return c.loopbackAdd(conf)
	case "DEL":
		return loopback.Del(c.netns)
	case "CHECK":
		if err := loopback.Check(c.netns); err != nil {
			return newError(codeDiffers, "%v", err)
		}
	}
	return nil
}

func (c *call) loopbackAdd(conf *NetConf) error {
	result, err := parsePrevResult(conf, c.cniVersion)
	if err != nil {
		return err
	}
	addresses, err := loopback.Add(c.netns)
	if err != nil {
		return err
	}
	if result == nil {
		result = &current.Result{CNIVersion: current.ImplementedSpecVersion, Interfaces: []*current.Interface{
			{Name: loopback.Name, Mac: "00:00:00:00:00:00", Sandbox: c.netns},
		}}
		for _, p := range addresses {
			result.IPs = append(result.IPs, &current.IPConfig{Interface: new(int), Address: ipNet(p)})
		}
	}
	written, err := c.encode(result)
	if err == nil {
		err = c.print(written)
	}
	return err
}
