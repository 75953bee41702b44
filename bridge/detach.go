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

// ErrForeign is the cause of an error of Detach or SetAlias about a link whose alias names another owner.
var ErrForeign = errors.New("the link belongs to another owner")

// Detach deletes a port and with it the pod's interface, addresses and routes. In the same moment it deletes other
// links that belong to the port, such as an ifb for bandwidth limits. A missing link is no error. A link with one of
// these names whose alias does not begin with owner belongs to another program: it stays, and the error matches
// ErrForeign. An empty owner matches any alias.
//
// The kernel needs some 12 to 36 ms, nearly all of it waiting. Several links at once take no longer than one.
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

// Shut sets a port down. The pod cannot set it up again, so nothing passes the port any more, and its guard can be
// deleted before the port. Deleting the port takes the kernel much longer. A missing port is no error. A link whose
// alias does not begin with owner belongs to another program: it stays unchanged, and the error matches ErrForeign.
// An empty owner matches any alias.
func (c *Conn) Shut(ctx context.Context, name, owner string) error {
	return c.change(ctx, "set link down", name, owner, func(_ *Link, r *link.Request) bool {
		r.Change = unix.IFF_UP
		return true
	})
}

// SetAlias changes the alias of a link whose alias begins with owner; see Port.Alias. A missing link is no error. A
// link of another owner stays unchanged, and the error matches ErrForeign. An empty owner matches any alias.
func (c *Conn) SetAlias(ctx context.Context, name, owner, alias string) error {
	return c.change(ctx, "set alias of link", name, owner, func(l *Link, r *link.Request) bool {
		r.Alias = &alias
		return l.Alias != alias
	})
}

// change sends the request that ask fills in for a link of an owner, if ask returns true. A missing link is no error.
func (c *Conn) change(ctx context.Context, op, name, owner string, ask func(*Link, *link.Request) bool) error {
	l, err := c.owned(ctx, name)
	if err == nil {
		err = l.ownedBy(op, owner)
	}

	if r := (link.Request{}); err == nil && ask(l, &r) {
		var b nl.Batch
		r.Index = l.Index
		r.Set(&b, op, name)
		err = c.nl.Do(ctx, &b)
	}

	return nl.PassAbsent(err)
}

// delLinks deletes our links. It is no error if one is gone by then.
func (c *Conn) delLinks(ctx context.Context, list []*Link) error {
	var b nl.Batch
	if len(list) == 1 {
		// The index identifies the link that was checked. Another link may have its name by now.
		link.Request{Index: list[0].Index}.Delete(&b, list[0].Name)
	} else {
		delTogether(&b, list)
	}

	err := c.nl.Do(ctx, &b)
	if !errors.Is(err, fs.ErrNotExist) {
		return err
	}

	var errs []error
	for i := range b.Len() {
		errs = append(errs, nl.PassAbsent(b.Err(i)))
	}

	return errors.Join(errs...)
}

// dyingGroup, combined with the index of a link, is a link group that no other link has: a group has 32 bits, and
// people choose small numbers.
const dyingGroup = 0x746f0000

// delTogether puts the links into one group and deletes that, since the kernel deletes the links of a group together
// and waits once.
func delTogether(b *nl.Batch, list []*Link) {
	group := uint32(dyingGroup) ^ uint32(list[0].Index)
	for _, l := range list {
		link.Request{Index: l.Index, Group: &group}.Set(b, "set group of link", l.Name)
	}
	link.Request{Group: &group}.Delete(b, list[0].Name)
}

// owned returns a link with the attributes that show its owner.
func (c *Conn) owned(ctx context.Context, name string) (*Link, error) {
	return c.link(ctx, name, 0, unix.IFLA_IFNAME, unix.IFLA_IFALIAS)
}

// ownedBy returns an ErrForeign unless the link's alias begins with owner.
func (l *Link) ownedBy(op, owner string) error {
	if strings.HasPrefix(l.Alias, owner) {
		return nil
	}
	return &tombolo.OpError{Op: op, Object: l.Name,
		Err: fmt.Errorf("%w: its alias is %q, where %q is expected", ErrForeign, l.Alias, owner)}
}
