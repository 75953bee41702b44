package nft

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/nftnl"
	"github.com/tombolo-cni/tombolo/nft/internal/ruleset"
)

// Cache says which networks were ready at a generation: a number that every change of a
// namespace's nf_tables counts up, by whatever program. While it is the same, they still
// are, and one look at it does for all that Ready looks at otherwise. The zero Cache says
// nothing.
//
// A Conn hands it on to another (Conn.Cache, Conn.UseCache): that of the next process,
// say, by a file. One that is old does no harm, and costs a longer look. It must not come
// from another namespace, whose generations have the same numbers.
type Cache struct {
	// Generation is that of the namespace (NFTA_GEN_ID).
	Generation uint32
	// Networks are sums of what each is made of: a Network that differs in anything, or
	// that another version made, is another one.
	Networks []uint64
}

// String gives the Cache as ParseCache reads it: at most 146 characters.
func (s Cache) String() string {
	b := strconv.AppendUint(nil, uint64(s.Generation), 10)
	for _, sum := range s.Networks {
		b = strconv.AppendUint(append(b, ' '), sum, 16)
	}
	return string(b)
}

// ParseCache reads what String wrote. The error matches ErrInvalid.
func ParseCache(text string) (Cache, error) {
	fields := strings.Split(text, " ")
	generation, err := strconv.ParseUint(fields[0], 10, 32)
	if err != nil || len(fields) > 1+nftnl.MaxSeen {
		return Cache{}, fmt.Errorf("%w: cache %.160q", ErrInvalid, text)
	}
	s := Cache{Generation: uint32(generation)}
	for _, field := range fields[1:] {
		sum, err := strconv.ParseUint(field, 16, 64)
		if err != nil {
			return Cache{}, fmt.Errorf("%w: cache %.160q", ErrInvalid, text)
		}
		s.Networks = append(s.Networks, sum)
	}
	return s, nil
}

// Trust has Ready go by a Cache, as far as it goes, and has the Conn keep one. From then
// on Ready takes longer where there is none that fits.
func (c *Conn) UseCache(s Cache) {
	if c == nil {
		return
	}
	c.cache.Use(s.Generation, s.Networks)
}

// Cache gives what the Conn knows by now, if it was told to Trust: by what Ready saw, and
// what this Conn has done since.
func (c *Conn) Cache() Cache {
	if c == nil {
		return Cache{}
	}
	generation, sums := c.cache.All()
	return Cache{generation, sums}
}

// Unchanged says whether nobody has changed nf_tables since this Conn's own last
// transaction, or since Ready looked, by one number. It is false where the Conn does not
// know.
func (c *Conn) Unchanged(ctx context.Context) (bool, error) {
	if err := c.usable(ctx); err != nil {
		return false, err
	}

	generation := c.cache.Generation()
	if generation == nil {
		return false, nil
	}
	if err := ctx.Err(); err != nil {
		return false, err
	}
	err := nftnl.Unchanged(c.tables.Conn, *generation)
	if nftnl.IsOvertaken(err) {
		return false, nil
	}
	return err == nil, err
}

// commitEndpoints is commit for what changes nothing but elements of endpoints.
func (c *Conn) commitEndpoints(t *ruleset.Transaction) error {
	if t.Empty() {
		return nil
	}
	err := t.Commit(c.tables.Conn)
	switch {
	case t.Generation == nil:
	case err == nil:
		c.cache.Follow(*t.Generation)
	case errors.Is(err, unix.ERESTART):
		c.cache.Drop() // what it says is over
	}
	return err
}
