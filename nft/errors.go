package nft

import (
	"fmt"
	"io/fs"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/nft/internal/ruleset"
)

// ConflictError reports that an element of an endpoint, or an element that excludes it, already exists. It matches
// fs.ErrExist.
type ConflictError struct {
	// Element is the existing element in nft's syntax, such as "inet tombolo pods4 { cbr0 . 10.22.0.5 }".
	Element string
	// Owner and Network identify the endpoint that has the element. Owner may be the same as in the failed call. Both
	// are empty if another program added the element.
	Owner   Owner
	Network string
	// Comment is the comment of the existing element.
	Comment string
	// Port is the requested published port, as Port.String prints it, if the conflict is about a port. Element may
	// name a different address: a port on all addresses excludes the same port on one address.
	Port string
}

// Error returns a message that names the element and its owner.
func (e *ConflictError) Error() string {
	owner := fmt.Sprintf("endpoint %s of network %s", e.Owner, e.Network)
	if e.Owner == "" {
		owner = fmt.Sprintf("another program (comment %q)", e.Comment)
	}
	if e.Port != "" {
		return fmt.Sprintf("publish port %s: element %s stands in its way, and belongs to %s", e.Port, e.Element, owner)
	}
	return fmt.Sprintf("add element %s: it belongs to %s", e.Element, owner)
}

// Is reports whether target is fs.ErrExist or EEXIST.
func (e *ConflictError) Is(target error) bool { return target == fs.ErrExist || target == unix.EEXIST }

// newConflict returns the error about the existing element el. port is the text of the port to be published, or "".
func newConflict(name ruleset.TableName, el ruleset.ElementState, port string) *ConflictError {
	owner, network, _ := ownerOf(&el)
	return &ConflictError{
		Element: fmt.Sprintf("%s %s { %s }", name.Of(el.Set.Family), el.Set.Name, el.KeyText()),
		Owner:   owner, Network: network, Comment: el.Comment, Port: port,
	}
}
