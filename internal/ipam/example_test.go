package ipam_test

import (
	"context"
	"fmt"
	"os"

	"github.com/tombolo-cni/tombolo/internal/ipam"
)

func ExampleNew() {
	dir, err := os.MkdirTemp("", "ipam")
	if err != nil {
		fmt.Println(err)
		return
	}
	defer os.RemoveAll(dir)
	request := &ipam.Request{
		Network:        "lan",
		ContainerID:    "web-1",
		IfName:         "eth0",
		DefaultDataDir: dir,
		Strict:         true,
		Stdin: []byte(`{"cniVersion": "1.1.0", "name": "lan", "type": "tombolo",
			"ipam": {"type": "host-local", "ranges": [[{"subnet": "fd00:1::/64"}], [{"subnet": "10.1.0.0/24"}]]}}`),
	}
	allocator, err := ipam.New(request)
	if err != nil {
		fmt.Println(err)
		return
	}
	result, err := allocator.Add(context.Background())
	if err != nil {
		fmt.Println(err)
		return
	}
	for _, ip := range result.IPs {
		fmt.Println(ip.Address.String(), "via", ip.Gateway)
	}
	fmt.Println(allocator.Del(context.Background(), nil))
	// Output:
	// 10.1.0.2/24 via 10.1.0.1
	// fd00:1::2/64 via fd00:1::1
	// <nil>
}
