package demo

import (
	"context"
	"errors"
	"fmt"
	"net"

	"github.com/tombolo-cni/tombolo/network"
	"github.com/tombolo-cni/tombolo/nft"
)

const noBridge = "-"

// inventory counts what ADD makes and DEL has to take away, and names the bridge,
// which stays until the network is removed.
type inventory struct {
	vethEnds     int // the node's and the pods'
	endpoints    int // owners of nf_tables elements
	reservations int
	records      int
	bridge       string
}

// String words it for an error.
func (i inventory) String() string {
	return fmt.Sprintf("%d veth ends, %d owners of nf_tables elements, %d reservations, %d records and bridge %s",
		i.vethEnds, i.endpoints, i.reservations, i.records, i.bridge)
}

// take takes the inventory.
func (s *show) take(ctx context.Context) (inventory, error) {
	i := inventory{bridge: noBridge}
	node, err := network.Open(ctx, &network.Config{StateDir: s.stateDir})
	if err != nil {
		return i, err
	}
	pods, err := node.Attachments(ctx, networkName)
	i.records = len(pods)
	pools, poolErr := node.Pools(ctx)
	for _, p := range pools {
		i.reservations += int(p.Reserved)
	}
	return i, errors.Join(err, poolErr, s.countLinks(&i), i.countEndpoints(ctx))
}

// countLinks counts all that is not the sandbox's.
func (s *show) countLinks(i *inventory) error {
	count := func() error {
		links, err := net.Interfaces()
		for _, l := range links {
			switch l.Name {
			case podBridge:
				i.bridge = l.Name
			case "lo", outsideBridge, outsidePort:
			default:
				i.vethEnds++
			}
		}
		return err
	}
	err := count()
	for _, p := range s.pods {
		err = errors.Join(err, p.ns.Do(count))
	}
	return err
}

func (i *inventory) countEndpoints(ctx context.Context) error {
	conn, err := nft.Dial(nil)
	if err != nil {
		return err
	}
	defer conn.Close()
	endpoints, err := conn.Endpoints(ctx, "")
	i.endpoints = len(endpoints)
	return err
}
