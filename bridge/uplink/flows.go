package uplink

import (
	"context"
	"errors"
	"sort"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/conntrack"
)

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
	sort.Slice(s.Masqueraded, func(i, j int) bool { return s.Masqueraded[i].Less(s.Masqueraded[j]) })
	return err
}
