// Package flows has the kernel forget flows to host ports that lead where they no longer should.
package flows

import (
	"context"
	"net/netip"
	"slices"

	"github.com/tombolo-cni/tombolo/bridge"
	"github.com/tombolo-cni/tombolo/internal/conntrack"
	"github.com/tombolo-cni/tombolo/internal/state"
	"github.com/tombolo-cni/tombolo/route"
	"golang.org/x/sys/unix"
)

// FirstOf is the first address of a family, to which host ports
// lead; the zero address if there is none.
func FirstOf(addresses []state.Address, is4 bool) netip.Addr {
	i := slices.IndexFunc(addresses, func(a state.Address) bool { return a.Prefix.Addr().Is4() == is4 })
	if i < 0 {
		return netip.Addr{}
	}
	return addresses[i].Prefix.Addr()
}

// publications are an attachment's UDP ports, of each family. A client that keeps
// on sending keeps its flow alive for ever, to wherever the port led before; TCP has
// an end.
func publications(rec *state.Attachment) []conntrack.Publication {
	var list []conntrack.Publication
	for _, p := range rec.Published {
		if p.Protocol != "udp" {
			continue
		}
		for _, is4 := range []bool{true, false} {
			pod := FirstOf(rec.Addresses, is4)
			if !pod.IsValid() || p.HostIP.IsValid() && p.HostIP.Is4() != is4 {
				continue
			}
			list = append(list, conntrack.Publication{
				Proto: unix.IPPROTO_UDP,
				Host:  netip.AddrPortFrom(p.HostIP, uint16(p.HostPort)),
				Pod:   netip.AddrPortFrom(pod, uint16(p.PodPort)),
			})
		}
	}
	return list
}

// FlushStale has the kernel forget the flows to a new pod's ports that lead
// elsewhere: to the host, or to a pod that was there before.
func FlushStale(ctx context.Context, links *bridge.Conn, rec *state.Attachment) error {
	local := func(a netip.Addr) bool {
		r, err := links.Routes().Get(a)
		return err == nil && r.Type == route.Local
	}
	return flushFlows(ctx, rec, func(p conntrack.Publication) conntrack.Filter { return p.Stale(local) })()
}

// FlushOwn has it forget those that lead to a pod which is going. The kernel
// goes through all of its table for that, some 10 ms, and so does it when it deletes
// the link: they are done side by side.
func FlushOwn(ctx context.Context, rec *state.Attachment) <-chan error {
	if rec == nil || len(publications(rec)) == 0 {
		return nothingToDo()
	}
	return inBackground(flushFlows(ctx, rec, conntrack.Publication.Flows))
}

// flushFlows opens the kernel, which belongs to the caller's thread, and gives what
// is to be done, which any can do.
func flushFlows(ctx context.Context, rec *state.Attachment, which func(conntrack.Publication) conntrack.Filter) func() error {
	var filters []conntrack.Filter
	for _, p := range publications(rec) {
		filters = append(filters, which(p))
	}
	if len(filters) == 0 {
		return func() error { return nil }
	}
	conn, err := conntrack.Dial(nil)
	return func() error {
		if err != nil {
			return err
		}
		defer conn.Close()
		_, err := conn.Flush(ctx, filters...)
		return err
	}
}

// inBackground does a step beside others: the kernel mostly waits in it.
func inBackground(step func() error) <-chan error {
	done := make(chan error, 1)
	go func() { done <- step() }()
	return done
}

func nothingToDo() <-chan error {
	done := make(chan error, 1)
	done <- nil
	return done
}
