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
	// Table, Set and Key are the element's, as nft prints them: "inet tombolo",
	// "pods4" and "cbr0 . 10.22.0.5".
	Table, Set, Key string
	// Owner and Network are those of the endpoint that has it. The owner may be the
	// one that was to be added. Both are empty if the element is not ours.
	Owner   Owner
	Network string
	// Comment is the element's.
	Comment string
	// Port is the published port that was asked for, as Port.String has it, where it is about one. Key may name
	// another port: one on all addresses excludes the same port on one.
	Port string
}

// Error names the element and whose it is.
func (e *ConflictError) Error() string {
	if e == nil {
		return "no conflict"
	}
	whose := fmt.Sprintf("endpoint %s of network %s", e.Owner, e.Network)
	if e.Owner == "" {
		whose = fmt.Sprintf("another program (comment %q)", e.Comment)
	}
	if e.Port != "" {
		return fmt.Sprintf("publish port %s: element %s of map %s of table %s stands in its way, and belongs to %s",
			e.Port, e.Key, e.Set, e.Table, whose)
	}
	return fmt.Sprintf("add element %s to set %s of table %s: it belongs to %s", e.Key, e.Set, e.Table, whose)
}

// Is makes it match fs.ErrExist and EEXIST.
func (e *ConflictError) Is(target error) bool { return target == fs.ErrExist || target == unix.EEXIST }

// newConflict is about an element, and the port that was to be published.
func newConflict(name ruleset.TableName, el ruleset.ElementState, port string) *ConflictError {
	owner, network, _ := ownerOf(&el)
	return &ConflictError{
		Table: name.Of(el.Set.Family).String(), Set: el.Set.Name, Key: el.KeyText(),
		Owner: owner, Network: network, Comment: el.Comment, Port: port,
	}
}
