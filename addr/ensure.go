package addr

import (
	"errors"
	"io/fs"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/nl"
)

// Ensure makes a link have an address as it is given, and says whether it had to
// change anything. A Broadcast, Label or Protocol that is not set is not compared.
// A finite lifetime starts anew, which is a change unless the seconds left are the
// same.
//
// What the kernel cannot change in place is corrected by deleting the address and
// adding it again, in one message; should it be refused then, the old one is put
// back. For IPv4 these are Flags, Scope, Broadcast, Label and Peer, and Remove says
// what else a deletion takes along; for IPv6 they are the prefix length (a link
// has an IPv6 address only once), and an address that is not usable: one whose
// duplicate address detection failed, or is under way though NoDAD is asked for.
func (c *Conn) Ensure(a Address) (changed bool, _ error) {
	err := c.Add(a)
	if !errors.Is(err, fs.ErrExist) {
		return err == nil, err
	}
	have, err := c.find(&a)
	if err != nil {
		return false, err
	}
	switch a.compare(&have) {
	case replaceable:
		err = c.Replace(a)
	case deletable:
		err = c.exchange(have, a)
	default:
		return false, nil
	}
	return err == nil, err
}

// exchange deletes one address and adds another in its place.
func (c *Conn) exchange(from, to Address) error {
	var b nl.Batch
	m, err := from.DelMessage()
	b.Add("delete address", &from, m, err)
	m, err = to.AddMessage()
	b.Add("add address", &to, m, err)
	c.socket().Execute(&b)
	delErr, addErr := b.Err(0), b.Err(1)
	if addErr != nil && delErr == nil {
		return errors.Join(addErr, c.Add(from))
	}
	if delErr != nil && !errors.Is(delErr, fs.ErrNotExist) {
		return delErr
	}
	return addErr
}

// difference is what it takes to turn one address into another.
type difference int

const (
	same difference = iota
	replaceable
	deletable
)

func (a *Address) compare(have *Address) difference {
	fixed := a.askedFlags() ^ have.askedFlags() // flags that no request changes in place
	var changeable Flags
	if !a.is4() {
		// inet6_addr_modify() of the kernel.
		changeable = fixed &^ (unix.IFA_F_MCAUTOJOIN | unix.IFA_F_OPTIMISTIC)
		fixed &= unix.IFA_F_MCAUTOJOIN // optimistic is gone once the detection is over
	}
	unusable := have.Flags&DADFailed != 0 || have.Flags&Tentative != 0 && a.Flags&NoDAD != 0
	switch {
	case a.Prefix != have.Prefix, fixed != 0, !a.is4() && unusable:
		return deletable
	case a.is4() && (a.Scope != have.Scope || a.peer() != have.peer() ||
		a.Broadcast.IsValid() && a.Broadcast != have.Broadcast ||
		a.Label != "" && a.Label != have.Label):
		return deletable
	case changeable != 0, a.peer() != have.peer(), a.Metric != have.Metric,
		a.Protocol != 0 && a.Protocol != have.Protocol,
		seconds(a.Valid, nil) != seconds(have.Valid, nil),
		seconds(a.Preferred, a.Valid) != seconds(have.Preferred, nil):
		return replaceable
	}
	return same
}
