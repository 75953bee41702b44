package nftnl

import (
	"cmp"
	"slices"
	"strconv"
	"strings"
	"sync"

	"github.com/tombolo-cni/tombolo"
	"github.com/tombolo-cni/tombolo/internal/nl"
)

// Socket is a connection to nf_tables, and what was seen over it: what one package hands to
// another as a tombolo.Socket. A Seen that one process leaves to another by its Text must not
// come from another namespace, whose generations have the same numbers.
type Socket struct {
	*nl.Conn
	*Seen
}

// Of is the connection that a package was given as a tombolo.Socket. Its own error says what
// is wrong with another kind of Socket.
func Of(s tombolo.Socket) Socket {
	if own, ok := s.(Socket); ok {
		return own
	}
	return Socket{nl.Of(s), &Seen{}}
}

// Unchanged says whether nf_tables is as this socket's own last transaction left it, or as it was last seen. It is
// false where that is not known.
func (s Socket) Unchanged() (bool, error) {
	generation := s.Generation()
	if generation == nil {
		return false, nil
	}
	err := Unchanged(s.Conn, *generation)
	if IsOvertaken(err) {
		return false, nil
	}
	return err == nil, err
}

// Seen is what was in order at a generation: a number that every change of a namespace's
// nf_tables counts up. While it is the same, all of that still is. Things go by sums of what
// they are made of. The zero Seen says nothing, and is off.
type Seen struct {
	mu         sync.Mutex
	on         bool
	generation uint32
	sums       []uint64
}

// MaxSeen bounds how many sums a Seen has. Those that were looked at last are in it.
const MaxSeen = 8

// Use switches it on, and has it know what Text gave; of any other text, nothing.
func (k *Seen) Use(text string) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.on = true
	k.generation, k.sums = parseSeen(text)
}

func parseSeen(text string) (generation uint32, sums []uint64) {
	first, rest, _ := strings.Cut(text, " ")
	n, err := strconv.ParseUint(first, 10, 32)
	for field := range strings.SplitSeq(rest, " ") {
		sum, sumErr := strconv.ParseUint(field, 16, 64)
		err = cmp.Or(err, sumErr)
		sums = append(sums, sum)
	}
	if err != nil || len(sums) > MaxSeen {
		return 0, nil
	}
	return uint32(n), sums
}

// Text gives what is known, for the next process: at most 146 characters, and none if it is nothing.
func (k *Seen) Text() string {
	k.mu.Lock()
	defer k.mu.Unlock()
	if len(k.sums) == 0 {
		return ""
	}
	b := strconv.AppendUint(nil, uint64(k.generation), 10)
	for _, sum := range k.sums {
		b = strconv.AppendUint(append(b, ' '), sum, 16)
	}
	return string(b)
}

// Covers says whether something is known to be in order at a generation.
func (k *Seen) Covers(generation uint32, sum uint64) bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.generation == generation && slices.Contains(k.sums, sum)
}

// IsOn says whether it is in use.
func (k *Seen) IsOn() bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.on
}

// Add notes that something was seen to be in order at a generation.
func (k *Seen) Add(generation uint32, sum uint64) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.generation != generation {
		k.generation, k.sums = generation, nil
	}
	rest := slices.DeleteFunc(k.sums, func(n uint64) bool { return n == sum })
	k.sums = append(rest[max(0, len(rest)+1-MaxSeen):], sum)
}

// Generation is the one that something is known of, nil if there is none.
func (k *Seen) Generation() *uint32 {
	k.mu.Lock()
	defer k.mu.Unlock()
	if len(k.sums) == 0 {
		return nil
	}
	generation := k.generation
	return &generation
}

// Follow notes that a transaction of a generation was carried out that left all that is
// known in order.
func (k *Seen) Follow(generation uint32) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.generation == generation && len(k.sums) > 0 {
		k.generation = Next(generation)
	}
}

// Drop forgets what is known.
func (k *Seen) Drop() {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.generation, k.sums = 0, nil
}

// Next is the generation that a transaction makes: the kernel passes over 0.
func Next(generation uint32) uint32 {
	return max(generation+1, 1)
}
