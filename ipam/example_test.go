package ipam_test

import (
	"context"
	"fmt"
	"net/netip"
	"os"

	"github.com/tombolo-cni/tombolo/ipam"
)

// A pod gets an address, and gives it back.
func Example() {
	if err := run(context.Background()); err != nil {
		fmt.Println(err)
	}
	// Output: [10.1.0.2/24 via 10.1.0.1]
}

func run(ctx context.Context) error {
	dir, err := os.MkdirTemp("", "ipam")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	var owners []ipam.Owner

	ranges := []ipam.RangeSet{{Ranges: []ipam.Range{{Subnet: netip.MustParsePrefix("10.1.0.0/24")}}}}
	addresses, err := ipam.NewHostLocal(&ipam.Config{Network: "pods", Dir: dir, Ranges: ranges})
	if err != nil {
		return err
	}
	owner := ipam.Owner{ContainerID: "web-1", IfName: "eth0"}
	allocation, err := addresses.Add(ctx, owner) // 10.1.0.2/24 via 10.1.0.1
	if err != nil {
		return err
	}
	fmt.Println(allocation.Addresses)
	err = addresses.Check(ctx, owner, allocation.Addresses)
	if err != nil {
		return err
	}
	err = addresses.Del(ctx, owner, nil)
	if err != nil {
		return err
	}
	err = addresses.Collect(ctx, owners) // the owners that still exist
	return err
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
