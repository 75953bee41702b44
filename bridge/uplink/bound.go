package uplink

import (
	"bufio"
	"context"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"io/fs"
	"net/netip"
	"os"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo"
	"github.com/tombolo-cni/tombolo/internal/tc"
)

// hooks lists the queueing disciplines of a link that run programs on its packets.
func (c *Conn) hooks(ctx context.Context, link int) ([]string, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	var list []string
	err := tc.Qdiscs(c.nl, func(q tc.Qdisc) {
		if q.Link == link && (q.Kind == "clsact" || q.Kind == "ingress") {
			list = append(list, q.Kind)
		}
	})
	return list, err
}

// readGroups reads the groups that were joined on a link, without those that the
// kernel joins by itself.
func readGroups(link string) ([]netip.Addr, error) {
	var list []netip.Addr
	current := ""
	err := eachLine("igmp", func(f []string) {
		// A line "index name : count querier" for the link, then "group users …" for
		// each of its groups, as a number of the machine in hexadecimal.
		if len(f) > 2 && f[2] == ":" {
			current = f[1]
			return
		}
		n, err := strconv.ParseUint(f[0], 16, 32)
		if current != link || err != nil || len(f[0]) != 8 {
			return
		}
		var b [4]byte
		binary.NativeEndian.PutUint32(b[:], uint32(n))
		list = append(list, netip.AddrFrom4(b))
	})
	if err == nil {
		err = eachLine("igmp6", func(f []string) {
			// index name group users flags timer
			if len(f) < 4 || f[1] != link {
				return
			}
			if b, err := hex.DecodeString(f[2]); err == nil && len(b) == 16 {
				list = append(list, netip.AddrFrom16([16]byte(b)))
			}
		})
	}
	return slices.DeleteFunc(list, isKernelGroup), err
}

// isKernelGroup says that the kernel joins a group on its own: all hosts, all
// routers, all snoopers, and the solicited-node groups of its addresses.
func isKernelGroup(a netip.Addr) bool {
	switch a.String() {
	case "224.0.0.1", "224.0.0.106", "ff01::1", "ff02::1", "ff01::2", "ff02::2", "ff05::2", "ff02::6a":
		return true
	}
	return netip.MustParsePrefix("ff02::1:ff00:0/104").Contains(a)
}

// eachLine gives the fields of each line of a file of /proc/net, in the namespace
// of the calling thread, but for the headline of those that have one. A file that
// is not there, because the kernel has no such protocol, is empty.
func eachLine(name string, line func([]string)) error {
	f, err := os.Open("/proc/thread-self/net/" + name)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return &tombolo.OpError{Op: "read", Object: "/proc/net/" + name, Err: err}
	}
	defer f.Close()
	scan := bufio.NewScanner(f)
	for scan.Scan() {
		if fields := strings.Fields(scan.Text()); len(fields) > 0 {
			line(fields)
		}
	}
	return scan.Err()
}

// isWireless asks for the name of the protocol on a link, the oldest of the wireless
// extensions, which the kernel answers for most Wi-Fi devices
// (CONFIG_CFG80211_WEXT), and looks into sysfs where that shows the same link.
func isWireless(link string, index int) bool {
	const siocGIWName = 0x8b01
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return false
	}
	defer unix.Close(fd)
	if request, err := unix.NewIfreq(link); err == nil && unix.IoctlIfreq(fd, siocGIWName, request) == nil {
		return true
	}
	const dir = "/sys/class/net/"
	shown, err := os.ReadFile(dir + link + "/ifindex")
	if err != nil || strings.TrimSpace(string(shown)) != strconv.Itoa(index) {
		return false // sysfs is of the namespace that it was mounted in
	}
	_, err = os.Stat(dir + link + "/phy80211")
	return err == nil
}
