package cni

import (
	"slices"
	"strings"
	"testing"

	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
)

// links are what a side has of a bridge, of a pod, and of what leads to it: in lines, up to
// names and MACs.
func (s *side) links(bridge string, p *pod) nstest.Snapshot {
	s.Helper()
	const host = `
ip -d -o link show dev cni0 2>/dev/null | grep -o -E 'mtu [0-9]+|promiscuity [0-9]+|,UP|vlan_filtering [0-9]'
ip -o address show dev cni0 scope global 2>/dev/null | sed 's/.*inet/inet/; s/ scope.*//; s/ brd [0-9.]*//; s/ metric [0-9]*//'
ip -o link show master cni0 2>/dev/null | grep -o -E 'mtu [0-9]+|state [A-Z]+' 
bridge -d link show 2>/dev/null | grep -o -E 'hairpin [a-z]+|isolated [a-z]+'
ip route show dev cni0 2>/dev/null; ip -6 route show dev cni0 2>/dev/null | grep -v -E '^(fe80|ff00)'
cd /proc/sys/net
echo forwards $(cat ipv4/conf/cni0/forwarding | sed 's/116/1/') $(cat ipv6/conf/all/forwarding ipv6/conf/cni0/force_forwarding | sort -u | tail -n 1)
echo advertised $(cat /proc/sys/net/ipv6/conf/cni0/accept_ra 2>/dev/null)
true`
	const inPod = `
ip -o link | grep -v ' lo:' | sed -E 's/^[0-9]+: //; s/@[^:]*//; s/(qdisc|link).*//'
ip -o address show scope global | sed 's/^[0-9]*: //; s/ brd [0-9.]*//; s/  */ /g; s/ valid.*//; s/[a-z]*\\//; s/ nodad//'
ip route; ip -6 route | grep -v -E '^(fe80|ff00|multicast)'
true`
	var list nstest.Snapshot
	for where, text := range map[string]string{"host": nstest.Run(s, s.ns, "sh", "-c", strings.ReplaceAll(host, "cni0", bridge)), "pod": nstest.Run(s, p.NS, "sh", "-c", inPod)} {
		for line := range strings.Lines(text) {
			line = strings.Join(strings.Fields(line), " ")
			for _, one := range []string{" proto kernel", " proto static", " proto 116", " onlink", " pref medium", " metric 1024", " metric 256", " linkdown"} {
				line = strings.ReplaceAll(line, one, "")
			}
			list = append(list, where+": "+line)
		}
	}
	return list
}

// With each field of the reference, the bridge by name makes the same of host and pod, says the same,
// and takes the same down.
func TestBridgeByNameIsAsTheReferences(t *testing.T) {
	t.Parallel()
	const local = `"ipam":{"type":"host-local","dataDir":"DATA/n","subnet":"10.5.0.0/24"}`
	const routes = `"ipam":{"type":"host-local","dataDir":"DATA/n","subnet":"10.5.0.0/24","routes":[{"dst":"0.0.0.0/0"},{"dst":"10.9.0.0/16","gw":"10.5.0.9"},{"dst":"10.10.0.0/16","priority":7}]}`
	const both = `"ipam":{"type":"host-local","dataDir":"DATA/n","ranges":[[{"subnet":"fd05::/64"}],[{"subnet":"10.5.0.0/24"}]]}`
	const fixed = `"ipam":{"type":"static","addresses":[{"address":"10.5.0.7/24"},{"address":"fd05::7/64","gateway":"fd05::9"}],"dns":{"nameservers":["10.5.0.1"]}}`
	fields := func(list ...string) string {
		return `{"cniVersion":"1.1.0","name":"net","type":"bridge","stateDir":"STATE","unknown":{"x":1},` + strings.Join(list, ",") + `}`
	}
	for name, tt := range map[string]struct {
		conf    string
		args    string
		prepare string // commands on the host
	}{
		"no gateway":                    {conf: fields(local)},
		"routes of the IPAM":            {conf: fields(routes, `"isGateway":true`)},
		"a gateway":                     {conf: fields(local, `"isGateway":true`)},
		"a default gateway, dual-stack": {conf: fields(both, `"isDefaultGateway":true`)},
		"masquerade by iptables":        {conf: fields(both, `"isGateway":true,"ipMasq":true,"ipMasqBackend":"iptables"`)},
		"MTU, hairpin, isolated ports and detection of duplicates":                  {conf: fields(both, `"mtu":1400,"hairpinMode":true,"portIsolation":true,"enabledad":true`)},
		"promiscuous, masquerade by nftables, and names of fields in small letters": {conf: fields(local, `"promiscMode":true,"isgateway":true,"ipMasq":true,"ipMasqBackend":"nftables"`)},
		"no IPAM":                                   {conf: fields(`"mtu":1400`)},
		"no IPAM, and down":                         {conf: fields(`"disableContainerInterface":true`)},
		"static, and gateways that it has not":      {conf: fields(fixed, `"isDefaultGateway":true`)},
		"a MAC by arguments of the environment":     {conf: fields(local), args: "IgnoreUnknown=1;MAC=02:00:00:00:05:01"},
		"a MAC by the capability":                   {conf: fields(local, `"args":{"cni":{"mac":"02:00:00:00:05:02"}},"runtimeConfig":{"mac":"02:00:00:00:05:03","portMappings":[{"hostPort":80,"containerPort":80}]}`)},
		"what others would read":                    {conf: fields(local, `"dns":{"nameservers":["10.5.0.2"],"search":["a"]},"mode":"lan","uplink":"eth0","ingressPolicy":"isolated","ingressRate":1,"nonMasqueradeCIDRs":["10.0.0.0/8"]`)},
		"a bridge that is there":                    {conf: fields(local, `"isGateway":true`), prepare: "ip link add cni0 type bridge; ip address add fd06::1/64 dev cni0"},
		"an address of a bridge that is in the way": {conf: fields(local, `"isGateway":true,"forceAddress":true`), prepare: "ip link add cni0 type bridge; ip address add 10.5.0.9/24 dev cni0"},
		"hairpin and promiscuous":                   {conf: fields(local, `"hairpinMode":true,"promiscMode":true`)},
		"down, with addresses":                      {conf: fields(local, `"disableContainerInterface":true`)},
		"a VLAN that cannot be":                     {conf: fields(local, `"vlan":4095`)},
		"another link of the bridge's name":         {conf: fields(local), prepare: "ip link add cni0 type ifb"},
		"a field of another type":                   {conf: fields(local, `"isGateway":"yes"`)},
		"masquerade by something else":              {conf: fields(local, `"ipMasq":true,"ipMasqBackend":"ebtables"`)},
		"an IPAM that is not there":                 {conf: fields(`"ipam":{"type":"nowhere"}`)},
		"an IPAM whose range is none":               {conf: fields(`"ipam":{"type":"host-local","dataDir":"DATA/n","subnet":"10.5.0.0/32"}`)},
		"a MAC that is none":                        {conf: fields(local), args: "IgnoreUnknown=1;MAC=02:00"},
		"a version of before":                       {conf: strings.Replace(fields(local, `"isGateway":true`), "1.1.0", "0.4.0", 1)},
	} {
		nstest.RunParallel(t, name, func(t *testing.T) {
			theirs, ours := sides(t)
			var results [2]string
			step := func(what string, v verb) {
				t.Helper()
				v.plugin, v.id, v.args = "bridge", "a", tt.args
				var ends [2]outcome
				for i, s := range []*side{theirs, ours} {
					of := v
					if v.verb == "CHECK" {
						of.conf = strings.TrimSuffix(v.conf, "}") + `,"prevResult":` + results[i] + `}`
					}
					if ends[i] = s.call(of); v.verb == "ADD" {
						results[i] = ends[i].stdout
					}
				}
				agree(t, what, ends[0], ends[1])
				expect.Equal(t, ours.files(), theirs.files(), "%s: the files that the reference leaves", what)
				if v.verb == "CHECK" || v.netns == "-" || ends[0].status != 0 {
					return
				}
				want, got := theirs.links("cni0", theirs.of("a")), ours.links("cni0", ours.of("a"))
				if v.verb == "DEL" { // the reference's bridge goes back to the kernel's MTU with its last port
					isMTU := func(line string) bool { return strings.HasPrefix(line, "host: mtu") }
					want, got = slices.DeleteFunc(want, isMTU), slices.DeleteFunc(got, isMTU)
				}
				if strings.Contains(tt.prepare, "link add cni0 type bridge") { // of a bridge of others it stays (docs/drop-in.md)
					isRA := func(line string) bool { return strings.HasPrefix(line, "host: advertised") }
					expect.That(t, slices.Contains(got, "host: advertised 1"), "%s: accept_ra was changed: %v", what, got)
					want, got = slices.DeleteFunc(want, isRA), slices.DeleteFunc(got, isRA)
				}
				expect.Equal(t, want.Diff(got), "", "%s: what is there (- the reference's, + this one's)", what)
			}
			for _, s := range []*side{theirs, ours} {
				if tt.prepare != "" {
					s.run("sh", "-e", "-c", tt.prepare)
				}
			}
			step("ADD", verb{verb: "ADD", conf: tt.conf})
			if !strings.Contains(results[0], `"interfaces"`) {
				return
			}
			if strings.Contains(tt.conf, `"ipam"`) { // the reference's CHECK fails without one
				step("CHECK", verb{verb: "CHECK", conf: tt.conf})
			}
			step("DEL", verb{verb: "DEL", conf: tt.conf})
			step("DEL again, without a namespace", verb{verb: "DEL", conf: tt.conf, netns: "-"})
		})
	}
}
