package loopback

import (
	"context"

	current "github.com/containernetworking/cni/pkg/types/100"

	"github.com/tombolo-cni/tombolo/internal/cni/reference"
)

// Run is the plugin of that name.
func Run(_ context.Context, c *reference.Call) (*current.Result, error) {
	switch c.Verb {
	case "ADD":
		return run(c)
	case "DEL":
		return nil, Del(c.NetNS)
	case "CHECK":
		if err := Check(c.NetNS); err != nil {
			return nil, reference.Errorf(reference.CodeDiffers, "%v", err)
		}
	}
	return nil, nil
}

func run(c *reference.Call) (*current.Result, error) {
	result, err := c.Prev()
	if err != nil {
		return nil, err
	}
	addresses, err := Add(c.NetNS)
	if err != nil || result != nil {
		return result, err
	}
	result = &current.Result{Interfaces: []*current.Interface{
		{Name: Name, Mac: "00:00:00:00:00:00", Sandbox: c.NetNS},
	}}
	for _, p := range addresses {
		result.IPs = append(result.IPs, &current.IPConfig{Interface: new(int), Address: reference.IPNet(p)})
	}
	return result, nil
}
