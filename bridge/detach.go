package bridge

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo"
	"github.com/tombolo-cni/tombolo/internal/link"
	"github.com/tombolo-cni/tombolo/internal/nl"
)

// ErrForeign is the cause of a Detach or SetAlias of a link whose alias names another
// owner.
var ErrForeign = errors.New("the link belongs to another owner")

// Detach deletes a port and with it the pod's interface, its addresses and its routes; and, in the same moment,
// other links that were made for the port, such as an ifb that shapes what comes from it. One that is gone already
// is success. A link of these names whose alias does not begin with owner belongs to another: it stays, and is an
// ErrForeign; owner "" takes any.
//
// It takes the kernel some 12 to 36 ms, nearly all of them waiting: no more for several
// links than for one, where one Detach after the other would wait for each.
func (c *Conn) Detach(ctx context.Context, name, owner string, also ...string) error {
	c.forget(name)
	var errs []error
	var ours []*Link
	for _, name := range append([]string{name}, also...) {
		l, err := c.owned(ctx, name)
		if err == nil {
			err = l.ownedBy("delete link", owner)
		}
		switch {
		case err == nil:
			ours = append(ours, l)
		case !errors.Is(err, fs.ErrNotExist):
			errs = append(errs, err)
		}
	}
	if len(ours) > 0 {
		errs = append(errs, c.delLinks(ctx, ours))
	}
	return errors.Join(errs...)
}

// Shut sets a port down, and the pod cannot set it up again: nothing passes it any more, so that its guard can be
// deleted before the port, for which the kernel takes much longer. One that is gone already is success. A link
// whose alias does not begin with owner belongs to another: it stays as it is, and is an ErrForeign; owner "" takes
// any.
func (c *Conn) Shut(ctx context.Context, name, owner string) error {
	return c.change(ctx, "set link down", name, owner, func(_ *Link, r *link.Request) bool {
		r.Change = unix.IFF_UP
		return true
	})
}

// SetAlias changes the alias of a link whose alias begins with owner, and nothing else
// of it; see Port.Alias. A link that is gone is success. One of another owner's stays
// as it is, and is an ErrForeign; owner "" takes any.
func (c *Conn) SetAlias(ctx context.Context, name, owner, alias string) error {
	return c.change(ctx, "set alias of link", name, owner, func(l *Link, r *link.Request) bool {
		r.Alias = &alias
		return l.Alias != alias
	})
}

// change sets what is asked for of an owner's link, if anything is. A link that is gone is success.
func (c *Conn) change(ctx context.Context, op, name, owner string, ask func(*Link, *link.Request) bool) error {
	l, err := c.owned(ctx, name)
	if err == nil {
		err = l.ownedBy(op, owner)
	}
	if r := (link.Request{}); err == nil && ask(l, &r) {
		var b nl.Batch
		r.Index = l.Index
		r.Set(&b, op, name)
		err = c.execute(ctx, &b)
	}
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ENODEV) {
		return nil
	}
	return err
}

// delLinks deletes links of ours. It is no error if one goes meanwhile.
func (c *Conn) delLinks(ctx context.Context, list []*Link) error {
	var b nl.Batch
	if len(list) == 1 {
		// The index names the link that was looked at; another may have its name by now.
		link.Request{Index: list[0].Index}.Delete(&b, list[0].Name)
	} else {
		delTogether(&b, list)
	}
	err := c.execute(ctx, &b)
	if !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	var errs []error
	for i := range b.Len() {
		if err := b.Err(i); !errors.Is(err, fs.ErrNotExist) {
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}

// dyingGroup and the index of a link give a group that no other link is in: a group is a number of 32 bits, and
// those that people choose are small.
const dyingGroup = 0x746f0000

// delTogether makes a group of links, since the kernel deletes those of one together,
// and waits once.
func delTogether(b *nl.Batch, list []*Link) {
	group := uint32(dyingGroup) ^ uint32(list[0].Index)
	for _, l := range list {
		link.Request{Index: l.Index, Group: &group}.Set(b, "set group of link", l.Name)
	}
	link.Request{Group: &group}.Delete(b, list[0].Name)
}

// owned looks a link up for what tells whose it is.
func (c *Conn) owned(ctx context.Context, name string) (*Link, error) {
	return c.link(ctx, name, 0, unix.IFLA_IFNAME, unix.IFLA_IFALIAS)
}

func (l *Link) ownedBy(op, owner string) error {
	if strings.HasPrefix(l.Alias, owner) {
		return nil
	}
	return &tombolo.OpError{Op: op, Object: l.Name, Err: fmt.Errorf("%w: its alias is %q, where %q is expected", ErrForeign, l.Alias, owner)}
}
