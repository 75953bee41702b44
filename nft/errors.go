package nft

import (
	"fmt"
	"io/fs"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/nft/internal/ruleset"
)

// ConflictError says that an element which an endpoint needs is there already, or
// one that excludes it. It matches fs.ErrExist.
type ConflictError struct {
	// Element is as nft takes it: "inet tombolo pods4 { cbr0 . 10.22.0.5 }".
	Element string
	// Owner and Network are those of the endpoint that has it. The owner may be the
	// one that was to be added. Both are empty if the element is not ours.
	Owner   Owner
	Network string
	// Comment is the element's.
	Comment string
	// Port is the published port that was asked for, as Port.String has it, where it
	// is about one. What Element names may be another: a port on all addresses excludes
	// the same port on one.
	Port string
}

// Error names the element and whose it is.
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

// Is makes it match fs.ErrExist and EEXIST.
func (e *ConflictError) Is(target error) bool { return target == fs.ErrExist || target == unix.EEXIST }

// newConflict is about an element, and the port that was to be published.
func newConflict(name ruleset.TableName, el ruleset.ElementState, port string) *ConflictError {
	owner, network, _ := ownerOf(&el)
	return &ConflictError{
		Element: fmt.Sprintf("%s %s { %s }", name.Of(el.Set.Family), el.Set.Name, el.KeyText()),
		Owner:   owner, Network: network, Comment: el.Comment, Port: port,
	}
}
