package cni

import (
	"testing"

	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
)

func TestAllowlistNamesWhatIsAllowed(t *testing.T) {
	t.Parallel()
	const list = "# what a pod may set\n^net.core.somaxconn$\n\n ^net\\.ipv4\\.conf\\.IFNAME\\.[a-z]+_filter$ \n"
	for key, want := range map[string]bool{"net.core.somaxconn": true, "net.ipv4.conf.IFNAME.arp_filter": true, "net.ipv4.conf.all.arp_filter": false, "xnet.core.somaxconn": false} {
		err := checkAllowlist(list, map[string]string{key: "1"})
		expect.That(t, (err == nil) == want, "%s: %v", key, err)
	}
	expect.Failure(t, checkAllowlist("a(b\n.*", map[string]string{"net.core.somaxconn": "1"}), "what is no pattern allows")
}
