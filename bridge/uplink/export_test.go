package uplink

import (
	"errors"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/nl"
)

// DialThrough is Dial with what is between it and the kernel.
func DialThrough(cfg *Config, through func(nl.Transport) nl.Transport) (*Conn, error) {
	ns, err := own(cfg)
	if err != nil {
		return nil, err
	}
	t, err := nl.Open(unix.NETLINK_ROUTE, ns)
	if err != nil {
		return nil, errors.Join(err, ns.Close())
	}
	return over(ns, nl.New(through(t))), nil
}

// PlanRestore is the plan of the way back, of a record that may be out of date.
func PlanRestore(s *Snapshot, rec *Record) *Steps { return planRestore(s, rec.withoutReplaced(s)) }
