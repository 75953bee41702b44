package lan

import (
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
)

// network is a network of the plugin's on the host.
type network struct {
	*lan
	state, leases string
	conf          object
	by            []string // a command that runs the program; none: nobody
}

// network is what a home-lab user writes, and other fields than that where they are
// given. The state is the test's own, the leases are not renewed, and nobody gives up
// because the machine is busy with other things.
func (l *lan) network(fields object) *network {
	l.Helper()
	dir := l.TempDir()
	n := &network{lan: l, state: filepath.Join(dir, "state"), leases: filepath.Join(dir, "leases")}
	n.conf = object{
		"cniVersion": "1.1.0", "name": "home", "type": "tombolo", "mode": "lan", "uplink": nic,
		"ipam": object{"type": "dhcp", "keeper": "optional"}, "stateDir": n.state, "leaseDir": n.leases,
		"deadline": "5m",
	}
	maps.Copy(n.conf, fields)
	if ipam := n.conf["ipam"].(object); ipam["type"] == "dhcp" && ipam["timeout"] == nil {
		ipam["timeout"] = "2m"
	}
	return n
}

// another is another one of the host's, with other fields.
func (n *network) another(fields object) *network {
	o := *n
	o.conf = maps.Clone(n.conf)
	maps.Copy(o.conf, fields)
	return &o
}

// dualStack is a network whose pods form IPv6 addresses by themselves.
func dualStack(fields object) object {
	all := object{"ipv6": "slaac"}
	maps.Copy(all, fields)
	return all
}

// exec runs a program on the host.
func (n *network) exec(name string, environ []string, stdin []byte, args ...string) (string, error) {
	n.Helper()
	var out, errOut bytes.Buffer
	line := slices.Concat(n.by, []string{program(n, name)}, args)
	cmd := exec.Command(line[0], line[1:]...)
	cmd.Env, cmd.Stdin, cmd.Stdout, cmd.Stderr = append(os.Environ(), environ...), bytes.NewReader(stdin), &out, &errOut
	err := n.host.ns.Do(cmd.Start)
	if err == nil {
		err = cmd.Wait()
	}
	if err != nil {
		err = fmt.Errorf("%w: %s%s", err, &out, &errOut)
	}
	return out.String(), err
}

// operate runs one of the operator's commands, with the network's directories.
func (n *network) operate(command string, args ...string) string {
	n.Helper()
	all := append(strings.Fields(command), "--state", n.state, "--leases", n.leases)
	by := n
	if command == "repair" {
		unit := *n
		unit.by = append(repairUnit(n), n.by...)
		by = &unit
	}
	return must.Of(by.exec("tombolo", nil, nil, append(all, args...)...)).Get(n, "tombolo %s", command)
}

// repairUnit runs a program with the capabilities that the shipped unit leaves it.
func repairUnit(tb testing.TB) []string {
	tb.Helper()
	text := must.Of(os.ReadFile("../../deploy/systemd/tombolo-repair.service")).Get(tb)
	_, line, found := strings.Cut(string(text), "\nCapabilityBoundingSet=")
	line, _, _ = strings.Cut(line, "\n")
	must.That(tb, found && line != "", "the unit has no CapabilityBoundingSet")
	set := "-all"
	for _, name := range strings.Fields(line) {
		set += ",+" + strings.ToLower(strings.TrimPrefix(name, "CAP_"))
	}
	return []string{"setpriv", "--bounding-set=" + set, "--inh-caps=-all", "--ambient-caps=-all"}
}

// pod is a container on the LAN.
type pod struct {
	place
	path, id string
	ifname   string // empty: nic
	result   json.RawMessage
	ports    []object
}

// pod makes a container that has no network as yet. Ports that it publishes are
// written as 8080:80/tcp.
func (l *lan) newPod(id string, ports ...string) *pod {
	l.Helper()
	ns := nstest.New(l)
	p := &pod{place: place{name: id, ns: ns}, path: nstest.Path(l, ns), id: id}
	l.pods = append(l.pods, p)
	// As in every namespace here: see quiet.
	nstest.Sysctl(l, ns, "net/ipv4/tcp_early_retrans", "0")
	for _, port := range ports {
		var host, container int
		var protocol string
		if _, err := fmt.Sscanf(strings.NewReplacer(":", " ", "/", " ").Replace(port), "%d %d %s", &host, &container, &protocol); err != nil {
			l.Fatal(err)
		}
		p.ports = append(p.ports, object{"hostPort": host, "containerPort": container, "protocol": protocol})
	}
	return p
}

// verb calls the plugin as a runtime does.
func (n *network) verb(verb string, p *pod) (string, error) {
	n.Helper()
	conf := maps.Clone(n.conf)
	if len(p.ports) > 0 {
		conf["capabilities"] = object{"portMappings": true}
		conf["runtimeConfig"] = object{"portMappings": p.ports}
	}
	if verb != "ADD" && p.result != nil {
		conf["prevResult"] = p.result
	}
	stdin := must.Of(json.Marshal(conf)).Get(n)
	out, err := n.exec("tombolo-cni", []string{"CNI_COMMAND=" + verb, "CNI_CONTAINERID=" + p.id, "CNI_NETNS=" + p.path, "CNI_IFNAME=" + cmp.Or(p.ifname, nic), "CNI_PATH=/"}, stdin)
	if err != nil {
		err = fmt.Errorf("%s of %s: %w", verb, p.id, err)
	}
	return out, err
}

// add adds a pod and learns its addresses.
func (n *network) add(p *pod) *pod {
	n.Helper()
	out := must.Of(n.verb("ADD", p)).Get(n)
	p.learn(n, out)
	return p
}

// learn takes a pod's addresses from the result of its ADD.
func (p *pod) learn(t testing.TB, out string) {
	t.Helper()
	p.result = json.RawMessage(out)
	var result struct {
		IPs []struct{ Address netip.Prefix }
	}
	unmarshal(t, out, &result)
	for _, ip := range result.IPs {
		if a := ip.Address.Addr(); a.Is4() {
			p.ip4 = a
		} else {
			p.ip6 = a
		}
	}
}

func (n *network) check(p *pod) {
	n.Helper()
	expect.Success(n, expect.Err(n.verb("CHECK", p)))
}

func (n *network) del(p *pod) {
	n.Helper()
	expect.Success(n, expect.Err(n.verb("DEL", p)))
}

// isNoAnswer says that a packet or its answer was dropped without a word.
func isNoAnswer(err error) bool {
	var timeout net.Error
	return errors.As(err, &timeout) && timeout.Timeout()
}
