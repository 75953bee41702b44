package uplink

import (
	"errors"
	"fmt"
	"io/fs"
	"strconv"
	"strings"

	"github.com/mdlayher/netlink"

	"github.com/tombolo-cni/tombolo/internal/nl"
)

// operation is the least that a step can do: a request to the kernel, or a parameter
// to be set.
type operation struct {
	text    string
	request func(*nl.Batch)
	// done says that an error means that the step was done before: steps may be
	// repeated. nil is no error.
	done    func(error) bool
	setting *setting
}

// put gives what appends one request to a batch.
func put(op string, obj fmt.Stringer, message func() (netlink.Message, error)) func(*nl.Batch) {
	return func(b *nl.Batch) {
		m, err := message()
		b.Add(op, obj, m, err)
	}
}

func set(list ...setting) []operation {
	var ops []operation
	for _, s := range list {
		ops = append(ops, operation{text: s.String(), setting: &s})
	}
	return ops
}

func exists(err error) bool { return errors.Is(err, fs.ErrExist) }

// gone takes in what the kernel says of a rule (ENOENT), a route (ESRCH) and an
// address (EADDRNOTAVAIL).
func gone(err error) bool { return errors.Is(err, fs.ErrNotExist) }

// names has links' names by their index, for words.
type names map[int]string

// on replaces "on link 7", as the packages for addresses and routes have it, by
// "dev eth0".
func (n names) on(text string) string {
	const marker = " on link "
	var b strings.Builder
	for {
		before, after, found := strings.Cut(text, marker)
		b.WriteString(before)
		if !found {
			return b.String()
		}
		digits := len(after) - len(strings.TrimLeft(after, "-0123456789"))
		index, _ := strconv.Atoi(after[:digits])
		name, known := n[index]
		if !known {
			name = "link " + after[:digits]
		}
		b.WriteString(" dev " + name)
		text = after[digits:]
	}
}
