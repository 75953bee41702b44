package cni

import (
	"context"
	"os"
	"strings"
	"testing"

	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
)

// TestNetworkManagersLeavePodsAlone runs real network managers that configure every link by DHCP and router
// advertisements, beside a pod that serves both. The pod does not become the host's server or router, and pods stay on
// their bridge when the manager starts again.
func TestNetworkManagersLeavePodsAlone(t *testing.T) {
	t.Parallel()
	for _, program := range []string{"unshare", "dnsmasq", "NetworkManager", "dhcpcd", "dbus-daemon"} {
		nstest.Need(t, program)
	}
	line := ""
	for _, b := range docBlocks(t) {
		if b.page == "docs/operating.md" && strings.Contains(b.text, "denyinterfaces ") {
			line = strings.TrimSpace(b.text)
		}
	}
	must.That(t, line != "", "docs/operating.md has no denyinterfaces line for dhcpcd")
	const networkdFile = "cp $DEPLOY/networkd/05-tombolo.network /etc/systemd/network/"
	for _, tt := range []struct{ name, manager, keepOff, bridge, want string }{
		// From its first start it has no file of ours, and from the second that which the first ADD wrote.
		{"systemd-networkd without our file", "networkd", "", "cbr0", "pods on their bridge"},
		{"systemd-networkd without our file, another bridge", "networkd", "", "pods0", "pods on their bridge"},
		{"systemd-networkd", "networkd", networkdFile, "cbr0", "pods on their bridge, nothing differs"},
		{"NetworkManager", "nm", "cp $DEPLOY/NetworkManager/10-tombolo.conf /etc/NetworkManager/conf.d/", "cbr0", "pods on their bridge, nothing differs"},
		{"dhcpcd", "dhcpcd", "echo '" + line + "' >>/run/dhcpcd.conf", "cbr0", "pods on their bridge, nothing differs"},
		{"dhcpcd without the line in the docs", "dhcpcd", "", "cbr0", "told"},
	} {
		nstest.RunParallel(t, tt.name, func(t *testing.T) {
			n := newNode(t)
			environ := append(os.Environ(), "TOMBOLO="+command(), "PLUGIN="+plugin(), "DEPLOY="+must.Of(os.Getwd()).Get(t)+"/../../deploy",
				"NETWORKD=/lib/systemd/systemd-networkd", "MANAGER="+tt.manager, "KEEP_OFF="+tt.keepOff, "BRIDGE="+tt.bridge)
			o, err := n.exec(context.Background(), "/usr/bin/unshare", nil, environ,
				"--mount", "--pid", "--fork", "--mount-proc", "--kill-child", "bash", "testdata/managers.sh")
			must.Succeed(t, err)
			expect.That(t, o.status == 0 && strings.HasSuffix(o.stdout, tt.want+"\n"), "want %q; status %d\n%s\n%s", tt.want, o.status, o.stdout, o.stderr)
		})
	}
}
