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

// Conn shapes at the ports of one network namespace, over a socket of another's (bridge.Conn's
// Socket). Its methods may be called from several goroutines, though not for one target at a time.
type Conn struct{ nl *nl.Conn }

// On makes a Conn over a socket that is open already, and stays with its owner.
func On(s tombolo.Socket) *Conn { return &Conn{nl.Of(s)} }

// Target says where the traffic of one attachment is shaped.
type Target struct {
	// Port names the host's end of the pod's veth pair. Remove takes "" as well: the
	// port is gone, or about to go, and takes with it all but the ifb.
	Port string
	// PortIndex is the port's index and MTU the port's, in bytes, where the caller
	// knows them; each 0 costs a request.
	PortIndex int
	MTU       int

	// IFB names the link that shapes egress; see IFBName.
	IFB string
	// Alias names the owner of the ifb; the kernel keeps it, at most 255 bytes.
	Alias string
	// Owner is how the alias of an ifb of this name must begin for it to be ours;
	// otherwise it is left alone, and an ErrForeign. "" takes any.
	Owner string
}

// ErrForeign is the cause of an error about a link that has the name of our ifb and
// belongs to another program.
var ErrForeign = errors.New("the link belongs to another owner")

// ErrNotSupported is the cause of an error about what the kernel lacks, and could not
// or would not load.
var ErrNotSupported = tc.ErrNotSupported

// IFBName derives the name of a port's ifb from the port's: "ifb" and what is behind
// "veth", where it begins so (bridge.HostName). Of the 15 bytes that a name may have, that
// takes one less.
func IFBName(port string) string { return "ifb" + strings.TrimPrefix(port, "veth") }

const aliasMax = 255 // IFALIASZ - 1

func (t *Target) validate() error {
	for _, name := range []string{t.Port, t.IFB} {
		if name == "" || len(name) >= unix.IFNAMSIZ {
			return fmt.Errorf("%w: %q names no link", tombolo.ErrInvalid, name)
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

// checkOwner refuses a link that is no ifb of the target's owner.
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
