package nftnl

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/google/nftables/expr"
	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo"
	"github.com/tombolo-cni/tombolo/internal/nl"
)

// subject is what a transaction as a whole is about.
const subject = nl.Name("nf_tables")

// Transaction is a row of changes of which the kernel makes all or none, and which
// packets, listings and other programs see at once. The attributes of its messages
// are those of include/uapi/linux/netfilter/nf_tables.h.
type Transaction struct {
	b   nl.Batch
	buf []byte // of the message before, which the batch has copied
}

// Begin starts a transaction. One with a generation is refused (ERESTART) if
// anything of this namespace's nf_tables has changed since: see SeenGeneration.
func Begin(generation *uint32) *Transaction {
	t := &Transaction{}
	if generation != nil {
		t.edge(unix.NFNL_MSG_BATCH_BEGIN, Uint32(unix.NFNL_BATCH_GENID, *generation))
	} else {
		t.edge(unix.NFNL_MSG_BATCH_BEGIN)
	}
	return t
}

func (t *Transaction) edge(typ netlink.HeaderType, attrs ...netlink.Attribute) {
	m, err := message(t.buf, typ, 0, unix.AF_UNSPEC, unix.NFNL_SUBSYS_NFTABLES, attrs)
	t.b.AddSilent("change", subject, m, err)
}

// Empty says that nothing would change.
func (t *Transaction) Empty() bool { return t.b.Len() == 1 }

// Add appends a change. One acknowledgement is enough to know that the kernel has
// worked through all, and one for each would overflow the socket's buffer; Linux
// before 6.10 gives none for the message that ends a transaction.
func (t *Transaction) Add(op string, obj fmt.Stringer, family uint8, msg uint16, flags netlink.HeaderFlags, attrs ...netlink.Attribute) {
	m, err := message(t.buf, Type(msg), flags, family, 0, attrs)
	t.append(op, obj, m, err)
}

// AddRule makes a rule of steps, with a comment unless that is empty. The attributes
// and flags say where it goes.
func (t *Transaction) AddRule(op string, obj fmt.Stringer, family uint8, flags netlink.HeaderFlags, comment string, steps []expr.Any, attrs ...netlink.Attribute) {
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

// End gives the batch of the whole transaction, to which nothing may be added.
func (t *Transaction) End() *nl.Batch {
	t.edge(unix.NFNL_MSG_BATCH_END)
	return &t.b
}

// Commit puts a transaction to the kernel, unless it is empty. Its error is that of the
// first change that was refused, or of the transaction as a whole.
func (t *Transaction) Commit(c *nl.Conn) error {
	if t.Empty() {
		return nil
	}
	return c.Execute(t.End())
}

// Get appends a request for one object, which is answered by ENOENT where it is not there.
func Get(b *nl.Batch, obj fmt.Stringer, family uint8, msg uint16, reply func([]byte) error, attrs ...netlink.Attribute) {
	m, err := message(nil, Type(msg), 0, family, 0, attrs)
	b.AddGet("get", obj, m, err, body(reply))
}

// List asks for the objects of a kind that the attributes say.
func List(c *nl.Conn, op string, family uint8, msg uint16, each func([]byte) error, attrs ...netlink.Attribute) error {
	m, err := message(nil, Type(msg), 0, family, 0, attrs)
	return c.List(op, m, err, body(each))
}

// Generation reads the number that every transaction in this namespace counts up, ours
// or another program's.
func Generation(c *nl.Conn) (uint32, error) {
	var b nl.Batch
	var generation uint32
	m, err := message(nil, Type(unix.NFT_MSG_GETGEN), 0, unix.AF_UNSPEC, 0, nil)
	b.AddGet("get generation of nf_tables", nil, m, err, body(func(data []byte) error {
		generation = Number(Find(data, unix.NFTA_GEN_ID))
		return nil
	}))
	err = c.Execute(&b)
	return generation, err
}

// SeenGeneration gives a generation: all that is read from now on belongs to it, or to a later one. Kernels (6.1
// does) count up a moment before the changes can be seen, so that a new number could go with an old view.
func SeenGeneration(c *nl.Conn) (uint32, error) {
	generation, err := Generation(c)
	if err == nil {
		err = Unchanged(c, generation)
	}
	return generation, err
}

// Unchanged waits for a transaction that the kernel is at, and fails (ERESTART)
// unless it is that of the generation: by one that changes nothing.
func Unchanged(c *nl.Conn, generation uint32) error {
	return c.Execute(Begin(&generation).End())
}

// tries bounds how often something is read, decided on and refused because the firewall had changed in between.
// Each refusal means that another program's change was made.
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

// ErrOvertaken says that an object that was found is no longer there, or the reverse.
var ErrOvertaken = errors.New("overtaken by another change")

// IsOvertaken says that an error is that of a lost race.
func IsOvertaken(err error) bool {
	return errors.Is(err, ErrOvertaken) ||
		errors.Is(err, unix.ERESTART) || // a transaction with an old generation
		errors.Is(err, tombolo.ErrInterrupted)
}

// Look sends a batch of gets. A missing object is no error, nor is one of the errors same.
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
