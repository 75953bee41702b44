package vlan_test

import (
	"context"
	"fmt"

	"github.com/tombolo-cni/tombolo/bridge"
	"github.com/tombolo-cni/tombolo/bridge/vlan"
)

// A port gets VLAN 100 without tags, and 200 to 299 with theirs. The host gets a link in VLAN 100.
func Example() {
	if err := entryRange(context.Background()); err != nil {
		fmt.Println(err)
	}
}

func entryRange(ctx context.Context) error {
	links, err := bridge.Dial(nil)
	if err != nil {
		return err
	}
	defer links.Close()
	if _, err := links.Ensure(ctx, bridge.Bridge{Name: "br0", Alias: "mycni", VLANFiltering: true}); err != nil {
		return err
	}
	br, err := links.Link(ctx, "br0")
	if err != nil {
		return err
	}
	port, err := links.Link(ctx, "tap0")
	if err != nil {
		return err
	}

	conn := links.VLANs()                                                       // links is a bridge.Conn, port and br are Links that it found
	in := vlan.Membership{ID: 100, Trunk: vlan.Ranges{{First: 200, Last: 299}}} // the trunk's frames keep their tags
	changed, err := conn.Ensure(ctx, port.Index, in)
	if err != nil {
		return err
	}
	fmt.Println("changed:", changed)
	changed, err = conn.EnsureLink(ctx, vlan.Link{Bridge: br.Index, Name: "br0.100", ID: 100, MTU: br.MTU})
	fmt.Println("changed:", changed)
	return err
}
