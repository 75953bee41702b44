package vlan_test

import (
	"context"
	"fmt"

	"github.com/tombolo-cni/tombolo/bridge"
	"github.com/tombolo-cni/tombolo/bridge/vlan"
)

// A port gets VLAN 100 without tags, and 200 to 299 with theirs. The host gets a link in VLAN 100.
func Example() {
	ctx := context.Background()
	err := func() error {
		conn, err := bridge.Dial(nil)
		if err != nil {
			return err
		}
		defer conn.Close()
		if _, err := conn.Ensure(ctx, bridge.Bridge{Name: "br0", VLANFiltering: true}); err != nil {
			return err
		}
		br, err := conn.Link(ctx, "br0")
		if err != nil {
			return err
		}
		port, err := conn.Link(ctx, "tap0")
		if err != nil {
			return err
		}
		in := vlan.Membership{ID: 100, Trunk: []vlan.Range{{First: 200, Last: 299}}}
		if _, err := conn.VLANs().Ensure(ctx, port.Index, in); err != nil {
			return err
		}
		_, err = conn.VLANs().EnsureLink(ctx, vlan.Link{Bridge: br.Index, Name: "br0.100", ID: 100, MTU: br.MTU})
		return err
	}()
	if err != nil {
		fmt.Println(err)
	}
}
