package cni

import (
	"context"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
)

// TestCnitool goes through the reference's command-line runtime, with all paths at
// their defaults: in a mount namespace whose /run and /var/lib are empty.
func TestCnitool(t *testing.T) {
	t.Parallel()
	for _, program := range []string{"unshare", "nsenter", "bash"} {
		nstest.Need(t, program)
	}
	n := newNode(t)
	server := nstest.Serve(t, n.outside(), "tcp", netip.MustParseAddrPort(outside4+":0"))
	p := n.pod("a")
	confDir := t.TempDir()
	list := conf{"cniVersion": "1.1.0", "name": "podnet", "plugins": []conf{{"type": "tombolo", "ipam": dualStack()}}}
	must.Succeed(t, os.WriteFile(filepath.Join(confDir, "10-podnet.conflist"), marshal(t, list), 0o600))
	script := `
		mount -t tmpfs none /run
		mount -t tmpfs none /var/lib
		PATH=$CNI_PATH:$PATH
		cnitool status podnet $POD
		cnitool add podnet $POD
		cnitool check podnet $POD
		test -n "$(ls /run/tombolo/attachments/podnet)"
		$TOMBOLO ls | grep -q 10.77.0.2 && echo LISTED
		nsenter --net=$POD bash -c 'exec 3<>/dev/tcp/$SERVER; printf ? >&3; echo SEEN AS $(cat <&3)'
		cnitool del podnet $POD
		cnitool del podnet $POD
		test -z "$(ls /run/tombolo/attachments/podnet)"
		CNI_IFNAME=net1 cnitool add podnet $POD >/dev/null
		cnitool gc podnet $POD
		test -z "$(ls /run/tombolo/attachments/podnet)"
		$TOMBOLO remove podnet
		echo DONE
	`
	environ := append(os.Environ(), "CNI_PATH="+cniPath, "NETCONFPATH="+confDir, "POD="+p.path, "TOMBOLO="+command(),
		fmt.Sprintf("SERVER=%s/%d", server.Addr(), server.Port()))
	unshare := must.Of(exec.LookPath("unshare")).Get(t)
	o := must.Of(n.exec(context.Background(), unshare, nil, environ, "--mount", "bash", "-ec", script)).Get(t)
	for _, part := range []string{`"address": "10.77.0.2/24"`, `"address": "fd77::2/64"`, "LISTED", "SEEN AS " + uplink4, "DONE"} {
		expect.Contains(t, o.stdout, part)
	}
	expect.That(t, !t.Failed() && o.status == 0 && o.stderr == "",
		"exit status %d\n%s\n%s", o.status, o.stdout, o.stderr)
	n.wantNothing()
}
