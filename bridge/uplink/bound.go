package uplink

import (
	"context"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"net/netip"
	"os"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/conntrack"
	"github.com/tombolo-cni/tombolo/internal/nl"
)

// lookGroups reads the groups that were joined on the NIC, in the namespace of the calling
// thread, without those that the kernel joins by itself.
func (s *snapshot) lookGroups() {
	current := ""
	for _, f := range fieldsOf("igmp") {
		// A line "index name : count querier" for the link, then "group users …" for
		// each of its groups, as a number of the machine in hexadecimal.
		if len(f) > 2 && f[2] == ":" {
			current = f[1]
		} else if b, err := hex.DecodeString(f[0]); current == s.NIC.Name && err == nil && len(b) == 4 {
			s.addGroup(binary.NativeEndian.AppendUint32(nil, binary.BigEndian.Uint32(b)))
		}
	}
	for _, f := range fieldsOf("igmp6") { // index name group users flags timer
		if len(f) > 2 && f[1] == s.NIC.Name {
			b, _ := hex.DecodeString(f[2])
			s.addGroup(b)
		}
	}
}

// addGroup leaves out those that the kernel joins on its own: all hosts, all routers, all
// snoopers, and the solicited-node groups of its addresses.
func (s *snapshot) addGroup(b []byte) {
	a, ok := netip.AddrFromSlice(b)
	switch a.String() {
	case "224.0.0.1", "224.0.0.106", "ff01::1", "ff02::1", "ff01::2", "ff02::2", "ff05::2", "ff02::6a":
		return
	}
	if ok && !netip.MustParsePrefix("ff02::1:ff00:0/104").Contains(a) {
		s.Groups = append(s.Groups, a)
	}
}

// fieldsOf gives the fields of each line of a file of /proc/net, in the namespace of the calling
// thread. A kernel without the protocol has no such file.
func fieldsOf(name string) [][]string {
	b, _ := os.ReadFile("/proc/thread-self/net/" + name)
	var list [][]string
	for line := range strings.Lines(string(b)) {
		if f := strings.Fields(line); len(f) > 0 {
			list = append(list, f)
		}
	}
	return list
}

// isWireless looks into sysfs, which shows the links of the namespace that it was mounted in.
func isWireless(link string) bool {
	_, err := os.Stat("/sys/class/net/" + link + "/phy80211")
	return err == nil
}

// lookFlows gives the sources of flows that are translated to addresses of the NIC: the
// kernel forgets a masqueraded one when its link loses the address.
func (c *Conn) lookFlows(ctx context.Context, s *snapshot) error {
	var questions []conntrack.Question
	for _, a := range s.Addresses {
		ip := a.Prefix.Addr()
		if a.Link == s.NIC.Index && !ip.IsLinkLocalUnicast() {
			translated := func(f *conntrack.Flow) bool { return f.Reply.Dst.Addr() == ip && f.Orig.Src.Addr() != ip }
			questions = append(questions, conntrack.Question{Family: nl.FamilyOf(ip), Where: translated})
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
