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

// shieldFromNetworkd writes a configuration file that makes systemd-networkd ignore the bridge and the pods' ports.
// Without it, if an operator's file matches every link, each start of systemd-networkd would remove the ports from
// the bridge. It writes the file only for bridges that Tombolo made.
func (n *site) shieldFromNetworkd() error {
	path, links := networkdFile(n.rec.Bridge), n.rec.Bridge+" "+n.rec.GatewayLink()
	isOurs := n.bridge.Alias == endpoint.BridgeAlias
	if path == "" || !isOurs || strings.ContainsAny(links, `*?[]!\'"`) {
		return nil
	}

	hash := strings.Repeat("[0-9a-f]", 11) // of a port's name, and of the link that shapes its traffic
	text := fmt.Sprintf("# Made by Tombolo. \"tombolo remove\" deletes it.\n"+
		"[Match]\nName=%s veth%s ifb%[2]s\n\n[Link]\nUnmanaged=yes\n", links, hash)
	if have, err := file.Read(path, len(text)); err == nil && string(have) == text {
		return nil
	}

	temp := path + ".tmp"
	return errors.Join(os.MkdirAll(filepath.Dir(path), 0o755), os.WriteFile(temp, []byte(text), 0o644),
		os.Chmod(temp, 0o644), os.Rename(temp, path))
}

// networkdFile returns the path of a bridge's file for systemd-networkd. systemd-networkd reads the directory when it
// starts, and a boot empties it (systemd.network(5)). The name sorts before the names of operators' files.
// networkdFile returns "" if no systemd-networkd runs, or if the calling thread's network namespace is not the
// namespace of pid 1.
func networkdFile(bridge string) string {
	var own, first unix.Stat_t
	err := errors.Join(unix.Stat("/proc/thread-self/ns/net", &own), unix.Stat("/proc/1/ns/net", &first))
	if _, statErr := os.Stat("/run/systemd/netif"); err != nil || statErr != nil || own.Ino != first.Ino {
		return ""
	}
	return filepath.Join("/run/systemd/network", "05-tombolo-"+bridge+".network")
}
