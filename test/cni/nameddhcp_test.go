package cni

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
)

// dhcpSide is a side on whose bridge br0 there is a LAN, with dnsmasq in it.
type dhcpSide struct {
	*side
	*lan
}

// dhcpSides are two LANs alike: on the one the reference's plugins are at work, with its daemon.
func dhcpSides(t *testing.T, options ...string) (theirs, ours *dhcpSide) {
	t.Helper()
	peers := os.Getenv(peersVar)
	must.That(t, peers != "", "TOMBOLO_PEERS is not set: make peers builds what this compares with")
	options = append(options, "--dhcp-sequential-ip") // both give the same
	made := func(names []string) *dhcpSide {
		l := newLAN(t, options...)
		return &dhcpSide{l.node.side(peers, names), l}
	}
	theirs, ours = made(nil), made([]string{"bridge"})
	socket := theirs.data + "/dhcp.sock"
	daemon := exec.Command(filepath.Join(theirs.programs, "dhcp"), "daemon", "-socketpath", socket, "-resendtimeout", "20s")
	must.Succeed(t, theirs.side.ns.Do(daemon.Start))
	t.Cleanup(func() {
		daemon.Process.Kill()
		daemon.Wait()
	})
	theirs.eventually(t, func() bool { _, err := os.Stat(socket); return err == nil })
	return theirs, ours
}

const dhcpFields = `"stateDir":"STATE","leaseDir":"STATE-leases","unknown":1`

func dhcpConf(version, ipam string, more ...string) string {
	return fmt.Sprintf(`{"cniVersion":%q,"name":"net","type":"macvlan",%s,"ipam":{"type":"dhcp","daemonSocketPath":"DATA/dhcp.sock","keeper":"optional"%s}%s}`,
		version, dhcpFields, ipam, strings.Join(append([]string{""}, more...), ","))
}

// held is what dnsmasq holds, but for when it ends.
func held(t *testing.T, s *dhcpSide) string {
	t.Helper()
	return regexp.MustCompile(`(?m)^\d+ `).ReplaceAllString(s.leased(), "")
}

// The bridge by name leases in process, as the reference's does by its plugin.
func TestBridgeByNameLeasesAsTheReferences(t *testing.T) {
	t.Parallel()
	theirs, ours := dhcpSides(t, "--dhcp-option=option:dns-server,192.168.50.53", "--dhcp-option=option:mtu,1400")
	for _, fields := range []string{"", `"request":[{"option":"42"}],"priority":7,"provide":[{"option":"host-name","value":"printer"}]`} {
		id := fmt.Sprint("pod-", len(fields))
		conf := strings.Replace(dhcpConf("1.0.0", strings.TrimSuffix(","+fields, ",")), `"type":"macvlan"`, `"type":"bridge","bridge":"br0"`, 1)
		add := verb{plugin: "bridge", verb: "ADD", id: id, conf: conf, args: "IgnoreUnknown=1;K8S_POD_NAMESPACE=default;K8S_POD_NAME=web"}
		agree(t, "ADD with "+fields, theirs.call(add), ours.call(add))
		a, b := identities(t, theirs), identities(t, ours)
		expect.That(t, a == b, "%s: the reference's server holds\n%s\nand this one's\n%s", fields, a, b)
	}
	del := verb{plugin: "bridge", verb: "DEL", id: "pod-0", conf: strings.Replace(dhcpConf("1.0.0", ""), `"type":"macvlan"`, `"type":"bridge","bridge":"br0"`, 1)}
	agree(t, "DEL", theirs.call(del), ours.call(del))
	ours.wantReleased(t, "192.168.50.100")
}

// identities are the addresses, names and client identifiers of what dnsmasq holds.
func identities(t *testing.T, s *dhcpSide) string {
	t.Helper()
	return regexp.MustCompile(`(?m)^\S+ `).ReplaceAllString(held(t, s), "")
}

// Once all names have changed over, the reference's daemon leases for interfaces of the reference's as before, since dhcp
// is no name of ours; for the bridge's pods, the bridge leases itself.
func TestTheReferencesDHCPStaysWithItsDaemon(t *testing.T) {
	t.Parallel()
	s, _ := dhcpSides(t)
	o := s.side.operate("install", "--names", "all", s.programs)
	must.That(t, o.status == 0 && !strings.Contains(o.stdout, "dhcp"), "install: %+v", o)
	for _, plugin := range []string{"macvlan", "bridge"} {
		link := map[string]string{"macvlan": `"master":"br0"`, "bridge": `"bridge":"br0"`}[plugin]
		conf := strings.Replace(dhcpConf("1.0.0", ""), `"type":"macvlan"`, `"type":"`+plugin+`",`+link, 1)
		o := s.call(verb{plugin: plugin, verb: "ADD", id: plugin, conf: conf})
		address := regexp.MustCompile(`192\.168\.50\.1\d\d`).FindString(o.stdout)
		if o.status != 0 || address == "" || !strings.Contains(held(t, s), address) {
			t.Errorf("ADD by %s: %+v, and the server holds\n%s", plugin, o, held(t, s))
		}
		records, err := filepath.Glob(s.side.state + "-leases/*.json")
		expect.That(t, err == nil && len(records) > 0 == (plugin == "bridge"),
			"%s: records of leases: %q, %v", plugin, records, err)
		expect.Success(t, s.call(verb{plugin: plugin, verb: "DEL", id: plugin, conf: conf}).err(), "DEL by %s", plugin)
	}
}
