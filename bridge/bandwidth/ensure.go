package bandwidth

import (
	"context"
	"errors"
	"fmt"
	"net"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo"
	"github.com/tombolo-cni/tombolo/internal/ident"
	"github.com/tombolo-cni/tombolo/internal/link"
	"github.com/tombolo-cni/tombolo/internal/nl"
	"github.com/tombolo-cni/tombolo/internal/tc"
)

// Conn limits the traffic of ports in one network namespace. It uses the socket of another connection, such as
// bridge.Conn's Socket. Several goroutines may call its methods, but not for the same target at the same time.
type Conn struct{ nl *nl.Conn }

// On returns a Conn that uses an open socket. The socket's owner still has to close it.
func On(s tombolo.Socket) *Conn { return &Conn{nl.Of(s)} }

// Target identifies the port and the ifb of a pod, to limit the pod's traffic.
type Target struct {
	// Port is the name of the host's end of the pod's veth pair. For Remove it may be "" if the port is gone or will
	// be deleted anyway. Everything except the ifb disappears with the port.
	Port string
	// PortIndex is the index of the port. MTU is the port's MTU in bytes. If one of them is 0, the Conn looks up the
	// port by its name, and keeps an MTU that is not 0.
	PortIndex int
	MTU       int

	// IFB is the name of the ifb link for egress: see IFBName. For Remove it may be "" if there is no ifb.
	IFB string
	// Alias is the alias of the ifb, of at most 255 bytes. It marks the owner.
	Alias string
	// Owner is the required prefix of the ifb's alias. If the alias of a link named IFB does not begin with Owner, the
	// Conn does not change this link. An error about this matches ErrForeign. "" accepts any alias.
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

// Ensure limits the traffic of a target, and reports whether it changed anything. It installs the limits that
// s.Effective returns. The caller should show the adjustments from Effective to the operator. In a direction with a
// rate, our shaper replaces any other root qdisc. With a rate of 0, Ensure deletes our shaper, and keeps a qdisc of
// another program.
//
// Existing shapers get the new rates and bursts, and keep their queued packets. If the target had no shaper before and
// Ensure fails, it leaves none. If egress is to be limited and the ifb does not belong to Target.Owner, the error
// matches ErrForeign. If the kernel lacks a feature, it matches ErrNotSupported.
//
// Ensure takes some milliseconds longer if the port is already up. To avoid this, call it in BeforeUp of bridge.Port.
func (c *Conn) Ensure(ctx context.Context, t Target, s Shape) (changed bool, _ error) {
	want, err := c.prepare(&t, s)
	if err != nil {
		return false, err
	}

	have, err := c.look(ctx, &t)
	if err != nil {
		return false, err
	}

	if have.ifb != nil {
		if err := t.checkOwner(have.ifb); err != nil {
			if want.Egress.Rate != 0 {
				return false, err
			}
			have.ifb = nil
		}
	}

	fresh := have.ifb == nil && !have.ingress.Ours() && len(have.own) == 0
	changed, err = c.install(ctx, &t, want, have)
	if err != nil && fresh {
		return false, c.undo(&t, err)
	}

	return changed, err
}

// prepare checks the limits, fills in missing fields of t, and returns the effective limits.
func (c *Conn) prepare(t *Target, s Shape) (Shape, error) {
	err := t.validate()
	if err == nil {
		if err := c.findPort(t); err != nil {
			return Shape{}, err
		}
		s, _, err = s.Effective(t.MTU)
	}

	if err != nil {
		return Shape{}, &tombolo.OpError{Op: "shape", Object: t.Port, Err: err}
	}
	return s, nil
}

// undo removes everything that a failed Ensure created. It uses a context of its own, because the caller's may be
// done. It returns cause, joined with its own error if it fails.
func (c *Conn) undo(t *Target, cause error) error {
	if err := c.Remove(context.Background(), *t); err != nil {
		return errors.Join(cause, fmt.Errorf("undo: %w", err))
	}
	return cause
}

// install makes the ifb, the qdiscs and the filters of the target match want, and reports whether it changed anything.
// It deletes our own parts that want does not need.
func (c *Conn) install(ctx context.Context, t *Target, want Shape, have *installation) (changed bool, _ error) {
	var b nl.Batch
	modules := "sch_tbf"
	if want.Egress.Rate != 0 {
		// The ifb is created in a batch of its own, because qdiscs and filters need its index, which the kernel
		// chooses.
		made, err := c.ensureIFB(ctx, t, have)
		if err != nil {
			return false, err
		}

		changed = made
		modules += ", sch_ingress, cls_u32 and act_mirred"
		if have.place.Kind == "" {
			// Add clsact first. For the first filter of a new clsact, the kernel waits for an RCU grace period,
			// unless one has passed since it was created (mini_qdisc_pair_swap).
			t.port().AddClsact(&b)
		}
	}

	if want.Ingress.Rate != 0 {
		replaceRoot(&b, t.port(), have.ingress, want.Ingress.bucket(t.MTU))
	} else if have.ingress.Ours() {
		t.port().DelQdisc(&b, tc.Root)
	}

	if want.Egress.Rate != 0 {
		t.appendEgress(&b, want.Egress.bucket(t.MTU), have)
	}

	changed = changed || b.Len() > 0
	if err := c.nl.Do(ctx, &b); err != nil {
		return changed, tc.Unsupported(err, modules)
	}

	if want.Egress.Rate != 0 || have.ifb == nil && len(have.own) == 0 {
		return changed, nil
	}

	return true, errors.Join(c.removeRedirect(ctx, t, have), c.removeIFB(ctx, t, have.ifb))
}

// ensureIFB creates the ifb if it does not exist, or corrects the alias of an existing one. A new ifb stays down, and
// ensureIFB stores it in have.ifb.
func (c *Conn) ensureIFB(ctx context.Context, t *Target, have *installation) (changed bool, _ error) {
	if have.ifb != nil && (t.Alias == "" || have.ifb.Alias == t.Alias) {
		return false, nil
	}

	var b nl.Batch
	if have.ifb == nil {
		addIFB(&b, t.IFB, ident.RandomMAC())
	}

	setAlias(&b, t.IFB, t.Alias)
	if err := c.nl.Do(ctx, &b); have.ifb != nil {
		return true, err
	} else if err != nil {
		if b.Err(0) != nil || b.Err(1) == nil {
			return false, tc.Unsupported(err, "ifb")
		}

		// The ifb exists, but could not get its alias. Delete it, since without the alias it does not show its owner.
		b.Reset()
		link.Request{Name: t.IFB}.Delete(&b, t.IFB)
		return false, errors.Join(err, c.nl.Execute(&b))
	}

	index, err := link.IndexOf(c.nl, t.IFB)
	have.ifb = &link.Info{Name: t.IFB, Index: index}
	return true, err
}

// appendEgress appends requests for the missing parts of egress shaping. The filter comes last, because packets that
// it redirects before the ifb is ready would be lost.
func (t *Target) appendEgress(b *nl.Batch, w tc.Bucket, have *installation) {
	replaceRoot(b, tc.Device{Name: t.IFB, Index: have.ifb.Index}, have.egress, w)
	if !have.ifb.Up() {
		// Use the index of the link that got the qdisc. By now, another link may have its name.
		link.Request{Index: have.ifb.Index, Flags: unix.IFF_UP, Change: unix.IFF_UP}.Set(b, "set link up", t.IFB)
	}

	if have.redirects() {
		return
	}

	if len(have.own) > 0 {
		t.port().DelFilters(b, have.own[0].Protocol)
	}
	t.port().AddRedirect(b, have.ifb.Index)
}

// replaceRoot appends requests that make the root qdisc of a link a tbf with the parameters w. If have is such a tbf,
// it appends nothing.
func replaceRoot(b *nl.Batch, device tc.Device, have tc.Qdisc, w tc.Bucket) {
	if have.Is(w) {
		return
	}
	if have.Handle == tc.Handle && have.Kind != "tbf" {
		// The kernel replaces a qdisc that has another handle. If the handles are equal, the kernel tries to change
		// the qdisc, and fails because its kind differs.
		device.DelQdisc(b, tc.Root)
	}
	device.SetTBF(b, w)
}

// ifbMTU is the MTU of an ifb in bytes. It is below the minimum MTU of IPv6 (RFC 8200, section 5). So the kernel does
// not set up IPv6 on the ifb, which saves a third of the time to create it. The MTU does not limit packets through the
// ifb, since they are redirected and not sent.
const ifbMTU = 1279

// addIFB appends a request that creates an ifb, which stays down. The MAC is explicit, so that udev does not change
// it later.
func addIFB(b *nl.Batch, name string, mac net.HardwareAddr) {
	link.Request{Name: name, MAC: mac, MTU: new(ifbMTU), Kind: "ifb"}.Create(b, "add link", name)
}

// setAlias appends a request that sets the alias of the named link. If alias is empty, it appends nothing. The request
// is separate because the kernel ignores an alias in the request that creates a link.
func setAlias(b *nl.Batch, name, alias string) {
	if alias != "" {
		link.Request{Name: name, Alias: &alias}.Set(b, "set link", name)
	}
}

// Remove deletes the limits of a target: the ifb, and all qdiscs and filters that are ours. It is no error if they do
// not exist. Remove continues after errors and joins them. If the ifb does not belong to Target.Owner, Remove keeps
// the ifb, and the error matches ErrForeign.
//
// To delete the port as well, it is faster to delete the port and the ifb together with bridge.Conn.Detach.
func (c *Conn) Remove(ctx context.Context, t Target) error {
	if err := ctx.Err(); err != nil {
		return err
	}

	var errs []error
	if t.Port != "" {
		errs = append(errs, c.removeFromPort(ctx, t))
	}

	if t.IFB == "" {
		return errors.Join(errs...)
	}

	l, err := link.Find(ctx, c.nl, t.IFB, 0)
	if err == nil {
		err = c.removeIFB(ctx, &t, l)
	}

	return errors.Join(append(errs, nl.PassAbsent(err))...)
}

// removeIFB deletes the ifb l, unless l is nil. If checkOwner returns an error, removeIFB keeps the link and returns
// that error.
func (c *Conn) removeIFB(ctx context.Context, t *Target, l *link.Info) error {
	if l == nil {
		return nil
	}
	if err := t.checkOwner(l); err != nil {
		return err
	}
	return link.Delete(ctx, c.nl, l.Index, t.IFB)
}

// removeFromPort deletes our qdiscs and filters at the port.
func (c *Conn) removeFromPort(ctx context.Context, t Target) error {
	t.MTU = max(t.MTU, 1) // the MTU is not used here
	if err := c.findPort(&t); err != nil {
		return nl.PassAbsent(err)
	}

	have, err := c.look(ctx, &t)
	if err != nil {
		return nl.PassAbsent(err)
	}

	var errs []error
	if have.ingress.Ours() {
		var b nl.Batch
		t.port().DelQdisc(&b, tc.Root)
		errs = append(errs, nl.PassAbsent(c.nl.Do(ctx, &b)))
	}

	return errors.Join(append(errs, c.removeRedirect(ctx, &t, have))...)
}

// removeRedirect deletes our filters at the port. It deletes clsact too if no filters of other programs are left.
func (c *Conn) removeRedirect(ctx context.Context, t *Target, have *installation) error {
	var b nl.Batch
	switch {
	case have.place.Kind == "clsact" && have.others == 0:
		t.port().DelQdisc(&b, tc.Clsact)
	case len(have.own) > 0:
		t.port().DelFilters(&b, have.own[0].Protocol)
	default:
		return nil
	}

	return nl.PassAbsent(c.nl.Do(ctx, &b))
}

// IFBs returns the names of all ifb links in the ports' network namespace with their aliases, which name the owners.
// It includes links of other programs. Use it to find ifbs that were left behind. It lists all ifbs, so it takes
// longer with more pods.
func (c *Conn) IFBs(ctx context.Context) (map[string]string, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}

	list := map[string]string{}
	err := link.List(c.nl, "list ifb links", "ifb", 0, func(l *link.Info) {
		if l.Kind == "ifb" { // a kernel without this kind lists all links
			list[l.Name] = l.Alias
		}
	})
	return list, err
}
