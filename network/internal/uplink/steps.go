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

// stepName is the name of a step.
type stepName string

// The steps of a takeover, in order: see the package comment.
const (
	stepBridge    stepName = "bridge"
	stepAddresses stepName = "addresses"
	stepPort      stepName = "port"
	stepRoutes    stepName = "routes"
	stepRelease   stepName = "release"
	stepSettle    stepName = "settle"
)

// takeSteps returns the order of steps of a takeover.
func takeSteps() []stepName {
	return []stepName{stepBridge, stepAddresses, stepPort, stepRoutes, stepRelease, stepSettle}
}

// restoreSteps returns the order of steps that give a NIC back.
func restoreSteps() []stepName {
	return []stepName{stepBridge, stepAddresses, stepRoutes, stepPort, stepRelease, stepSettle}
}

// Steps is a plan: a list of steps, with facts that the operator should know beforehand.
type Steps struct {
	// Moves are the addresses to move, without link-local ones.
	Moves []netip.Addr
	// Warnings are about things that behave differently after the steps.
	Warnings []string

	list []oneStep
	move *move
}

// oneStep is one step of a plan.
type oneStep struct {
	name     stepName
	words    []string // descriptions of the actions, in order
	requests []request
}

// String describes all steps, one line for each action.
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

// step returns the step with a name.
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

// request is one request to the kernel, as a part of a step.
type request struct {
	text string
	add  func(*nl.Batch)
	// done reports whether an error means that the request was made before, or that the error does not matter. If
	// nil, every error counts.
	done func(error) bool
}

// ask returns a request with one message.
func ask(text, op string, obj fmt.Stringer, message func() (netlink.Message, error), done func(error) bool) request {
	return request{text: text, done: done, add: func(b *nl.Batch) {
		m, err := message()
		b.Add(op, obj, m, err)
	}}
}

const replace = netlink.Create | netlink.Replace

// as returns a function that encodes a message about an address or a route.
func as(
	of interface {
		Message(netlink.HeaderType, netlink.HeaderFlags) (netlink.Message, error)
	}, typ netlink.HeaderType, flags netlink.HeaderFlags,
) func() (netlink.Message, error) {
	return func() (netlink.Message, error) { return of.Message(typ, flags) }
}

func exists(err error) bool { return errors.Is(err, fs.ErrExist) }

// isGone reports whether an error means that a rule (ENOENT), a route (ESRCH) or an address (EADDRNOTAVAIL) does not
// exist.
func isGone(err error) bool { return errors.Is(err, fs.ErrNotExist) }

// atOnce is the number of requests in one sendmsg. Their acknowledgements must fit into the socket's buffer.
const atOnce = 256

// apply makes all requests of a step. It continues after errors, and returns the first.
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
