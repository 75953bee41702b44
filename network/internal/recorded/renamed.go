package recorded

import (
	"bytes"
	"context"
	"crypto/sha256"
	"net"

	"github.com/tombolo-cni/tombolo/bridge"
	"github.com/tombolo-cni/tombolo/internal/endpoint"
	"github.com/tombolo-cni/tombolo/internal/state"
)

// BridgeMAC is the MAC of a bridge that is made, the same whenever that happens in
// one life of the node: pods would send to the gateway's old one for half a minute.
func BridgeMAC(epoch, name string) net.HardwareAddr {
	sum := sha256.Sum256([]byte(epoch + " " + name))
	sum[0] = sum[0]&^1 | 2 // unicast, locally administered
	return sum[:6]
}

// RenamedBridge is a bridge of ours that somebody gave another name.
type RenamedBridge struct {
	Index     int
	Name, Was string
}

// Renamed finds the bridges of networks that have another name than their records say. Alias and
// MAC tell them: that was made from the name that the bridge had.
func Renamed(ctx context.Context, links *bridge.Conn, records []*state.Network) ([]RenamedBridge, error) {
	bridges, err := links.Bridges(ctx)
	var list []RenamedBridge
	for i := range bridges {
		l := &bridges[i]
		was := ""
		for _, rec := range records {
			if rec.Bridge == l.Name {
				was = ""
				break
			}
			if l.Alias == endpoint.BridgeAlias && bytes.Equal(l.MAC, BridgeMAC(rec.Epoch, rec.Bridge)) {
				was = rec.Bridge
			}
		}
		if was != "" {
			list = append(list, RenamedBridge{l.Index, l.Name, was})
		}
	}
	return list, err
}
