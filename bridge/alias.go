package bridge

import (
	"context"
	"errors"
	"io/fs"

	"github.com/tombolo-cni/tombolo/internal/link"
	"github.com/tombolo-cni/tombolo/internal/nl"
)

// SetAlias changes the alias of a link whose alias begins with owner, and nothing else
// of it; see Port.Alias. A link that is gone is success. One of another owner's stays
// as it is, and is an ErrForeign; owner "" takes any.
func (c *Conn) SetAlias(ctx context.Context, name, owner, alias string) error {
	if err := c.usable(ctx); err != nil {
		return err
	}

	l, err := c.owned(ctx, name)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err == nil {
		err = l.ownedBy("set alias of link", owner)
	}
	if err != nil || l.Alias == alias {
		return err
	}
	var b nl.Batch
	link.Request{Index: l.Index, Alias: &alias}.Set(&b, "set alias of link", name)
	if err := c.execute(ctx, &b); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}
