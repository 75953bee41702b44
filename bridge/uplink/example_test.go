package uplink_test

import (
	"context"
	"fmt"
	"os/exec"
	"strings"

	"github.com/tombolo-cni/tombolo/bridge/uplink"
	"github.com/tombolo-cni/tombolo/netns"
)

// inMemory keeps the record as long as the process lives. A real one writes a file.
type inMemory struct{ record []byte }

func (j *inMemory) Save(record []byte) error { j.record = record; return nil }
func (j *inMemory) Remove() error            { j.record = nil; return nil }

// A host gives its NIC to a bridge, so that pods may be on its LAN, and gets it back.
func Example() {
	if err := inANamespace(context.Background()); err != nil {
		fmt.Println(err)
	}
	// Output:
	// addresses that would move: [192.168.7.5]
	// add 192.168.7.5/24 dev br0
	// make eth0 a port of br0
	// replace route default via 192.168.7.1 dev br0
	// delete 192.168.7.5/24 dev eth0
	// taken
}

func inANamespace(ctx context.Context) error {
	host, err := netns.New() // of the example's own
	if err != nil {
		return err
	}
	defer host.Close()
	for _, command := range []string{
		"link add eth0 address 02:00:00:00:00:05 type veth peer name cable", "link set eth0 addrgenmode none", "link set cable up", "link set eth0 up",
		"addr add 192.168.7.5/24 dev eth0", "route add default via 192.168.7.1",
	} {
		cmd := exec.Command("ip", strings.Fields(command)...)
		if err := host.Do(cmd.Start); err != nil {
			return err
		}
		if err := cmd.Wait(); err != nil {
			return err
		}
	}

	return host.Do(func() error { return takeAndGiveBack(ctx) })
}

func takeAndGiveBack(ctx context.Context) error {
	conn, err := uplink.Dial(nil)
	if err != nil {
		return err
	}
	defer conn.Close()
	u := uplink.Uplink{NIC: "eth0", Bridge: "br0"}
	steps, err := conn.Plan(ctx, u) // says what would be done
	if err != nil {
		return err
	}
	fmt.Println("addresses that would move:", steps.Moves)
	for line := range strings.Lines(steps.String()) {
		if strings.Contains(line, "dev") && !strings.Contains(line, "192.168.7.0/24") || strings.Contains(line, "port of") {
			fmt.Println(strings.TrimSpace(line))
		}
	}

	journal := &inMemory{}
	rec, err := conn.Take(ctx, u, journal)
	if err != nil {
		return err
	}
	fmt.Println(rec.State)
	err = conn.Restore(ctx, rec, journal)
	return err
}
