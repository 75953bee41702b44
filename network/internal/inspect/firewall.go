package inspect

import (
	"context"
	"errors"
	"fmt"
	"io/fs"

	"slices"

	"github.com/tombolo-cni/tombolo"
	"github.com/tombolo-cni/tombolo/internal/state"
	"github.com/tombolo-cni/tombolo/network/internal/recorded"
	"github.com/tombolo-cni/tombolo/network/internal/session"
)

// Firewall says what of the firewall is not as networks need it, as far as an ADD would notice,
// and at which of the kernel's generations that was seen.
func Firewall(ctx context.Context, s *session.Session, records []*state.Network) (generation uint32, lacking []string, _ error) {
	for _, rec := range records {
		l, err := s.Links.Link(ctx, rec.Bridge)
		if errors.Is(err, fs.ErrNotExist) {
			continue // that is no matter of the firewall
		}
		if err != nil {
			return 0, nil, err
		}
		ok, err := s.Firewall.Ready(ctx, recorded.Rules(rec, l))
		if err != nil {
			return 0, nil, err
		}
		if !ok {
			diffs, err := s.Firewall.Check(ctx, recorded.Rules(rec, l), nil)
			if err != nil {
				return 0, nil, err
			}
			lacking = append(lacking, summary("the rules of network "+rec.Name, diffs))
		}
	}
	admins := []string{""}
	for _, rec := range records {
		admins = append(admins, rec.AdminChain)
	}
	slices.Sort(admins)
	for _, admin := range slices.Compact(admins) {
		ok, err := s.Foreign(admin).Ready(ctx)
		if err == nil && !ok {
			var diffs []tombolo.Difference
			diffs, err = s.Foreign(admin).Check(ctx)
			lacking = append(lacking, summary("the rule in FORWARD", diffs))
		}
		if err != nil {
			return 0, nil, err
		}
	}
	return s.Firewall.Cache().Generation, lacking, nil
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
