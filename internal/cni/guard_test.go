package cni

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/ident"
	"github.com/tombolo-cni/tombolo/internal/nl"
	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nltest"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
)

// isGuarded says whether the pod's port is held to its MAC.
func (n *node) isGuarded(t *testing.T) bool {
	t.Helper()
	port := `"veth` + ident.Hash("pods", "c1", "eth0") + `"`
	guarded := nstest.Run(t, n.host, "nft", "list", "set", "bridge", "tombolo", "guarded")
	macs := nstest.Run(t, n.host, "nft", "list", "set", "bridge", "tombolo", "guard-mac")
	return strings.Contains(guarded, port) && strings.Contains(macs, port)
}

// A port that cannot be deleted is shut or stays guarded, and is deleted by the next call that tries.
func TestPortThatStaysIsGuarded(t *testing.T) {
	t.Parallel()
	undeletable := func(n *node, t *testing.T) *Plugin {
		fault := &nltest.Fault{Type: unix.RTM_DELLINK, Errno: unix.ENOBUFS}
		nltest.MustHaveFired(t, fault)
		return n.faulty("host", fault)
	}
	for name, leave := range map[string]func(*testing.T, *node){
		"by a DEL": func(t *testing.T, n *node) {
			n.run(t, n.plugin(), "ADD", everything()).must(t)
			mustHaveFailed(t, n.run(t, undeletable(n, t), "DEL", nil), []uint{codeKernel, codeTryAgainLater}, unix.ENOBUFS.Error())
		},
		"by a DEL that cannot shut it": func(t *testing.T, n *node) {
			n.run(t, n.plugin(), "ADD", everything()).must(t)
			shut := &nltest.Fault{Type: unix.RTM_NEWLINK, Nth: 1, Errno: unix.EPERM}
			nltest.MustHaveFired(t, shut)
			mustHaveFailed(t, n.run(t, n.faulty("host", shut), "DEL", nil), []uint{codeKernel, codeTryAgainLater}, unix.EPERM.Error())
		},
		"by an ADD that undoes itself": func(t *testing.T, n *node) {
			p := undeletable(n, t)
			p.After = func(step string) error {
				if step == "firewall" {
					return unix.EIO
				}
				return nil
			}
			mustHaveFailed(t, n.run(t, p, "ADD", everything()), []uint{codeKernel, codeIO}, unix.EIO.Error(), unix.ENOBUFS.Error())
		},
		"by an ADD that finds what a killed one left": func(t *testing.T, n *node) {
			// Its MAC is another each time.
			bare := map[string]any{"mode": "l2", "ipam": nil, "guard": true}
			n.run(t, n.plugin(), "ADD", bare).must(t)
			must.Succeed(t, os.RemoveAll(filepath.Join(n.stateDir, "attachments", "pods")))
			mustHaveFailed(t, n.run(t, undeletable(n, t), "ADD", bare), []uint{codeKernel, codeTryAgainLater}, unix.ENOBUFS.Error())
		},
	} {
		nstest.RunParallel(t, name, func(t *testing.T) {
			n := newNode(t)
			leave(t, n)
			const noShut = "by a DEL that cannot shut it" // which deletes it in the next step
			there := len(n.ports(t)) > 0
			must.That(t, there != (name == noShut), "the port is there: %t", there)
			// A DEL has shut it.
			if up := strings.Contains(nstest.Run(t, n.host, "ip", "link", "show", "up"), "veth"+ident.Hash("pods", "c1", "eth0")); up == strings.HasPrefix(name, "by a DEL") {
				t.Errorf("the port is up: %t", up)
			} else if (up || name == noShut) && !n.isGuarded(t) {
				t.Error("the guard went while the port was up")
			}
			n.run(t, n.plugin(), "DEL", nil).must(t)
			n.mustHave(t, nothing())
		})
	}
}

// lossy loses the first of the kernel's answers to a transaction that enters a pod, which
// the kernel has carried out.
type lossy struct {
	nl.Transport
	due, fired bool
}

var podsComment = regexp.MustCompile(`tombolo:1:[0-9a-f]{11}:`)

func (l *lossy) Send(b []byte) error {
	l.due = !l.fired && podsComment.Match(b)
	return l.Transport.Send(b)
}

func (l *lossy) Receive(b []byte) (int, error) {
	if l.due {
		l.due, l.fired = false, true
		return 0, unix.ENOBUFS
	}
	return l.Transport.Receive(b)
}

func TestADDThatIsNotToldOfItsElementsLeavesNone(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	var loses *lossy
	p := n.plugin()
	p.Dial = func(protocol int, _ bool) (*nl.Conn, error) {
		socket, err := nl.Open(protocol, nil)
		if err != nil || protocol != unix.NETLINK_NETFILTER {
			return nl.New(socket), err
		}
		loses = &lossy{Transport: socket}
		return nl.New(loses), nil
	}
	mustHaveFailed(t, n.run(t, p, "ADD", everything()), []uint{codeKernel}, unix.ENOBUFS.Error())
	must.That(t, loses != nil && loses.fired, "no answer was lost")
	left := podsComment.FindAllString(nstest.Run(t, n.host, "nft", "list", "ruleset"), -1)
	expect.That(t, len(left) == 0, "%d elements are left", len(left))
}
