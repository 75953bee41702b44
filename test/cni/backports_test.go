package cni

import (
	"net/netip"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
)

// After going back, the last of Tombolo's pods with a host port takes the way from 127.0.0.1 with it. What
// docs/drop-in.md says then gives it back to the reference's pods.
func TestTheWayFrom127GoesWithTheLastPodAfterGoingBack(t *testing.T) {
	t.Parallel()
	for _, backend := range []string{"iptables", "nftables"} {
		nstest.RunParallel(t, backend, func(t *testing.T) {
			s := newSide(t, referenceDir(t), nil)
			main := `{"type":"bridge","isGateway":true,"ipam":{"type":"host-local","dataDir":"DATA/n","subnet":"10.5.0.0/24","routes":[{"dst":"0.0.0.0/0"}]}}`
			list := func(port string) []string {
				return []string{main, portmapping(`,"backend":"`+backend+`"`, `{"hostPort":`+port+`,"containerPort":80,"protocol":"tcp"}`)}
			}
			answers := func(port uint16) error {
				_, err := nstest.AskWithin(t, s.ns, "tcp", netip.AddrPortFrom(nstest.Addr("127.0.0.1"), port), 5*time.Second)
				return err
			}
			must.Succeed(t, s.operate("install", "--names", "all", s.programs).err(), "install")
			s.chain("ADD", "a", list("8081"))
			s.of("a").serve(t, "tcp", 80)
			must.Succeed(t, answers(8081))
			must.Succeed(t, s.operate("install", "--undo", s.programs).err(), "undo")
			_, err := os.Stat(filepath.Join(s.programs, "bridge.reference"))
			must.That(t, err != nil, "the reference's plugins have not got their names back")
			s.chain("ADD", "b", list("8082"))
			s.of("b").serve(t, "tcp", 80)
			must.Succeed(t, answers(8082))
			s.chain("DEL", "a", list("8081"))
			vanish(t, s.of("a").path)
			must.Succeed(t, s.operate("gc", "--state", s.state).err(), "gc")
			must.Succeed(t, s.remove("net").err(), "remove")
			expect.Equal(t, nstest.Sysctl(t, s.ns, "net/ipv4/conf/cni0/route_localnet"), "0", "with the last port, route_localnet is")
			nstest.Sysctl(t, s.ns, "net/ipv4/conf/cni0/route_localnet", "1")
			expect.Success(t, answers(8082), "as the document says")

			s.chain("DEL", "b", list("8082"))
			must.Succeed(t, s.operate("install", "--names", "all", s.programs).err(), "install")
			nstest.Sysctl(t, s.ns, "net/ipv4/conf/cni0/route_localnet", "0")
			s.chain("ADD", "c", list("8083"))
			got := nstest.Sysctl(t, s.ns, "net/ipv4/conf/cni0/route_localnet")
			must.That(t, got == "1", "with a port, route_localnet is %s", got)
			s.chain("DEL", "c", list("8083"))
			expect.Equal(t, nstest.Sysctl(t, s.ns, "net/ipv4/conf/cni0/route_localnet"), "0", "after the last DEL route_localnet is")
		})
	}
}
