package cni

import (
	"fmt"
	"math"
	"strings"
	"testing"

	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
)

// The DEL of a bridge's last host port reads as many datagrams beside kube-proxy's rules for a thousand services as
// without them: it lists the rules of no other table.
func TestDELOfTheLastHostPortListsNoRulesOfOthers(t *testing.T) {
	t.Parallel()
	nstest.Need(t, "strace")
	n := newNode(t)
	w := n.portnet(nil)
	// The fewest of several: events of links may come in between, more or less of them.
	read := func(name string) int {
		fewest := math.MaxInt
		for round := range 3 {
			p := n.pod(fmt.Sprintf("%s%d", name, round))
			w.add(p, publish(t, "8080:80/tcp"))
			must.That(t, nstest.Sysctl(t, n.ns, "net/ipv4/conf/cbr0/route_localnet") == "1",
				"127.0.0.1 does not lead to the port, so its end is not shown")
			fewest = min(fewest, len(n.traced(call{verb: "DEL", id: p.id, netns: p.path, ifName: "eth0", stdin: w.stdin(nil)}, "recvfrom,recvmsg")))
			expect.Equal(t, nstest.Sysctl(t, n.ns, "net/ipv4/conf/cbr0/route_localnet"), "0",
				"the port was not the last one")
		}
		return fewest
	}
	quiet := read("quiet")
	var services strings.Builder
	services.WriteString("*nat\n:KUBE-SERVICES - [0:0]\n")
	for i := range 1000 {
		fmt.Fprintf(&services, ":KUBE-SVC-%d - [0:0]\n-A KUBE-SVC-%[1]d ! -s 10.244.0.0/16 -j MARK --set-mark 0x4000\n-A KUBE-SVC-%[1]d -m statistic --mode random --probability 0.5 -j DNAT -p tcp --to-destination 10.244.%[2]d.%[3]d:8080\n"+
			"-A KUBE-SERVICES -d 10.96.%[2]d.%[3]d/32 -p tcp --dport 80 -m comment --comment t/s%[1]d -j KUBE-SVC-%[1]d\n", i, i>>8, i&255)
	}
	services.WriteString("COMMIT\n")
	dir := t.TempDir()
	nstest.PutFile(t, dir, "services", services.String())
	n.run("iptables-restore", dir+"/services")
	busy := read("busy")
	expect.That(t, busy <= quiet, "DEL reads %d datagrams, and %d beside rules of others", quiet, busy)
}
