package keeper

import (
	"context"
	"errors"
	"fmt"
	"math"
	"net/netip"
	"time"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/addr"
	"github.com/tombolo-cni/tombolo/dhcpc/dhcp6"
	"github.com/tombolo-cni/tombolo/dhcpc/transport"
	"github.com/tombolo-cni/tombolo/internal/sysctl"
)

// dial6 sends from the pod's interface, and hears at the host's end of its link; see dial.
func (p *kernelPod) dial6(ctx context.Context) (dhcp6.Transport, error) {
	port, err := p.port(ctx)
	if err != nil {
		return nil, err
	}
	witness, err := transport.DialWitness6(&transport.Config{NetNS: p.host, Link: port, MAC: []byte(p.r.Client.MAC)})
	if err != nil {
		return nil, err
	}
	send, err := transport.DialUDP6(&transport.Config{NetNS: p.ns, Link: p.link})
	if err != nil {
		return nil, errors.Join(err, witness.Close())
	}
	return &heardOutside6{witness.For(send), witness}, nil
}

// heardOutside6 is a transport with the witness that it hears by.
type heardOutside6 struct {
	dhcp6.Transport
	witness *transport.Witness6
}

func (h *heardOutside6) Close() error { return errors.Join(h.Transport.Close(), h.witness.Close()) }

const (
	// detection is longer than the kernel takes to look for other hosts: up to a second until it
	// asks, and a second for the answer.
	detection = 10 * time.Second
	// lookPause is between two looks whether it is done.
	lookPause = 20 * time.Millisecond
)

func (p *kernelPod) acceptDAD() (string, error) {
	value := ""
	err := p.ns.Do(func() error {
		var err error
		value, err = sysctl.Read(sysctl.Link("ipv6", p.r.IfName, "accept_dad"))
		return err
	})
	return value, err
}

func (p *kernelPod) setAcceptDAD(value string) error {
	return p.ns.Do(func() error { return sysctl.Write(sysctl.Link("ipv6", p.r.IfName, "accept_dad"), value) })
}

func (p *kernelPod) inUse(ctx context.Context, l *dhcp6.Lease) (bool, error) {
	ctx, cancel := context.WithTimeout(ctx, detection)
	defer cancel()
	if err := p.apply6(l); err != nil {
		return false, err
	}
	for {
		a, err := p.find6(l.Address)
		switch {
		case err != nil:
			return false, err
		case a == nil || a.Flags&addr.DADFailed != 0:
			return true, p.withdraw6(l)
		case a.Flags&addr.Tentative == 0:
			return false, nil
		}
		select {
		case <-ctx.Done():
			return false, errors.Join(fmt.Errorf("look for other hosts that have %s: %w", l.Address, ctx.Err()), p.withdraw6(l))
		case <-time.After(lookPause):
		}
	}
}

// find6 gives an address of the pod's interface; nil where it has none such.
func (p *kernelPod) find6(a netip.Addr) (*addr.Address, error) {
	have, err := addr.On(p.conn).List(addr.Filter{Link: p.link, Family: unix.AF_INET6})
	for i := range have {
		if have[i].Prefix.Addr() == a {
			return &have[i], err
		}
	}
	return nil, err
}

func (p *kernelPod) lacks6(a netip.Addr) (bool, error) {
	found, err := p.find6(a)
	return found == nil, err
}

func (p *kernelPod) apply6(l *dhcp6.Lease) error {
	t := now()
	return addr.On(p.conn).Replace(addr.Address{
		Prefix: netip.PrefixFrom(l.Address, l.Address.BitLen()), Link: p.link,
		Valid: lifetime(max(l.Left(t), -1), time.Second), Preferred: lifetime(l.PreferredFor(t), 0),
	})
}

// lifetime is as the kernel takes it: nil is for ever, which is -1 here. It refuses 0 s as a valid one, and takes the
// largest number for ever.
func lifetime(left, least time.Duration) *time.Duration {
	if left < 0 {
		return nil
	}
	left = min(max(left, least), (math.MaxUint32-1)*time.Second)
	return &left
}

func (p *kernelPod) withdraw6(l *dhcp6.Lease) error {
	return addr.On(p.conn).Remove(addr.Address{Prefix: netip.PrefixFrom(l.Address, l.Address.BitLen()), Link: p.link})
}
