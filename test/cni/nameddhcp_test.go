package cni

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/tombolo-cni/tombolo/internal/nstest"
)

// dhcpSide is a side on whose bridge br0 there is a LAN, with dnsmasq in it.
type dhcpSide struct {
	*side
	*lan
	daemon bool // the reference's runs
}

// dhcpSides are two LANs alike: on the one the reference's plugins are at work, with its daemon.
func dhcpSides(t *testing.T, options ...string) (theirs, ours *dhcpSide) {
	t.Helper()
	peers := os.Getenv(peersVar)
	if peers == "" {
		t.Fatal("TOMBOLO_PEERS is not set: make peers builds what this compares with")
	}
	options = append(options, "--dhcp-sequential-ip") // both give the same
	made := func(names []string) *dhcpSide {
		l := newLAN(t, options...)
		return &dhcpSide{l.node.side(peers, names), l, names == nil}
	}
	theirs, ours = made(nil), made([]string{"dhcp"})
	socket := theirs.data + "/dhcp.sock"
	daemon := exec.Command(filepath.Join(theirs.programs, "dhcp"), "daemon", "-socketpath", socket, "-resendtimeout", "20s")
	if err := theirs.side.ns.Do(daemon.Start); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		daemon.Process.Kill()
		daemon.Wait()
	})
	theirs.eventually(t, func() bool { _, err := os.Stat(socket); return err == nil })
	return theirs, ours
}

// plug gives a pod of the side's an interface on the LAN, as another plugin would.
func (s *dhcpSide) plug(id string) {
	p := s.of(id)
	s.side.ip("link add v" + id + " type veth peer name eth0 address " + macOf(id) + " netns " + p.path)
	s.side.ip("link set v" + id + " master br0 up")
	// The reference loses its first message on a link that it sets up itself, and repeats it after 10 s.
	if s.daemon {
		nstest.Run(s.side, p.NS, "ip", "link", "set", "eth0", "up")
		s.eventually(s.side, func() bool {
			return strings.Contains(nstest.Run(s.side, s.side.ns, "bridge", "link", "show", "dev", "v"+id), "state forwarding")
		})
	}
}

// macOf is the MAC of a pod of that name.
func macOf(id string) string { return fmt.Sprintf("02:00:00:00:00:%02x", id[0]-'a'+1) }

// heard is what the server was told by pods, in the order of its log.
func (s *dhcpSide) heard(t *testing.T) []string {
	t.Helper()
	words := regexp.MustCompile(`(requested options: .*|client provides name: .*|vendor class: .*|user class: .*|DHCP(DISCOVER|OFFER|REQUEST|ACK|NAK|DECLINE)\(.*)$`)
	var list []string
	for line := range strings.Lines(readFileIf(t, s.log)) {
		if m := words.FindString(strings.TrimSpace(line)); m != "" {
			list = append(list, m)
		}
	}
	return list
}

const dhcpFields = `"stateDir":"STATE","leaseDir":"STATE-leases","unknown":1`

func dhcpConf(version, ipam string, more ...string) string {
	return fmt.Sprintf(`{"cniVersion":%q,"name":"net","type":"macvlan",%s,"ipam":{"type":"dhcp","daemonSocketPath":"DATA/dhcp.sock","keeper":"optional"%s}%s}`,
		version, dhcpFields, ipam, strings.Join(append([]string{""}, more...), ","))
}

// On an interface that is there, dhcp by name ends as the reference's does with its daemon, says the
// same, and tells the server the same.
func TestDHCPByNameIsAsTheReferences(t *testing.T) {
	t.Parallel()
	routes := []string{"--dhcp-option-force=121,10.9.0.0/16,192.168.50.9,10.8.0.0/16,0.0.0.0,0.0.0.0/0," + router4}
	for name, tt := range map[string]struct {
		server []string
		steps  []verb
	}{
		"an address, its release, and the next": {nil, []verb{
			{conf: dhcpConf("1.0.0", ""), verb: "ADD", id: "a"}, {conf: dhcpConf("1.0.0", ""), verb: "ADD", id: "a"}, {conf: dhcpConf("1.0.0", ""), verb: "CHECK", id: "a"},
			{conf: dhcpConf("1.0.0", ""), verb: "ADD", id: "b"}, {conf: dhcpConf("1.0.0", ""), verb: "DEL", id: "a"}, {conf: dhcpConf("1.0.0", ""), verb: "DEL", id: "a"},
			{conf: dhcpConf("1.1.0", ""), verb: "ADD", id: "c"}, {conf: dhcpConf("1.1.0", ""), verb: "DEL", id: "b", netns: "-"},
		}},
		"versions": {nil, []verb{
			{conf: dhcpConf("0.1.0", ""), verb: "ADD", id: "a"}, {conf: dhcpConf("0.2.0", ""), verb: "ADD", id: "a"}, {conf: dhcpConf("0.3.1", ""), verb: "ADD", id: "a"},
			{conf: dhcpConf("0.4.0", ""), verb: "ADD", id: "a"}, {conf: dhcpConf("9.0.0", ""), verb: "ADD", id: "a"}, {conf: dhcpConf("1.1.0", ""), verb: "VERSION", id: "a"},
			{conf: dhcpConf("0.3.1", ""), verb: "CHECK", id: "a"}, {conf: dhcpConf("1.1.0", ""), verb: "STATUS", id: "a"},
			{conf: dhcpConf("1.1.0", "", `"cni.dev/valid-attachments":[{"containerID":"a","ifname":"eth0"}]`), verb: "GC", id: "a"}, {conf: dhcpConf("1.1.0", ""), verb: "DEL", id: "a"},
		}},
		"classless routes, with a metric": {routes, []verb{{conf: dhcpConf("1.0.0", `,"priority":77`), verb: "ADD", id: "a"}, {conf: dhcpConf("1.0.0", ""), verb: "DEL", id: "a"}}},
		"static routes": {[]string{"--dhcp-option-force=33,10.0.0.0,192.168.50.9"}, []verb{
			{conf: dhcpConf("1.0.0", ""), verb: "ADD", id: "a"},
		}},
		"no router": {[]string{"--dhcp-option=3"}, []verb{{conf: dhcpConf("1.0.0", ""), verb: "ADD", id: "a"}}},
		"what is requested and provided": {nil, []verb{
			{conf: dhcpConf("1.0.0", `,"request":[{"option":"6"},{"option":"host-name"}],"provide":[{"option":"host-name","value":"printer"},{"option":"vendor-class-identifier","fromArg":"CLASS"},{"option":"77","fromArg":"NONE"}]`), verb: "ADD", id: "a", args: "CLASS=red;FOO=1"},
			{conf: dhcpConf("1.0.0", `,"request":[{"skipDefault":true},{"option":"1"}],"provide":[{"option":"host-name","value":"one","fromArg":"NAME"},{"option":"dhcp-client-identifier","value":"lamp"}]`), verb: "ADD", id: "b", args: "NAME=two;K8S_POD_NAME=web"},
			{conf: dhcpConf("1.0.0", `,"request":[{"option":"colour"}]`), verb: "ADD", id: "c"}, {conf: dhcpConf("1.0.0", `,"provide":[{"option":"300","value":"x"}]`), verb: "ADD", id: "c"},
			{conf: dhcpConf("1.0.0", `,"provide":[{"option":"60","value":"`+strings.Repeat("x", 256)+`"}]`), verb: "ADD", id: "c"},
		}},
		"no interface": {nil, []verb{{conf: dhcpConf("1.0.0", ""), verb: "ADD", id: "a", ifName: "eth7"}, {conf: dhcpConf("1.0.0", ""), verb: "DEL", id: "a", ifName: "eth7"}, {conf: dhcpConf("1.0.0", ""), verb: "ADD", id: "a", netns: "/run/netns/none"}}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			theirs, ours := dhcpSides(t, tt.server...)
			for _, id := range []string{"a", "b", "c"} {
				theirs.plug(id)
				ours.plug(id)
			}
			released := false
			for i, v := range tt.steps {
				v.plugin = "dhcp"
				what := fmt.Sprintf("step %d, %s of %s", i, v.verb, v.id)
				agree(t, what, theirs.call(v), ours.call(v))
				if v.verb == "DEL" {
					// The server does not take the reference's RELEASE for one.
					released = true
					ours.wantReleased(t, addressOf(t, ours, v.id))
				}
				if a, b := held(t, theirs), held(t, ours); !released && a != b {
					t.Fatalf("%s: the reference's server holds\n%s\nand this one's\n%s", what, a, b)
				}
			}
			if a, b := told(theirs.heard(t)), told(ours.heard(t)); !slices.Equal(a, b) {
				t.Errorf("the reference tells the server\n%s\nand this one\n%s", strings.Join(a, "\n"), strings.Join(b, "\n"))
			}
		})
	}
}

// held is what dnsmasq holds, but for when it ends.
func held(t *testing.T, s *dhcpSide) string {
	t.Helper()
	return regexp.MustCompile(`(?m)^\d+ `).ReplaceAllString(s.leased(), "")
}

// addressOf is what the server leases to the side's pod of a name.
func addressOf(t *testing.T, s *dhcpSide, id string) string {
	t.Helper()
	for line := range strings.Lines(held(t, s)) {
		if f := strings.Fields(line); f[0] == macOf(id) {
			return f[1]
		}
	}
	return "none"
}

// told leaves out what may come twice: messages of a client to a slow server, and what is said of them.
func told(list []string) []string {
	var short []string
	for _, one := range list {
		if !slices.Contains(short, one) {
			short = append(short, one)
		}
	}
	slices.Sort(short)
	return short
}

// The bridge by name leases in process, as the reference's does by its plugin.
func TestBridgeByNameLeasesAsTheReferences(t *testing.T) {
	t.Parallel()
	theirs, ours := dhcpSides(t, "--dhcp-option=option:dns-server,192.168.50.53", "--dhcp-option=option:mtu,1400")
	if err := os.Remove(filepath.Join(ours.programs, "bridge")); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(plugin(), filepath.Join(ours.programs, "bridge")); err != nil {
		t.Fatal(err)
	}
	for _, fields := range []string{"", `"request":[{"option":"42"}],"priority":7,"provide":[{"option":"host-name","value":"printer"}]`} {
		id := fmt.Sprint("pod-", len(fields))
		conf := strings.Replace(dhcpConf("1.0.0", strings.TrimSuffix(","+fields, ",")), `"type":"macvlan"`, `"type":"bridge","bridge":"br0"`, 1)
		add := verb{plugin: "bridge", verb: "ADD", id: id, conf: conf, args: "IgnoreUnknown=1;K8S_POD_NAMESPACE=default;K8S_POD_NAME=web"}
		agree(t, "ADD with "+fields, theirs.call(add), ours.call(add))
		if a, b := identities(t, theirs), identities(t, ours); a != b {
			t.Errorf("%s: the reference's server holds\n%s\nand this one's\n%s", fields, a, b)
		}
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
