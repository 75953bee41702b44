package bandwidth

import (
	"context"
	"errors"
	"io/fs"

	"github.com/tombolo-cni/tombolo/internal/link"
	"github.com/tombolo-cni/tombolo/internal/nl"
	"github.com/tombolo-cni/tombolo/internal/tc"
)

// Remove deletes the limits of a target: the ifb, and all qdiscs and filters that are ours. It is no error if they do
// not exist. Remove continues after errors and joins them. If the ifb does not belong to Target.Owner, Remove keeps
// the ifb, and the error matches ErrForeign.
//
// To delete the port as well, it is faster to delete the port and the ifb together with bridge.Conn.Detach.
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

// removeIFB deletes the ifb l, unless l is nil. It returns an error if the ifb belongs to another owner.
func (c *Conn) removeIFB(ctx context.Context, t *Target, l *link.Info) error {
	if l == nil {
		return nil
	}
	if err := t.checkOwner(l); err != nil {
		return err
	}
	var b nl.Batch
	link.Request{Index: l.Index}.Delete(&b, t.IFB)
	return nl.PassAbsent(c.nl.Do(ctx, &b))
}

// removeFromPort deletes our qdiscs and filters at the port.
func (c *Conn) removeFromPort(ctx context.Context, t Target) error {
	t.MTU = max(t.MTU, 1) // the MTU is not used here
	if err := c.findPort(&t); err != nil {
		return nl.PassAbsent(err)
	}

	have, err := c.look(ctx, &t)
	if err != nil {
		return nl.PassAbsent(err)
	}

	var errs []error
	if have.ingress.Ours() {
		var b nl.Batch
		t.port().DelQdisc(&b, tc.Root)
		errs = append(errs, nl.PassAbsent(c.nl.Do(ctx, &b)))
	}

	return errors.Join(append(errs, c.removeRedirect(ctx, &t, have))...)
}

// removeRedirect deletes our filters at the port. It deletes clsact too if no filters of other programs are left.
func (c *Conn) removeRedirect(ctx context.Context, t *Target, have *installation) error {
	var b nl.Batch
	switch {
	case have.place.Kind == "clsact" && have.others == 0:
		t.port().DelQdisc(&b, tc.Clsact)
	case len(have.own) > 0:
		t.port().DelFilters(&b, have.own[0].Protocol)
	default:
		return nil
	}

	return nl.PassAbsent(c.nl.Do(ctx, &b))
}

// IFBs returns the names of all ifb links in the ports' network namespace with their aliases, which name the owners.
// It includes links of other programs. Use it to find ifbs that were left behind. It lists all ifbs, so it takes
// longer with more pods.
func (c *Conn) IFBs(ctx context.Context) (map[string]string, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}

	list := map[string]string{}
	err := link.List(c.nl, "list ifb links", "ifb", 0, func(l *link.Info) {
		if l.Kind == "ifb" { // a kernel without this kind lists all links
			list[l.Name] = l.Alias
		}
	})
	return list, err
}
