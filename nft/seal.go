package nft

import (
	"context"
	"errors"
	"fmt"
	"hash/fnv"
	"math"
	"slices"
	"strconv"
	"strings"
	"sync"

	"golang.org/x/sys/unix"
)

// Seal says which networks were ready at a generation: a number that every change of a
// namespace's nf_tables counts up, whoever makes it. While it is the same, they still
// are, and one look at it does for all that Ready looks at otherwise. The zero Seal says
// nothing.
//
// A Conn hands it on to another (Conn.Seal, Conn.Trust): that of the next process,
// say, by a file. One that is old does no harm, and costs a longer look. It must not come
// from another namespace, whose generations have the same numbers.
type Seal struct {
	// Generation is that of the namespace (NFTA_GEN_ID).
	Generation uint32
	// Networks are sums of what each is made of: a Network that differs in anything, or
	// that another version made, is another one.
	Networks []uint64
}

// maxSealed bounds how many networks a Seal is for. Those that were looked at last
// are in it.
const maxSealed = 8

// String gives the Seal as ParseSeal reads it: at most 146 characters.
func (s Seal) String() string {
	b := strconv.AppendUint(nil, uint64(s.Generation), 10)
	for _, sum := range s.Networks {
		b = strconv.AppendUint(append(b, ' '), sum, 16)
	}
	return string(b)
}

// ParseSeal reads what String wrote. The error matches ErrInvalid.
func ParseSeal(text string) (Seal, error) {
	fields := strings.Split(text, " ")
	generation, err := strconv.ParseUint(fields[0], 10, 32)
	if err != nil || len(fields) > 1+maxSealed {
		return Seal{}, fmt.Errorf("%w: seal %.160q", ErrInvalid, text)
	}
	s := Seal{Generation: uint32(generation)}
	for _, field := range fields[1:] {
		sum, err := strconv.ParseUint(field, 16, 64)
		if err != nil {
			return Seal{}, fmt.Errorf("%w: seal %.160q", ErrInvalid, text)
		}
		s.Networks = append(s.Networks, sum)
	}
	return s, nil
}

// Trust has Ready go by a Seal, as far as it goes, and has the Conn keep one. From then
// on Ready takes longer where there is none that fits.
func (c *Conn) Trust(s Seal) {
	if c == nil {
		return
	}
	c.seal.trust(s)
}

// Seal gives what the Conn knows by now, if it was told to Trust: by what Ready saw, and
// what this Conn has done since.
func (c *Conn) Seal() Seal {
	if c == nil {
		return Seal{}
	}
	return c.seal.get()
}

// Untouched says whether nobody has changed nf_tables since this Conn's own last
// transaction, or since Ready looked, by one number. It is false where the Conn does not
// know.
func (c *Conn) Untouched(ctx context.Context) (bool, error) {
	if err := c.usable(ctx); err != nil {
		return false, err
	}

	generation := c.seal.generation()
	if generation == nil {
		return false, nil
	}
	if err := ctx.Err(); err != nil {
		return false, err
	}
	err := c.unchanged(*generation)
	if isOvertaken(err) {
		return false, nil
	}
	return err == nil, err
}

// sealKeeper has the Seal of a Conn.
type sealKeeper struct {
	mu   sync.Mutex
	on   bool
	seal Seal
}

func (k *sealKeeper) trust(s Seal) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.on, k.seal = true, Seal{s.Generation, slices.Clone(s.Networks)}
}

func (k *sealKeeper) get() Seal {
	k.mu.Lock()
	defer k.mu.Unlock()
	return Seal{k.seal.Generation, slices.Clone(k.seal.Networks)}
}

// covers says whether a network is known to be ready at a generation.
func (k *sealKeeper) covers(generation uint32, network uint64) bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.seal.Generation == generation && slices.Contains(k.seal.Networks, network)
}

// at says whether the Seal is for a generation: nothing has changed since it was looked at.
func (k *sealKeeper) at(generation uint32) bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.seal.Generation == generation && len(k.seal.Networks) > 0
}

func (k *sealKeeper) isOn() bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.on
}

// add notes that a network was seen to be ready at a generation.
func (k *sealKeeper) add(generation uint32, network uint64) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.seal.Generation != generation {
		k.seal = Seal{Generation: generation}
	}
	rest := slices.DeleteFunc(k.seal.Networks, func(n uint64) bool { return n == network })
	k.seal.Networks = append(rest[max(0, len(rest)+1-maxSealed):], network)
}

// generation is that of the Seal, nil if it says nothing.
func (k *sealKeeper) generation() *uint32 {
	k.mu.Lock()
	defer k.mu.Unlock()
	if len(k.seal.Networks) == 0 {
		return nil
	}
	generation := k.seal.Generation
	return &generation
}

// follow notes that a transaction of a generation was carried out that left all networks
// as they were, but for endpoints.
func (k *sealKeeper) follow(generation uint32) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.seal.Generation == generation && len(k.seal.Networks) > 0 {
		k.seal.Generation = next(generation)
	}
}

// drop forgets the Seal.
func (k *sealKeeper) drop() {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.seal = Seal{}
}

// next is the generation that a transaction makes: the kernel passes over 0.
func next(generation uint32) uint32 {
	if generation == math.MaxUint32 {
		return 1
	}
	return generation + 1
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
		c.seal.follow(*t.generation)
	case errors.Is(err, unix.ERESTART):
		c.seal.drop() // what it says is over
	}
	return err
}

// sum is what a Seal has of a network: of all that its ruleset is made from.
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
