package uplink

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"slices"
	"strings"

	"github.com/mdlayher/netlink"

	"github.com/tombolo-cni/tombolo/internal/nl"
)

// stepName names a step.
type stepName string

// The steps of a takeover, in their order: see the package's comment.
const (
	stepBridge    stepName = "bridge"
	stepAddresses stepName = "addresses"
	stepPort      stepName = "port"
	stepRoutes    stepName = "routes"
	stepRelease   stepName = "release"
	stepSettle    stepName = "settle"
)

// takeSteps is the order of a takeover.
func takeSteps() []stepName {
	return []stepName{stepBridge, stepAddresses, stepPort, stepRoutes, stepRelease, stepSettle}
}

// restoreSteps is the order in which a NIC is given back.
func restoreSteps() []stepName {
	return []stepName{stepBridge, stepAddresses, stepRoutes, stepPort, stepRelease, stepSettle}
}

// Steps is a plan: what is to be done in which order, and what the operator has to know beforehand.
type Steps struct {
	// Moves are the addresses that are moved, those of the link itself aside.
	Moves []netip.Addr
	// Warnings are about what goes on after the steps, but otherwise than before.
	Warnings []string

	list []oneStep
	move *move
}

// oneStep is one of them.
type oneStep struct {
	name     stepName
	words    []string // what is done, in the order in which it is done
	requests []request
}

// String tells all of it, a line for each thing that is done.
func (s *Steps) String() string {
	var b strings.Builder
	for i, step := range s.list {
		fmt.Fprintf(&b, "%d. %s\n", i+1, step.name)
		for _, what := range step.words {
			fmt.Fprintf(&b, "   %s\n", what)
		}
	}
	for _, w := range s.Warnings {
		fmt.Fprintf(&b, "warning: %s\n", w)
	}
	return b.String()
}

// step gives the step of a name.
func (s *Steps) step(name stepName) *oneStep {
	return &s.list[slices.IndexFunc(s.list, func(step oneStep) bool { return step.name == name })]
}

func (s *Steps) add(name stepName, words []string, requests ...[]request) {
	step := oneStep{name, words, slices.Concat(requests...)}
	for _, r := range step.requests {
		step.words = append(step.words, r.text)
	}
	s.list = append(s.list, step)
}

// request is the least that a step asks of the kernel.
type request struct {
	text string
	add  func(*nl.Batch)
	// done says that an error means that it was done before, or is not worth one: steps may
	// be repeated. nil is no error.
	done func(error) bool
}

// ask makes a request of one message.
func ask(text, op string, obj fmt.Stringer, message func() (netlink.Message, error), done func(error) bool) request {
	return request{text: text, done: done, add: func(b *nl.Batch) {
		m, err := message()
		b.Add(op, obj, m, err)
	}}
}

const replace = netlink.Create | netlink.Replace

// as is a message about an address or a route.
func as(
	of interface {
		Message(netlink.HeaderType, netlink.HeaderFlags) (netlink.Message, error)
	}, typ netlink.HeaderType, flags netlink.HeaderFlags,
) func() (netlink.Message, error) {
	return func() (netlink.Message, error) { return of.Message(typ, flags) }
}

func exists(err error) bool { return errors.Is(err, fs.ErrExist) }

// isGone takes in what the kernel says of a rule (ENOENT), a route (ESRCH) and an
// address (EADDRNOTAVAIL) that is not there.
func isGone(err error) bool { return errors.Is(err, fs.ErrNotExist) }

// atOnce requests go to the kernel in one sendmsg: their acknowledgements must fit into the socket's buffer.
const atOnce = 256

// apply does a step. It goes on past errors of single requests, and gives the first.
func (c *Conn) apply(ctx context.Context, step *oneStep) error {
	var first error
	for some := range slices.Chunk(step.requests, atOnce) {
		if err := ctx.Err(); err != nil {
			return err
		}
		if err := c.send(some); first == nil {
			first = err
		}
	}
	return first
}

func (c *Conn) send(requests []request) error {
	var b nl.Batch
	for _, r := range requests {
		r.add(&b)
	}
	if c.nl.Execute(&b) == nil {
		return nil
	}
	for i, r := range requests {
		if err := b.Err(i); err != nil && (r.done == nil || !r.done(err)) {
			return fmt.Errorf("%s: %w", r.text, err)
		}
	}
	return nil
}
