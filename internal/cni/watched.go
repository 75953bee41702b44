package cni

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"time"

	"github.com/tombolo-cni/tombolo/internal/state"
	"github.com/tombolo-cni/tombolo/nft"
)

// LookAtFirewall says what of the firewall is not as the networks with pods need it, as far as
// an ADD would notice, and at which of the kernel's generations that was seen. If nothing is
// lacking, the next ADD need not look. It changes nothing.
func (p *Plugin) LookAtFirewall(ctx context.Context, stateDir string) (generation uint32, lacking []string, _ error) {
	h, records, err := p.openNetworks(ctx, stateDir)
	if err != nil || len(records) == 0 {
		return 0, nil, err
	}
	defer h.Close()
	for _, rec := range records {
		l, err := h.br.Link(ctx, rec.Bridge)
		if errors.Is(err, fs.ErrNotExist) {
			continue // that is no matter of the firewall
		}
		if err != nil {
			return 0, nil, err
		}
		ok, err := h.fw.Ready(ctx, rules(rec, l))
		if err != nil {
			return 0, nil, err
		}
		if !ok {
			diffs, err := h.fw.Check(ctx, rules(rec, l), nil)
			if err != nil {
				return 0, nil, err
			}
			lacking = append(lacking, summary("the rules of network "+rec.Name, diffs))
		}
	}
	ok, err := h.fw.Admitted(ctx)
	if err == nil && !ok {
		diffs, checkErr := h.fw.CheckAdmission(ctx)
		lacking, err = append(lacking, summary("the rule in FORWARD", diffs)), checkErr
	}
	return h.fw.Seal().Generation, lacking, err
}

// FirewallObstacles lists what stops pods and is out of reach, or left to its owner.
func (p *Plugin) FirewallObstacles(ctx context.Context, stateDir string) ([]string, error) {
	h, records, err := p.openNetworks(ctx, stateDir)
	if err != nil || len(records) == 0 {
		return nil, err
	}
	defer h.Close()
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
func (p *Plugin) openNetworks(ctx context.Context, stateDir string) (*host, []*state.Network, error) {
	h, err := p.openOperator("look", stateDir)
	if err != nil {
		return nil, nil, err
	}
	records, _, err := h.dir.ListNetworks()
	if err == nil && len(records) > 0 {
		err = h.enter(ctx)
	}
	var used []*state.Network
	for _, rec := range records {
		if err != nil || rec.Epoch != h.epoch.Token() {
			continue
		}
		var attachments []*state.Attachment
		if attachments, err = h.listed(rec.Name); len(attachments) > 0 {
			used = append(used, rec)
		}
	}
	if err != nil || len(used) == 0 {
		h.Close()
		return nil, nil, err
	}
	return h, used, nil
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
		return newError(codeNotAvailable, "%v", err)
	}
	if f == nil || time.Since(f.At) > contestedFor {
		return nil
	}
	by := "another program"
	if f.By != "" {
		by = fmt.Sprintf("another program (the last to change it: %q)", f.By)
	}
	return newError(codeNotAvailable, "%s undoes what pods need of the firewall: tombolod has put it back %d times, and does so once in a minute only; the last time it was: %.200q: have that program leave it alone",
		by, f.Times, f.What)
}
