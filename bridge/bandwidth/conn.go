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

// Conn limits the traffic of ports in one network namespace. It uses the socket of another connection, such as
// bridge.Conn's Socket. Several goroutines may call its methods, but not for the same target at the same time.
type Conn struct{ nl *nl.Conn }

// On returns a Conn that uses an open socket. The socket's owner still has to close it.
func On(s tombolo.Socket) *Conn { return &Conn{nl.Of(s)} }

// Target identifies the links of one pod whose traffic is limited.
type Target struct {
	// Port is the name of the host's end of the pod's veth pair. For Remove it may be "" if the port is gone or will
	// be deleted anyway. Everything except the ifb disappears with the port.
	Port string
	// PortIndex is the index of the port. MTU is the port's MTU in bytes. If one of them is 0, the Conn sends a
	// request to find it.
	PortIndex int
	MTU       int

	// IFB is the name of the ifb link for egress: see IFBName.
	IFB string
	// Alias is the alias of the ifb, of at most 255 bytes. It marks the owner.
	Alias string
	// Owner is the required prefix of the ifb's alias. If a link named IFB has another alias, the Conn does not
	// change it, and the error matches ErrForeign. "" accepts any alias.
	Owner string
}

// ErrForeign is wrapped by errors about a link with the name of our ifb that belongs to another program.
var ErrForeign = errors.New("the link belongs to another owner")

// ErrNotSupported is wrapped by errors about a kernel feature that is missing and that the kernel could not load.
var ErrNotSupported = tc.ErrNotSupported

// IFBName returns a name for the ifb of a port: "ifb" and the port's name without the prefix "veth" (see
// bridge.HostName).
func IFBName(port string) string { return "ifb" + strings.TrimPrefix(port, "veth") }

const aliasMax = 255 // IFALIASZ - 1

// validate returns an error if a field of the target is invalid.
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

// checkOwner returns an error that matches ErrForeign unless l is an ifb whose alias begins with t.Owner.
func (t *Target) checkOwner(l *link.Info) error {
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
