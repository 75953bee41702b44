package ipam_test

import (
	"context"
	"fmt"
	"net/netip"
	"os"

	"github.com/tombolo-cni/tombolo/ipam"
)

func Example() {
	dir, err := os.MkdirTemp("", "ipam")
	if err != nil {
		fmt.Println(err)
		return
	}
	defer os.RemoveAll(dir)
	ctx := context.Background()

	addresses, err := ipam.NewHostLocal(&ipam.Config{Network: "pods", Dir: dir, Ranges: []ipam.RangeSet{
		{Ranges: []ipam.Range{{Subnet: netip.MustParsePrefix("fd00:1::/64")}}},
		{Ranges: []ipam.Range{{Subnet: netip.MustParsePrefix("10.1.0.0/24")}}},
	}})
	if err != nil {
		fmt.Println(err)
		return
	}
	owner := ipam.Owner{ContainerID: "web-1", IfName: "eth0"}
	given, err := addresses.Add(ctx, owner)
	if err != nil {
		fmt.Println(err)
		return
	}
	for _, a := range given.Addresses {
		fmt.Println(a)
	}
	fmt.Println(addresses.Del(ctx, owner, nil))
	// Output:
	// 10.1.0.2/24 via 10.1.0.1
	// fd00:1::2/64 via fd00:1::1
	// <nil>
}

func ExampleHostLocal_Want() {
	dir, err := os.MkdirTemp("", "ipam")
	if err != nil {
		fmt.Println(err)
		return
	}
	defer os.RemoveAll(dir)
	addresses, err := ipam.NewHostLocal(&ipam.Config{Network: "pods", Dir: dir, Ranges: []ipam.RangeSet{
		{Ranges: []ipam.Range{{Subnet: netip.MustParsePrefix("10.1.0.0/24")}}},
	}})
	if err != nil {
		fmt.Println(err)
		return
	}
	_, err = addresses.Want(netip.MustParseAddr("10.2.0.9"))
	fmt.Println(err)
	asked, err := addresses.Want(netip.MustParseAddr("10.1.0.9"))
	if err != nil {
		fmt.Println(err)
		return
	}
	given, err := asked.Add(context.Background(), ipam.Owner{ContainerID: "web-1", IfName: "eth0"})
	fmt.Println(given.Addresses, err)
	// Output:
	// network "pods": the requested address 10.2.0.9 is in no range of it
	// [10.1.0.9/24 via 10.1.0.1] <nil>
}
