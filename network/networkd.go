package network

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/endpoint"
	"github.com/tombolo-cni/tombolo/internal/file"
)

// systemd-networkd reads files from networkdFiles, a directory for other programs (systemd.network(5)), when it starts.
// Where it runs, networkdState exists. Both are gone after a boot.
const (
	networkdFiles = "/run/systemd/network"
	networkdState = "/run/systemd/netif"
)

// podPorts matches the names of pods' ports, and of the links that shape their traffic (ident.Hash).
const (
	podPorts = "veth" + hexDigit11 + " ifb" + hexDigit11

	hexDigit   = "[0-9a-f]"
	hexDigit11 = hexDigit + hexDigit + hexDigit + hexDigit + hexDigit + hexDigit + hexDigit + hexDigit + hexDigit + hexDigit + hexDigit
)

// shieldFromNetworkd writes a file by which systemd-networkd leaves the bridge and the ports of pods alone. Where a file
// of the operator's matches every link, each start of systemd-networkd would take the ports off the bridge otherwise.
// The file is for the systemd-networkd of pid 1's network namespace, and for bridges that Tombolo made.
func (n *site) shieldFromNetworkd() error {
	if !networkdIsHere() || n.rec.Uplink != "" || n.bridge.Alias != endpoint.BridgeAlias || strings.ContainsAny(n.rec.Bridge+n.rec.GatewayLink(), `*?[]!\'"`) {
		return nil
	}

	text := fmt.Sprintf("# Made by Tombolo. \"tombolo remove\" deletes it.\n[Match]\nName=%s %s %s\n\n[Link]\nUnmanaged=yes\n",
		n.rec.Bridge, n.rec.GatewayLink(), podPorts)
	path := networkdFile(n.rec.Bridge)
	if have, err := file.Read(path, len(text)); err == nil && string(have) == text {
		return nil
	}
	temp := path + ".tmp"
	return errors.Join(os.MkdirAll(networkdFiles, 0o755), os.WriteFile(temp, []byte(text), 0o644), os.Chmod(temp, 0o644), os.Rename(temp, path))
}

// networkdIsHere reports whether a systemd-networkd works on the calling thread's network namespace: it runs in that of
// pid 1.
func networkdIsHere() bool {
	var own, first unix.Stat_t
	err := errors.Join(unix.Stat("/proc/thread-self/ns/net", &own), unix.Stat("/proc/1/ns/net", &first))
	_, statErr := os.Stat(networkdState)
	return err == nil && statErr == nil && own.Ino == first.Ino
}

// removeNetworkdFile deletes what shieldFromNetworkd wrote for a bridge.
func removeNetworkdFile(bridge string) error {
	if !networkdIsHere() {
		return nil
	}
	return file.Remove(networkdFile(bridge))
}

// networkdFile is the path of the file for a bridge. It sorts before the files that operators write.
func networkdFile(bridge string) string {
	return filepath.Join(networkdFiles, "05-tombolo-"+bridge+".network")
}
