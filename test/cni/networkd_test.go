package cni

import (
	"context"
	"fmt"
	"os"
	"strings"
	"testing"

	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
)

const networkd = "/lib/systemd/systemd-networkd"

// What docs/lan.md says of systemd-networkd: without the files a restart takes the NIC off the
// bridge and configures it anew; with them it touches neither; by others it makes the bridge itself.
func TestNetworkdLeavesATakenNICAloneByTheFilesInTheDocs(t *testing.T) {
	t.Parallel()
	if _, err := os.Stat(networkd); err != nil {
		if os.Getenv("TOMBOLO_ALLOW_SKIPS") == "1" {
			t.Skip("needs systemd-networkd")
		}
		t.Fatalf("needs systemd-networkd (package systemd): %v", err)
	}
	files := map[bool]string{} // by whether they make the bridge
	for _, b := range docBlocks(t) {
		if b.page == "docs/lan.md" && strings.Contains(b.text, "/systemd/network/") {
			files[strings.Contains(b.text, "Kind=bridge")] = b.text
		}
	}
	must.That(t, len(files) == 2, "docs/lan.md has not two blocks of files below systemd/network")
	const take = `"$TOMBOLO" uplink take eth0 br0`
	for _, tt := range []struct {
		name, first, files, until, want string
	}{
		{"without the files", take, "", "ip -4 -o address show dev eth0 | grep -q 192.168.50.10", "off the bridge"},
		{"with the files", take, files[false], "true", "on the bridge"},
		{"a bridge of the system's, after a boot", "ip address flush dev eth0", strings.Replace(files[true], "DHCP=yes", "Address=192.168.50.10/24", 1), "has br0 192.168.50.10", "on the bridge"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			nstest.Need(t, "unshare")
			n := newNode(t)
			script := fmt.Sprintf(networkdScript, tt.first, tt.files, tt.until)
			environ := append(os.Environ(), "TOMBOLO="+command(), "NETWORKD="+networkd)
			o, err := n.exec(context.Background(), "/usr/bin/unshare", nil, environ,
				"--mount", "--pid", "--fork", "--mount-proc", "--kill-child", "bash", "-c", script)
			must.Succeed(t, err)
			expect.That(t, o.status == 0 && strings.HasSuffix(o.stdout, "eth0 is "+tt.want+"\n"),
				"want %q; status %d\n%s\n%s", tt.want, o.status, o.stdout, o.stderr)
		})
	}
}

// networkd believes that there is no udev where /sys is read-only. It is through with what it
// finds when it has configured the last link, probe0.
const networkdScript = `set -eu
mount -t tmpfs none /run
mount -t tmpfs none /var/lib
mount -t tmpfs none /etc/systemd/network
mount -t sysfs -o ro none /sys
mkdir -p /run/systemd/netif/leases /run/systemd/netif/links /run/systemd/network
chown -R systemd-network: /run/systemd/netif
ip link set lo up
ip netns add router
ip link add eth0 type veth peer name eth0 netns router
ip -n router address add 192.168.50.1/24 dev eth0
ip -n router link set eth0 up
ip link add probe0 type veth peer name probe1
printf '[Match]\nName=eth0\n[Network]\nAddress=192.168.50.10/24\nGateway=192.168.50.1\nLinkLocalAddressing=no\n' >/etc/systemd/network/10-eth0.network
printf '[Match]\nName=probe0\n[Network]\nAddress=192.0.2.1/24\nConfigureWithoutCarrier=yes\n' >/etc/systemd/network/90-probe0.network
has() { ip -4 -o address show dev "$1" | grep -q "$2"; }
begin() {
	"$NETWORKD" >/dev/null 2>&1 &
	networkd=$!
	until has probe0 192.0.2.1; do sleep 0.05; done
}
begin
until has eth0 192.168.50.10; do sleep 0.05; done
%s
to=/dev/null
while read -r line; do
	case $line in
	'# /'*) to=${line#'# '} ;;
	*) echo "$line" >>"$to" ;;
	esac
done <<'EOF'
%s
EOF
kill $networkd
wait $networkd || true
ip address flush dev probe0
begin
until %s; do sleep 0.05; done
if ip -o link show dev eth0 | grep -q 'master br0' && has br0 192.168.50.10 && ! has eth0 192.168.50.10; then
	"$TOMBOLO" uplink status
	echo eth0 is on the bridge
else
	echo eth0 is off the bridge
fi
kill $networkd
wait $networkd || true
`
