package nftnl

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/google/nftables/expr"
	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo"
	"github.com/tombolo-cni/tombolo/internal/nl"
)

// subject is the name of the whole transaction in errors.
const subject = nl.Name("nf_tables")

// Transaction is a list of nf_tables changes that the kernel makes all at once or not at all. See
// include/uapi/linux/netfilter/nf_tables.h for the attributes of its messages.
type Transaction struct {
	b   nl.Batch
	buf []byte // memory of the previous message, which the batch has copied
}

// Begin starts a transaction. If generation is not nil, the kernel refuses the transaction (ERESTART) if anything in
// the namespace's nf_tables has changed since that generation. See VisibleGeneration.
func Begin(generation *uint32) *Transaction {
	t := &Transaction{}
	if generation != nil {
		t.edge(unix.NFNL_MSG_BATCH_BEGIN, Uint32(unix.NFNL_BATCH_GENID, *generation))
	} else {
		t.edge(unix.NFNL_MSG_BATCH_BEGIN)
	}
	return t
}

// edge appends the message that begins or ends the transaction.
func (t *Transaction) edge(typ netlink.HeaderType, attrs ...netlink.Attribute) {
	m, err := message(t.buf, typ, 0, unix.AF_UNSPEC, unix.NFNL_SUBSYS_NFTABLES, attrs)
	t.b.AddSilent("change", subject, m, err)
}

// Empty reports whether the transaction contains no changes.
func (t *Transaction) Empty() bool { return t.b.Len() == 1 }

// Add appends a change. Only the first change requests an acknowledgement, which shows that the kernel has processed
// the whole transaction. If every change requested one, they would overflow the socket's buffer. Linux before 6.10
// sends no acknowledgement for the message that ends a transaction.
func (t *Transaction) Add(op string, obj fmt.Stringer, family uint8, msg uint16, flags netlink.HeaderFlags,
	attrs ...netlink.Attribute) {
	m, err := message(t.buf, Type(msg), flags, family, 0, attrs)
	t.append(op, obj, m, err)
}

// AddRule appends a change that adds a rule. If comment is not empty, the rule gets the comment. attrs and flags
// determine the chain and the rule's place in it.
func (t *Transaction) AddRule(op string, obj fmt.Stringer, family uint8, flags netlink.HeaderFlags, comment string,
	steps []expr.Any, attrs ...netlink.Attribute) {
	b, stepsErr := Marshal(family, steps)
	attrs = append(attrs, Bytes(netlink.Nested|unix.NFTA_RULE_EXPRESSIONS, b))
	if comment != "" {
		attrs = append(attrs, Bytes(unix.NFTA_RULE_USERDATA, Comment(comment)))
	}
	m, err := message(t.buf, Type(unix.NFT_MSG_NEWRULE), netlink.Create|flags, family, 0, attrs)
	t.append(op, obj, m, cmp.Or(stepsErr, err))
}

func (t *Transaction) append(op string, obj fmt.Stringer, m netlink.Message, err error) {
	t.buf = m.Data
	if t.Empty() {
		t.b.Add(op, obj, m, err)
	} else {
		t.b.AddSilent(op, obj, m, err)
	}
}

// End appends the end of the transaction and returns its messages. Nothing may be added afterwards.
func (t *Transaction) End() *nl.Batch {
	t.edge(unix.NFNL_MSG_BATCH_END)
	return &t.b
}

// Commit sends the transaction to the kernel, unless it is empty. The error is about the first change that the kernel
// refused, or about the whole transaction.
func (t *Transaction) Commit(c *nl.Conn) error {
	if t.Empty() {
		return nil
	}
	return c.Execute(t.End())
}

// Get appends a request for one object to b. reply is called with the object's attributes. If the object does not
// exist, the kernel answers ENOENT.
func Get(b *nl.Batch, obj fmt.Stringer, family uint8, msg uint16, reply func([]byte) error,
	attrs ...netlink.Attribute) {
	m, err := message(nil, Type(msg), 0, family, 0, attrs)
	b.AddGet("get", obj, m, err, body(reply))
}

// List requests all objects of a kind that match attrs, and passes the attributes of every object to each.
func List(c *nl.Conn, op string, family uint8, msg uint16, each func([]byte) error, attrs ...netlink.Attribute) error {
	m, err := message(nil, Type(msg), 0, family, 0, attrs)
	return c.List(context.Background(), op, m, err, body(each))
}

// Generation returns the present generation of nf_tables. Every transaction in the network namespace that changes
// nf_tables increments the generation, also one of another program. Elements that expire, or that rules add, do not
// increment the generation.
func Generation(c *nl.Conn) (uint32, error) {
	var generation uint32
	m, err := message(nil, Type(unix.NFT_MSG_GETGEN), 0, unix.AF_UNSPEC, 0, nil)
	err = c.Get(context.Background(), "get generation of nf_tables", nil, m, err, body(func(data []byte) error {
		generation = Number(Find(data, unix.NFTA_GEN_ID))
		return nil
	}))

	return generation, err
}

// VisibleGeneration returns a generation whose changes are visible: everything read later belongs to this generation or
// to a later one. The function Generation does not guarantee that. Kernels such as 6.1 increment the generation a
// moment before the changes are visible. A reader could then see the new number together with the old state.
func VisibleGeneration(c *nl.Conn) (uint32, error) {
	generation, err := Generation(c)
	if err == nil {
		err = Unchanged(c, generation)
	}
	return generation, err
}

// Unchanged waits until the kernel has finished a transaction in progress. It returns an error (ERESTART) if the
// generation is not the given one any more. For this it commits an empty transaction.
func Unchanged(c *nl.Conn, generation uint32) error {
	return c.Execute(Begin(&generation).End())
}

// tries is the maximum number of attempts of Retry. Each failed attempt means that another program has changed
// nf_tables.
const tries = 200

// Retry calls try until it succeeds, or fails for a reason other than a change by another program (see IsOvertaken).
// It gives up after 200 attempts, or when ctx ends.
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
			// Pause for a random time, so that several processes do not retry at the same moment.
			time.Sleep(rand.N(time.Millisecond))
		}
	}

	return fmt.Errorf("gave up after %d tries, each overtaken by another change of the firewall: %w", tries, err)
}

// ErrOvertaken means that another program changed an object between our lookup and our change, or that a listing was
// inconsistent because a set changed meanwhile.
var ErrOvertaken = errors.New("overtaken by another change")

// IsOvertaken reports whether err means that another program changed nf_tables at the same time, so that a retry may
// help.
func IsOvertaken(err error) bool {
	return errors.Is(err, ErrOvertaken) || errors.Is(err, unix.ERESTART) || // a transaction with an old generation
		errors.Is(err, tombolo.ErrInterrupted)
}

// ExecuteGets sends a batch of Get requests. It returns the first error, except errors about missing objects and
// errors that match one in the list same.
func ExecuteGets(c *nl.Conn, b *nl.Batch, same ...error) error {
	if err := c.Execute(b); err == nil {
		return nil
	}

	return b.FirstErr(append(same, fs.ErrNotExist)...)
}

// IsMissing reports whether err means that the kernel has no nf_tables and could not load it.
func IsMissing(err error) bool {
	return errors.Is(err, unix.EINVAL) || errors.Is(err, unix.EOPNOTSUPP)
}

// SharedSocket is a connection to nf_tables, together with a record of the rulesets that were found complete. Packages
// pass it to each other as a tombolo.Socket. One process may pass its Verified to another as text, if both use the same
// network namespace. Generations of different namespaces may have equal numbers.
type SharedSocket struct {
	*nl.Conn
	*Verified
}

// Of converts s to a SharedSocket. If s is neither a SharedSocket nor an nl.Conn, the Conn of the result is nil.
func Of(s tombolo.Socket) SharedSocket {
	if own, ok := s.(SharedSocket); ok {
		return own
	}
	return SharedSocket{nl.Of(s), &Verified{}}
}

// Unchanged reports whether nf_tables still has the generation in s.Verified. If s.Verified is empty, it returns false.
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

// Verified records which rulesets were found complete in a generation of nf_tables. Every change of a ruleset
// increments the generation. As long as it stays the same, the rulesets are still complete. A ruleset is recorded by a
// checksum of its settings or of its intended content. The zero Verified is empty and not in use.
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
	var sums []uint64
	first, rest, _ := strings.Cut(text, " ")
	n, err := strconv.ParseUint(first, 10, 32)
	for field := range strings.SplitSeq(rest, " ") {
		sum, sumErr := strconv.ParseUint(field, 16, 64)
		err = cmp.Or(err, sumErr)
		sums = append(sums, sum)
	}

	if err != nil || len(sums) > MaxVerified {
		n, sums = 0, nil
	}

	k.mu.Lock()
	defer k.mu.Unlock()
	k.on, k.generation, k.sums = true, uint32(n), sums
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

// Covers reports whether the ruleset with this checksum was found complete in this generation.
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

// Add records that the ruleset with this checksum was found complete in this generation. It drops records of other
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

// Follow records that our own transaction, on top of the given generation, has left all recorded rulesets complete. So
// the record then applies to the next generation. If the record is of another generation, Follow does nothing.
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
