package nft

import (
	"context"
	"errors"
	"fmt"
	"hash/fnv"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/nftnl"
)

// Cache says which networks were ready at a generation: a number that every change of a
// namespace's nf_tables counts up, whoever makes it. While it is the same, they still
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
	err := c.unchanged(*generation)
	if nftnl.IsOvertaken(err) {
		return false, nil
	}
	return err == nil, err
}

// commitEndpoints is commit for what changes nothing but elements of endpoints.
func (c *Conn) commitEndpoints(t *transaction) error {
	if t.Empty() {
		return nil
	}
	err := t.Commit(c.nl)
	switch {
	case t.generation == nil:
	case err == nil:
		c.cache.Follow(*t.generation)
	case errors.Is(err, unix.ERESTART):
		c.cache.Drop() // what it says is over
	}
	return err
}

// sum is what a Cache has of a network: of all that its ruleset is made from.
func (rs *ruleset) sum() uint64 {
	sum := fnv.New64a()
	write := func(at place, text string) {
		sum.Write([]byte{at.family})
		sum.Write([]byte(at.name))
		sum.Write([]byte{0})
		sum.Write([]byte(text))
		sum.Write([]byte{0})
	}
	write(place{rulesVersion, rs.network}, rs.bridgeComment)
	if rs.table != nftnl.DefaultTable {
		write(place{name: string(rs.table)}, "table")
	}
	for i := range rs.chains {
		write(rs.chains[i].place, rs.chains[i].settings)
	}
	for _, at := range rs.gone {
		write(at, "gone")
	}
	for i := range rs.bridge {
		write(rs.bridge[i].set, string(rs.bridge[i].key))
	}
	return sum.Sum64()
}
