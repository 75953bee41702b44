// Package tuned has what belongs to a pod's interface follow what another program made of it.
package tuned

import (
	"context"
	"net"

	"github.com/tombolo-cni/tombolo"
	"github.com/tombolo-cni/tombolo/internal/endpoint"
	"github.com/tombolo-cni/tombolo/internal/state"
	"github.com/tombolo-cni/tombolo/network/internal/fail"
	"github.com/tombolo-cni/tombolo/network/internal/session"
)

// Attachment locks the record of an attachment, and changes the MAC and the MTU on it, the guard
// and the port's MTU; nil and 0 are as they were. The record is written last.
func Attachment(ctx context.Context, s *session.Session, network, hash string, mac net.HardwareAddr, mtu int) error {
	lock, err := s.Dir.LockAttachment(network, hash)
	if err != nil {
		return fail.State(err)
	}
	defer lock.Close()
	a, err := s.Dir.Load(network, hash)
	if err != nil {
		return fail.State(err)
	}
	if a.State != state.Ready {
		return fail.Errorf(fail.ErrTryAgain, "the ADD of container %s did not finish: DEL it and ADD it again", a.ContainerID)
	}
	before := *a
	if mac != nil {
		a.MAC = mac.String()
	}
	if a.MAC != before.MAC && (a.Untrusted || a.SLAAC || a.IPAMType == endpoint.Leased) {
		return fail.Errorf(tombolo.ErrInvalid, "the MAC of interface %s, by which it has its lease or is known on its LAN, cannot be changed from %s to %s: ask for it at its ADD (the capability mac, or args.cni.mac)", a.IfName, before.MAC, a.MAC)
	}
	if mtu > a.MTU && a.MTU > 0 {
		a.MTU = mtu
	}
	if a.MAC == before.MAC && a.MTU == before.MTU {
		return nil
	}
	if err := s.Enter(ctx); err != nil {
		return err
	}
	defer s.Leave()
	if a.MTU != before.MTU {
		if err := s.Links.SetPortMTU(ctx, a.HostIf, a.MTU); err != nil {
			return err
		}
	}
	if a.MAC != before.MAC {
		if err := s.Firewall.Move(ctx, endpoint.Of(&before), endpoint.Of(a)); err != nil {
			return err
		}
	}
	return s.Dir.UpdateLocked(a)
}
