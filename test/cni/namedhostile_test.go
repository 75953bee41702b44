package cni

import (
	"fmt"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
)

// A link has as many alternative names as fit into 64 KiB, and every request for the link is answered with all of them. A
// pod gives them to each of its links; no verb by any name fails for it.
func TestManyNamesOfAPodsLinksStopNoVerb(t *testing.T) {
	t.Parallel()
	const tune = `{"type":"tuning","dataDir":"DATA/t","mtu":1400}`
	const limit = `{"type":"bandwidth","ingressRate":8000000,"ingressBurst":800000,"egressRate":8000000,"egressBurst":800000}`
	publish := portmapping("", `{"hostPort":8080,"containerPort":80,"protocol":"tcp"}`)
	plugins := []string{attackedBridge, tune, publish, `{"type":"firewall","backend":"iptables"}`, limit}
	s := newSide(t, referenceDir(t), append(byName(), "loopback"))
	s.results["a"] = s.chain("ADD", "a", plugins)
	var commands strings.Builder
	for _, link := range []string{"eth0", "lo"} {
		for i := range 496 { // the kernel takes no more of this length
			fmt.Fprintf(&commands, "link property add dev %s altname %s%0123d\n", link, link, i)
		}
	}
	dir := t.TempDir()
	nstest.PutFile(t, dir, "names", commands.String())
	nstest.Run(t, s.of("a").NS, "ip", "-batch", filepath.Join(dir, "names"))

	for i := range plugins {
		s.chain("CHECK", "a", plugins[i:i+1])
	}
	o := s.operate("check", "--state", s.state)
	expect.That(t, o.status == 0, "check: %s%s", o.stdout, o.stderr)
	for _, plugin := range plugins[1:] {
		again := `{"cniVersion":"1.0.0","name":"net","stateDir":"STATE","prevResult":` + s.results["a"] + "," + strings.TrimPrefix(plugin, "{")
		name := regexp.MustCompile(`"type":"([a-z]+)"`).FindStringSubmatch(plugin)[1]
		expect.Success(t, s.call(verb{plugin: name, verb: "ADD", id: "a", conf: again}).err(), "ADD of %s again", name)
	}
	lo := verb{plugin: "loopback", id: "a", ifName: "lo", conf: `{"cniVersion":"1.0.0","name":"lo"}`}
	for _, lo.verb = range []string{"ADD", "CHECK", "DEL"} {
		expect.Success(t, s.call(lo).err(), "%s of lo", lo.verb)
	}
	s.chain("DEL", "a", plugins)
	s.wantUnmapped("after DEL")
	expect.Equal(t, s.run("ip", "-br", "link", "show", "type", "veth")+s.run("ip", "-br", "link", "show", "type", "ifb")+s.files(), "", "DEL leaves")
}
