package demo

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/tombolo-cni/tombolo/internal/icmp"
)

// pingAll has every pod ping the next one, its gateways, and the host outside.
func (s *show) pingAll(ctx context.Context, box *sandbox) error {
	w := s.table()
	defer w.Flush()
	fmt.Fprintln(w, "\nPING ("+strings.Join([]string{"IPv4", "IPv6"}[:box.families], ", ")+")\tNEXT POD\tGATEWAY\tOUTSIDE\tWHICH SEES IT AS")
	for i, p := range box.pods {
		next := "-"
		if s.pods > 1 {
			other := box.pods[(i+1)%s.pods]
			times, err := s.ping(ctx, p, other.name, other.addresses)
			if err != nil {
				return err
			}
			next = times
		}
		gateway, err := s.ping(ctx, p, "its gateway", p.gateways)
		if err != nil {
			return err
		}
		outside, seen, err := s.pingOutside(ctx, box, p)
		if err != nil {
			return err
		}
		fmt.Fprintf(w, "%s\t%s\t%s\t%s\t%s\n", p.name, next, gateway, outside, seen)
	}
	return nil
}

// ping pings an address of each family, and gives the round trips as a cell of the
// table.
func (s *show) ping(ctx context.Context, from *pod, who string, to []netip.Addr) (string, error) {
	var cell []string
	for _, address := range to {
		rtt, err := icmp.Ping(ctx, from.ns, address, icmp.Echo{Wait: s.patience})
		if err != nil {
			return "", fmt.Errorf("%s to %s: %w", from.name, who, err)
		}
		cell = append(cell, roundTrip(rtt))
	}
	return strings.Join(cell, ", ") + " ms", nil
}

func roundTrip(rtt time.Duration) string { return milliseconds(rtt, 2) }

// pingOutside pings the host outside, which must see the node's addresses: it has
// no route to any other, so that only masquerade brings the answers home.
func (s *show) pingOutside(ctx context.Context, box *sandbox, from *pod) (times, seen string, _ error) {
	var rtts, sources []string
	for i, to := range outsideAddresses()[:box.families] {
		rtt, source, err := s.pingHeard(ctx, box, from, i, to.Addr())
		if source == from.addresses[i] {
			err = errors.Join(fmt.Errorf("not masqueraded: the host outside sees the pod's own address %s", source), err)
		} else if want := nodeAddresses()[i].Addr(); err == nil && source != want {
			err = fmt.Errorf("the host outside sees it as %s, and not as the node's %s", source, want)
		}
		if err != nil {
			return "", "", fmt.Errorf("%s to the outside: %w", from.name, err)
		}
		rtts, sources = append(rtts, roundTrip(rtt)), append(sources, source.String())
	}
	return strings.Join(rtts, ", ") + " ms", strings.Join(sources, ", "), nil
}

// pingHeard also gives the source address by which the request reached the host
// outside; it is invalid if none did. If that is the pod's own, of this family, nobody
// waits for an answer any longer.
func (s *show) pingHeard(ctx context.Context, box *sandbox, from *pod, family int, to netip.Addr) (time.Duration, netip.Addr, error) {
	if _, err := box.heard.Sources(); err != nil {
		return 0, netip.Addr{}, err
	}
	var heard []netip.Addr
	for deadline := time.Now().Add(s.patience); ; {
		rtt, pingErr := icmp.Ping(ctx, from.ns, to, icmp.Echo{Wait: min(s.patience, time.Second)})
		more, err := box.heard.Sources()
		heard = slices.Compact(append(heard, more...)) // a request may have been sent again
		own := slices.Contains(heard, from.addresses[family])
		if err == nil && errors.Is(pingErr, icmp.ErrNoReply) && !own && time.Now().Before(deadline) {
			continue
		}
		if len(heard) > 1 {
			err = errors.Join(err, fmt.Errorf("the host outside sees it as each of %v", heard))
		}
		source := netip.Addr{}
		if len(heard) > 0 {
			source = heard[0]
		}
		return rtt, source, errors.Join(pingErr, err)
	}
}
