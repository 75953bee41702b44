package bandwidth

import (
	"errors"
	"fmt"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo"
	"github.com/tombolo-cni/tombolo/internal/link"
	"github.com/tombolo-cni/tombolo/internal/nl"
	"github.com/tombolo-cni/tombolo/internal/tc"
)

// Conn limits the traffic of ports in one network namespace. It uses the open socket of another connection
// (bridge.Conn's Socket). Several goroutines may call its methods, but not for the same target at once.
type Conn struct{ nl *nl.Conn }

// On returns a Conn over an open socket, which still belongs to its owner.
func On(s tombolo.Socket) *Conn { return &Conn{nl.Of(s)} }

// Target identifies the links where the traffic of one attachment is limited.
type Target struct {
	// Port is the name of the host's end of the pod's veth pair. Remove also accepts "" if the port is gone or about
	// to go, since everything except the ifb goes with it.
	Port string
	// PortIndex is the port's index, and MTU its MTU in bytes. If either is 0, a request finds it out.
	PortIndex int
	MTU       int

	// IFB is the name of the link that shapes egress; see IFBName.
	IFB string
	// Alias is the alias of the ifb, which marks its owner. It has at most 255 bytes.
	Alias string
	// Owner is the required beginning of the ifb's alias. An ifb with another alias is left alone, and is an
	// ErrForeign. "" accepts any alias.
	Owner string
}

// ErrForeign is the cause of an error about a link with the name of our ifb that belongs to another program.
var ErrForeign = errors.New("the link belongs to another owner")

// ErrNotSupported is the cause of an error about a feature that the kernel lacks and could not load.
var ErrNotSupported = tc.ErrNotSupported

// IFBName returns the name of a port's ifb: "ifb" and the port's name without a leading "veth" (see bridge.HostName).
// For such a port the name is one byte shorter than the port's.
func IFBName(port string) string { return "ifb" + strings.TrimPrefix(port, "veth") }

const aliasMax = 255 // IFALIASZ - 1

// validate returns an error if a field is not valid.
func (t *Target) validate() error {
	for _, name := range []string{t.Port, t.IFB} {
		if name == "" || len(name) >= unix.IFNAMSIZ {
			return fmt.Errorf("%w: %q names no link: want 1 to 15 bytes", tombolo.ErrInvalid, name)
		}
	}

	switch {
	case t.Port == t.IFB:
		return fmt.Errorf("%w: the port and the ifb are both %q", tombolo.ErrInvalid, t.Port)
	case len(t.Alias) > aliasMax:
		return fmt.Errorf("%w: an alias of %d bytes, where %d is the most", tombolo.ErrInvalid, len(t.Alias), aliasMax)
	case !strings.HasPrefix(t.Alias, t.Owner):
		return fmt.Errorf("%w: the alias %q does not begin with its owner, %q", tombolo.ErrInvalid, t.Alias, t.Owner)
	}

	return nil
}

// checkOwner returns an error unless the link is an ifb of the target's owner.
func (t *Target) checkOwner(l *link.Link) error {
	var what string
	switch {
	case l.Kind != "ifb":
		what = fmt.Sprintf("it is of kind %q, not an ifb", l.Kind)
	case !strings.HasPrefix(l.Alias, t.Owner):
		what = fmt.Sprintf("its alias is %q, where %q is expected", l.Alias, t.Owner)
	default:
		return nil
	}

	return &tombolo.OpError{Op: "shape by", Object: t.IFB, Err: fmt.Errorf("%w: %s", ErrForeign, what)}
}
