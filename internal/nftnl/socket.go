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

// SharedSocket is a connection to nf_tables, together with a record of the objects that were found complete. Packages
// pass it to each other as a tombolo.Socket. One process may pass its Verified to another as text, if both use the
// same network namespace. Generations of different namespaces may have equal numbers.
type SharedSocket struct {
	*nl.Conn
	*Verified
}

// Of converts s to a SharedSocket. If s is of a foreign type, methods of the result return errors.
func Of(s tombolo.Socket) SharedSocket {
	if own, ok := s.(SharedSocket); ok {
		return own
	}
	return SharedSocket{nl.Of(s), &Verified{}}
}

// Unchanged reports whether nf_tables still has the generation that Verified has recorded. If nothing is recorded, it
// reports false.
func (s SharedSocket) Unchanged() (bool, error) {
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

// Verified records which objects were found complete in a generation of nf_tables. Every change of nf_tables in a
// network namespace increments the generation. As long as it stays the same, the objects are still complete. Objects
// are recorded by a checksum of their intended content. The zero Verified is empty and not in use.
type Verified struct {
	mu         sync.Mutex
	on         bool
	generation uint32
	sums       []uint64
}

// MaxVerified is the maximum number of checksums in a Verified. New checksums replace the oldest.
const MaxVerified = 8

// Use enables the Verified, and restores the record that Text returned. If text is invalid, the record is empty.
func (k *Verified) Use(text string) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.on = true
	k.generation, k.sums = parseVerified(text)
}

// parseVerified parses a text that Verified.Text returned. If text is invalid, it returns zero values.
func parseVerified(text string) (generation uint32, sums []uint64) {
	first, rest, _ := strings.Cut(text, " ")
	n, err := strconv.ParseUint(first, 10, 32)
	for field := range strings.SplitSeq(rest, " ") {
		sum, sumErr := strconv.ParseUint(field, 16, 64)
		err = cmp.Or(err, sumErr)
		sums = append(sums, sum)
	}

	if err != nil || len(sums) > MaxVerified {
		return 0, nil
	}
	return uint32(n), sums
}

// Text returns the record as text of at most 146 characters, for Use in another process. If the Verified is empty, Text
// returns "".
func (k *Verified) Text() string {
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

// Covers reports whether the object with this checksum was found complete in this generation.
func (k *Verified) Covers(generation uint32, sum uint64) bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.generation == generation && slices.Contains(k.sums, sum)
}

// IsOn reports whether Use was called.
func (k *Verified) IsOn() bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.on
}

// Add records that the object with this checksum was found complete in this generation. It drops records of other
// generations.
func (k *Verified) Add(generation uint32, sum uint64) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.generation != generation {
		k.generation, k.sums = generation, nil
	}
	rest := slices.DeleteFunc(k.sums, func(n uint64) bool { return n == sum })
	k.sums = append(rest[max(0, len(rest)+1-MaxVerified):], sum)
}

// Generation returns the generation of the record, or nil if the Verified is empty.
func (k *Verified) Generation() *uint32 {
	k.mu.Lock()
	defer k.mu.Unlock()
	if len(k.sums) == 0 {
		return nil
	}
	generation := k.generation
	return &generation
}

// Follow records that our own transaction, on top of the given generation, has left all recorded objects complete. So
// the record then applies to the next generation.
func (k *Verified) Follow(generation uint32) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.generation == generation && len(k.sums) > 0 {
		k.generation = Next(generation)
	}
}

// Drop deletes all records.
func (k *Verified) Drop() {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.generation, k.sums = 0, nil
}

// Next returns the generation after one transaction. The kernel skips 0.
func Next(generation uint32) uint32 {
	return max(generation+1, 1)
}
