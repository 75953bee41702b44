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

// Socket is a connection to nf_tables together with the knowledge gained over it. Packages pass it to each other as a
// tombolo.Socket. A process may pass its Seen to another as text, but only within one network namespace, since
// generations of different namespaces have the same numbers.
type Socket struct {
	*nl.Conn
	*Seen
}

// Of converts a tombolo.Socket. If s is another kind of Socket, methods of the result return an error.
func Of(s tombolo.Socket) Socket {
	if own, ok := s.(Socket); ok {
		return own
	}
	return Socket{nl.Of(s), &Seen{}}
}

// Unchanged reports whether nf_tables is still as this socket last saw it, or as its own last transaction left it. It
// reports false if that is unknown.
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

// Seen records which objects were in order at a generation, a number that each change of a namespace's nf_tables
// increments. Until the next generation these objects are certainly in order. An object is represented by a checksum
// of its content. The zero Seen is empty and not in use.
type Seen struct {
	mu         sync.Mutex
	on         bool
	generation uint32
	sums       []uint64
}

// MaxSeen is the number of checksums in a Seen. New ones replace the oldest.
const MaxSeen = 8

// Use puts the Seen into use, with the knowledge in text, which Text returned. Any other text counts as no knowledge.
func (k *Seen) Use(text string) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.on = true
	k.generation, k.sums = parseSeen(text)
}

// parseSeen parses a text of Seen.Text.
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

// Text returns the knowledge for the next process, in at most 146 characters. It returns "" if there is none.
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

// Covers reports whether the object with this checksum was in order at the generation.
func (k *Seen) Covers(generation uint32, sum uint64) bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.generation == generation && slices.Contains(k.sums, sum)
}

// IsOn reports whether the Seen is in use.
func (k *Seen) IsOn() bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.on
}

// Add records that the object with this checksum was in order at the generation.
func (k *Seen) Add(generation uint32, sum uint64) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.generation != generation {
		k.generation, k.sums = generation, nil
	}
	rest := slices.DeleteFunc(k.sums, func(n uint64) bool { return n == sum })
	k.sums = append(rest[max(0, len(rest)+1-MaxSeen):], sum)
}

// Generation returns the generation of the recorded knowledge, or nil if there is none.
func (k *Seen) Generation() *uint32 {
	k.mu.Lock()
	defer k.mu.Unlock()
	if len(k.sums) == 0 {
		return nil
	}
	generation := k.generation
	return &generation
}

// Follow records that our transaction changed the generation and left all recorded objects in order.
func (k *Seen) Follow(generation uint32) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.generation == generation && len(k.sums) > 0 {
		k.generation = Next(generation)
	}
}

// Drop deletes all knowledge.
func (k *Seen) Drop() {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.generation, k.sums = 0, nil
}

// Next returns the generation after a transaction. The kernel skips 0.
func Next(generation uint32) uint32 {
	return max(generation+1, 1)
}
