package bandwidth

import (
	"context"
	"errors"
	"io/fs"

	"github.com/tombolo-cni/tombolo/internal/link"
	"github.com/tombolo-cni/tombolo/internal/nl"
	"github.com/tombolo-cni/tombolo/internal/tc"
)

// Remove takes a target's shapers away: after it no qdisc, no filter and no ifb of ours is left. It is no error if
// they are gone already. It goes on past errors, and joins them. An ifb that is not Target.Owner's stays, and is an
// ErrForeign.
//
// A caller that deletes the port too waits less if both go together (bridge.Conn.Detach).
func (c *Conn) Remove(ctx context.Context, t Target) error {
	if err := ctx.Err(); err != nil {
		return err
	}

	var errs []error
	if t.Port != "" {
		errs = append(errs, c.removeFromPort(ctx, t))
	}
	if t.IFB == "" {
		return errors.Join(errs...)
	}
	l, err := link.Find(c.nl, t.IFB)
	switch {
	case errors.Is(err, fs.ErrNotExist):
	case err != nil:
		errs = append(errs, err)
	default:
		errs = append(errs, c.removeIFB(ctx, &t, l))
	}
	return errors.Join(errs...)
}

func (c *Conn) removeIFB(ctx context.Context, t *Target, l *link.Link) error {
	if l == nil {
		return nil
	}
	if err := t.checkOwner(l); err != nil {
		return err
	}
	var b nl.Batch
	link.Request{Index: l.Index}.Delete(&b, t.IFB)
	return tc.PassAbsent(tc.Execute(ctx, c.nl, &b))
}

func (c *Conn) removeFromPort(ctx context.Context, t Target) error {
	t.MTU = max(t.MTU, 1) // of no use here
	if err := c.findPort(&t); err != nil {
		return tc.PassAbsent(err)
	}
	have, err := c.look(ctx, &t)
	if err != nil {
		return tc.PassAbsent(err)
	}
	var errs []error
	if have.ingress.Ours() {
		var b nl.Batch
		t.port().DelQdisc(&b, tc.Root)
		errs = append(errs, tc.PassAbsent(tc.Execute(ctx, c.nl, &b)))
	}
	return errors.Join(append(errs, c.removeRedirect(ctx, &t, have))...)
}

// removeRedirect deletes our filter, and the qdisc that it is in if that has no filters of
// other programs.
func (c *Conn) removeRedirect(ctx context.Context, t *Target, have *installed) error {
	var b nl.Batch
	switch {
	case have.place.Kind == "clsact" && have.others == 0:
		t.port().DelQdisc(&b, tc.Clsact)
	case len(have.own) > 0:
		t.port().DelFilters(&b, have.own[0].Protocol)
	default:
		return nil
	}
	return tc.PassAbsent(tc.Execute(ctx, c.nl, &b))
}

// IFBs gives the aliases, which name owners, of the links of that kind in the ports' namespace, by
// name, also those of others. It finds those that were left behind, by a dump: keep it
// off a path that has to be fast.
func (c *Conn) IFBs(ctx context.Context) (map[string]string, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}

	list := map[string]string{}
	err := link.List(c.nl, "list ifb links", "ifb", 0, func(l *link.Link) {
		if l.Kind == "ifb" { // a kernel without that kind lists all
			list[l.Name] = l.Alias
		}
	})
	return list, err
}
