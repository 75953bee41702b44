package nft

import (
	"fmt"
	"io/fs"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/nft/internal/ruleset"
)

// ConflictError means that an element of an endpoint, or one that excludes it, exists already. It matches
// fs.ErrExist.
type ConflictError struct {
	// Element is the element in nft's syntax: "inet tombolo pods4 { cbr0 . 10.22.0.5 }".
	Element string
	// Owner and Network belong to the endpoint that has it. The owner may equal the owner of the failed Add. Both are
	// empty if the element is not ours.
	Owner   Owner
	Network string
	// Comment is the element's comment.
	Comment string
	// Port is the requested published port, in the form of Port.String, if the conflict concerns a port. Element may
	// name another one: a port on all addresses excludes the same port on one.
	Port string
}

// Error names the element and its owner.
func (e *ConflictError) Error() string {
	whose := fmt.Sprintf("endpoint %s of network %s", e.Owner, e.Network)
	if e.Owner == "" {
		whose = fmt.Sprintf("another program (comment %q)", e.Comment)
	}
	if e.Port != "" {
		return fmt.Sprintf("publish port %s: element %s stands in its way, and belongs to %s", e.Port, e.Element, whose)
	}
	return fmt.Sprintf("add element %s: it belongs to %s", e.Element, whose)
}

// Is makes the error match fs.ErrExist and EEXIST.
func (e *ConflictError) Is(target error) bool { return target == fs.ErrExist || target == unix.EEXIST }

// newConflict returns the error about an element. port is the port that was to be published.
func newConflict(name ruleset.TableName, el ruleset.ElementState, port string) *ConflictError {
	owner, network, _ := ownerOf(&el)
	return &ConflictError{
		Element: fmt.Sprintf("%s %s { %s }", name.Of(el.Set.Family), el.Set.Name, el.KeyText()),
		Owner:   owner, Network: network, Comment: el.Comment, Port: port,
	}
}
