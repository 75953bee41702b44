package cni

import (
	"fmt"
	"path/filepath"
	"testing"

	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
)

// What a pod puts in its interface's place may be a link that nobody can delete, or one that the kernel says more of than
// fits into an answer. The DEL of the list does not fail for it.
func TestALinkInTheInterfacesPlaceStopsNoDEL(t *testing.T) {
	t.Parallel()
	const tune = `{"type":"tuning","dataDir":"DATA/t","mtu":1400}`
	much := "link add link aside name eth0 type macvlan mode source\n"
	for i := range 1600 {
		much += fmt.Sprintf("link set eth0 type macvlan macaddr add 02:00:00:00:%02x:%02x\n", i>>8, i&0xff)
	}
	for i := range 496 { // the kernel takes no more of this length
		much += fmt.Sprintf("link property add dev eth0 altname n%0126d\n", i)
	}
	for name, commands := range map[string]string{
		"lo renamed":                 "link set lo down\nlink set lo name eth0",
		"lo by an alternative name":  "link property add dev lo altname eth0",
		"a link with many MACs":      much,
		"one that takes no such MTU": "link set aside mtu 1300\nlink add link aside name eth0 type macvlan",
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := newSide(t, referenceDir(t), byName())
			plugins := []string{attackedBridge, tune}
			s.chain("ADD", "a", plugins)
			dir := t.TempDir()
			nstest.PutFile(t, dir, "commands", "link set eth0 down\nlink set eth0 name aside\n"+commands)
			nstest.Run(t, s.of("a").NS, "ip", "-batch", filepath.Join(dir, "commands"))
			s.chain("DEL", "a", plugins)
			expect.Equal(t, s.run("ip", "-br", "link", "show", "type", "veth"), "", "DEL leaves")
			expect.Equal(t, s.files(), "", "DEL leaves")
		})
	}
}
