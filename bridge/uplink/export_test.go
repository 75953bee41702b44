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
	var conns []*nl.Conn
	for _, protocol := range []int{unix.NETLINK_ROUTE, unix.NETLINK_NETFILTER} {
		t, err := nl.Open(protocol, &nl.Config{NetNS: ns})
		if err != nil {
			return nil, errors.Join(err, ns.Close())
		}
		conns = append(conns, nl.New(through(t)))
	}
	return over(ns, conns[0], conns[1]), nil
}
