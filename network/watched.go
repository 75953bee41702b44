package network

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"time"

	"github.com/tombolo-cni/tombolo/internal/state"
	"github.com/tombolo-cni/tombolo/network/internal/fail"
	"github.com/tombolo-cni/tombolo/nft"
)

// LookAtFirewall says what of the firewall is not as the networks with pods need it, as far as
// an ADD would notice, and at which of the kernel's generations that was seen. If nothing is
// lacking, the next ADD need not look. It changes nothing.
func (n *Node) LookAtFirewall(ctx context.Context) (generation uint32, lacking []string, _ error) {
	s, records, err := n.openNetworks(ctx)
	if err != nil || len(records) == 0 {
		return 0, nil, err
	}
	defer s.Close()
	for _, rec := range records {
		l, err := s.br.Link(ctx, rec.Bridge)
		if errors.Is(err, fs.ErrNotExist) {
			continue // that is no matter of the firewall
		}
		if err != nil {
			return 0, nil, err
		}
		ok, err := s.fw.Ready(ctx, rules(rec, l))
		if err != nil {
			return 0, nil, err
		}
		if !ok {
			diffs, err := s.fw.Check(ctx, rules(rec, l), nil)
			if err != nil {
				return 0, nil, err
			}
			lacking = append(lacking, summary("the rules of network "+rec.Name, diffs))
		}
	}
	ok, err := s.fw.Admitted(ctx)
	if err == nil && !ok {
		diffs, checkErr := s.fw.CheckAdmission(ctx)
		lacking, err = append(lacking, summary("the rule in FORWARD", diffs)), checkErr
	}
	return s.fw.Seal().Generation, lacking, err
}

// FirewallObstacles lists what stops pods and is out of reach, or left to its owner.
func (n *Node) FirewallObstacles(ctx context.Context) ([]string, error) {
	s, records, err := n.openNetworks(ctx)
	if err != nil || len(records) == 0 {
		return nil, err
	}
	defer s.Close()
	var list []string
	for _, rec := range records {
		obstacles, err := nft.Obstacles(ctx, &nft.Config{Mark: uint32(rec.Mark)}, nft.Path{Bridge: rec.Bridge, Prefixes: rec.Subnets})
		if err != nil {
			return nil, err
		}
		for _, o := range obstacles {
			list = append(list, fmt.Sprintf("network %s: %s", rec.Name, o))
		}
	}
	return list, nil
}

// openNetworks opens the host, under the shared lock, if any network of this life of the
// node has attachments, and gives those networks.
func (n *Node) openNetworks(ctx context.Context) (*session, []*state.Network, error) {
	if err := n.usable(ctx); err != nil {
		return nil, nil, err
	}
	s, err := n.openKnown()
	if err != nil {
		return nil, nil, err
	}
	records, _, err := s.dir.ListNetworks()
	if err == nil && len(records) > 0 {
		err = s.enter(ctx)
	}
	var used []*state.Network
	for _, rec := range records {
		if err != nil || rec.Epoch != s.epoch.Token() {
			continue
		}
		var attachments []*state.Attachment
		if attachments, err = s.listed(rec.Name); len(attachments) > 0 {
			used = append(used, rec)
		}
	}
	if err != nil || len(used) == 0 {
		s.Close()
		return nil, nil, err
	}
	return s, used, nil
}

// summary says in a line what differs.
func summary[T fmt.Stringer](what string, diffs []T) string {
	switch len(diffs) {
	case 0:
		return what + " was touched"
	case 1:
		return diffs[0].String()
	}
	return fmt.Sprintf("%s, and %d more", diffs[0], len(diffs)-1)
}

// contestedFor is how long what tombolod wrote down holds: it looks once in a minute.
const contestedFor = 3 * time.Minute

// refuseContested says who undoes what tombolod puts right of the firewall.
func refuseContested(dir *state.Dir) error {
	f, err := dir.Contested()
	if err != nil {
		return fail.State(err)
	}
	if f == nil || time.Since(f.At) > contestedFor {
		return nil
	}
	by := "another program"
	if f.By != "" {
		by = fmt.Sprintf("another program (the last to change it: %q)", f.By)
	}
	return fail.Errorf(ErrObstructed, "%s undoes what pods need of the firewall: tombolod has put it back %d times, and does so once in a minute only; the last time it was: %.200q: have that program leave it alone",
		by, f.Times, f.What)
}
