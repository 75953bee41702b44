package nftnl

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo"
	"github.com/tombolo-cni/tombolo/internal/nl"
)

// tries bounds how often something is read, decided on and refused because the
// firewall had changed in between. Each refusal means that somebody else got on.
const tries = 200

// Retry calls try until it returns something else than a lost race.
func Retry(ctx context.Context, try func() error) error {
	var err error
	for i := range tries {
		if ctx.Err() != nil {
			return ctx.Err()
		}
		if err = try(); !IsOvertaken(err) {
			return err
		}
		if i >= 8 {
			// Out of step with other processes that try.
			time.Sleep(rand.N(time.Millisecond))
		}
	}
	return fmt.Errorf("gave up after %d tries, each overtaken by another change of the firewall: %w", tries, err)
}

// ErrOvertaken says that what was found is no longer there, or the reverse.
var ErrOvertaken = errors.New("overtaken by another change")

// IsOvertaken says that an error is that of a lost race.
func IsOvertaken(err error) bool {
	return errors.Is(err, ErrOvertaken) ||
		errors.Is(err, unix.ERESTART) || // a transaction with an old generation
		errors.Is(err, tombolo.ErrInterrupted)
}

// Look sends a batch of gets. What is not there is no error, nor what is the same.
func Look(c *nl.Conn, b *nl.Batch, same ...error) error {
	if err := c.Execute(b); err == nil {
		return nil
	}
	same = append(same, fs.ErrNotExist)
	for i := range b.Len() {
		err := b.Err(i)
		if err != nil && !slices.ContainsFunc(same, func(s error) bool { return errors.Is(err, s) }) {
			return err
		}
	}
	return nil
}

// IsMissing says that nfnetlink knows no nf_tables, and could not load it.
func IsMissing(err error) bool {
	return errors.Is(err, unix.EINVAL) || errors.Is(err, unix.EOPNOTSUPP)
}
