package tc

import (
	"context"
	"errors"
	"fmt"
	"io/fs"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/nl"
)

// ErrNotSupported is the cause of an error about what the kernel lacks, and could not
// or would not load.
var ErrNotSupported = errors.New("the kernel lacks it")

// Unsupported says of a refused creation that the kernel lacks a module, which by
// itself it says with an errno that has other meanings too.
func Unsupported(err error, modules string) error {
	if !errors.Is(err, unix.ENOENT) && !errors.Is(err, unix.EOPNOTSUPP) {
		return err
	}
	return fmt.Errorf("%w: %w: load %s (modprobe, or modules-load.d for good)", ErrNotSupported, err, modules)
}

// PassAbsent makes success of an error about what is not there.
func PassAbsent(err error) error {
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return err
}

// Execute sends a batch unless ctx is done: the kernel's work on it cannot be
// interrupted.
func Execute(ctx context.Context, c *nl.Conn, b *nl.Batch) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	return c.Execute(b)
}

// Look executes a batch of gets, of what need not be there. The errors of each are in the
// batch.
func Look(ctx context.Context, c *nl.Conn, b *nl.Batch) error {
	if err := Execute(ctx, c, b); err == nil || ctx.Err() != nil {
		return err
	}
	var errs []error
	for i := range b.Len() {
		// Of a link that was never up, whose qdisc is but a stand-in, the kernel says
		// nothing, or EINVAL.
		if err := b.Err(i); !errors.Is(err, fs.ErrNotExist) && !errors.Is(err, nl.ErrNoAnswer) && !errors.Is(err, unix.EINVAL) {
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}

// Filters lists the filters of the link in some places, which are Ingress and Egress: those
// of our priority at the ingress, with what their classifiers list beside them, and how many
// others there are. The kernel lists those of one place at a time, so that this does not grow
// with the node.
func (l Link) Filters(ctx context.Context, c *nl.Conn, places ...uint32) (own []Filter, others int, _ error) {
	for _, place := range places {
		if err := ctx.Err(); err != nil {
			return nil, 0, err
		}
		m, err := nl.Encode(unix.RTM_GETTFILTER, 0, l.header(0, place, 0), nil)
		err = c.List("list filters", m, err, func(m netlink.Message) error {
			var f Filter
			if err := f.Decode(m.Data); err != nil {
				return err
			}
			if place == Ingress && f.Priority == Priority {
				own = append(own, f)
			} else {
				others++
			}
			return nil
		})
		if err != nil {
			return nil, 0, err
		}
	}
	return own, others, nil
}
