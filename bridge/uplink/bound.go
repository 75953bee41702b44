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
	"strings"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/conntrack"
)

// lookGroups reads the groups that were joined on the NIC, in the namespace of the calling
// thread, without those that the kernel joins by itself.
func (s *Snapshot) lookGroups() error {
	current := ""
	err := eachLine("igmp", func(f []string) {
		// A line "index name : count querier" for the link, then "group users …" for
		// each of its groups, as a number of the machine in hexadecimal.
		if len(f) > 2 && f[2] == ":" {
			current = f[1]
			return
		}
		if b, err := hex.DecodeString(f[0]); current == s.NIC.Name && err == nil && len(b) == 4 {
			s.addGroup(binary.NativeEndian.AppendUint32(nil, binary.BigEndian.Uint32(b)))
		}
	})
	return errors.Join(err, eachLine("igmp6", func(f []string) {
		// index name group users flags timer
		if len(f) > 2 && f[1] == s.NIC.Name {
			b, _ := hex.DecodeString(f[2])
			s.addGroup(b)
		}
	}))
}

// addGroup leaves out those that the kernel joins on its own: all hosts, all routers, all
// snoopers, and the solicited-node groups of its addresses.
func (s *Snapshot) addGroup(b []byte) {
	a, ok := netip.AddrFromSlice(b)
	switch a.String() {
	case "224.0.0.1", "224.0.0.106", "ff01::1", "ff02::1", "ff01::2", "ff02::2", "ff05::2", "ff02::6a":
		return
	}
	if ok && !netip.MustParsePrefix("ff02::1:ff00:0/104").Contains(a) {
		s.Groups = append(s.Groups, a)
	}
}

// eachLine gives the fields of each line of a file of /proc/net, in the namespace
// of the calling thread. A file that is not there, because the kernel has no such protocol,
// is empty.
func eachLine(name string, line func([]string)) error {
	f, err := os.Open("/proc/thread-self/net/" + name)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
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

// isWireless looks into sysfs, which shows the links of the namespace that it was mounted in.
func isWireless(link string) bool {
	_, err := os.Stat("/sys/class/net/" + link + "/phy80211")
	return err == nil
}

// lookFlows gives the sources of flows that are translated to addresses of the NIC: the
// kernel forgets a masqueraded one when its link loses the address.
func (c *Conn) lookFlows(ctx context.Context, s *Snapshot) error {
	var questions []conntrack.Question
	for _, a := range s.Addresses {
		ip := a.Prefix.Addr()
		if a.Link == s.NIC.Index && !ip.IsLinkLocalUnicast() {
			translated := func(f *conntrack.Flow) bool { return f.Reply.Dst.Addr() == ip && f.Orig.Src.Addr() != ip }
			questions = append(questions, conntrack.Question{Family: conntrack.FamilyOf(ip), Where: translated})
		}
	}
	conn, err := conntrack.Dial(c.ns)
	if errors.Is(err, unix.EPROTONOSUPPORT) {
		return nil
	}
	if err != nil {
		return err
	}
	defer conn.Close()
	flows, err := conn.List(ctx, questions...)
	if errors.Is(err, errors.ErrUnsupported) {
		return nil
	}
	for _, f := range flows {
		s.Masqueraded = append(s.Masqueraded, f.Orig.Src.Addr())
	}
	slices.SortFunc(s.Masqueraded, netip.Addr.Compare)
	return err
}
