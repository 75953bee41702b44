package share_test

import (
	"context"
	"fmt"

	"github.com/tombolo-cni/tombolo/bridge"
	"github.com/tombolo-cni/tombolo/bridge/share"
)

// A bridge is connected to the LAN of eth0, which stays the host's. Package nft leads frames for pods there.
func Example() {
	if err := shareNIC(context.Background()); err != nil {
		fmt.Println(err)
	}
}

func shareNIC(ctx context.Context) error {
	links, err := bridge.Dial(nil)
	if err != nil {
		return err
	}
	defer links.Close()
	_, err = links.Ensure(ctx, bridge.Bridge{Name: "lan0", Alias: "mycni", NoIPv6: true})
	if err != nil {
		return err
	}

	conn := share.On(links.Socket())
	changed, err := conn.Ensure(ctx, share.Share{NIC: "eth0", Bridge: "lan0", Alias: "mycni"})
	if err != nil {
		return err // such as Wi-Fi
	}
	differences, err := conn.Check(ctx, share.Share{NIC: "eth0", Bridge: "lan0", Alias: "mycni"})
	if err != nil {
		return err
	}
	fmt.Println(changed, differences)
	err = conn.Remove(ctx, share.Share{NIC: "eth0", Bridge: "lan0", Alias: "mycni"})
	return err
}
