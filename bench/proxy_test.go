package bench

import (
	"bytes"
	"crypto/sha256"
	"encoding/base32"
	"fmt"
	"math/rand/v2"
	"os/exec"
	"regexp"
	"slices"
	"testing"
	"time"

	"github.com/tombolo-cni/tombolo/internal/testutil/must"
)

// proxied is what kube-proxy does on a node, in its mode iptables. Empty: it is not there.
type proxied string

const (
	unchanged proxied = "unchanged" // its rules are there
	changed   proxied = "changed"   // and have changed since the last ADD
	changing  proxied = "changing"  // and begin to change up to so long before an ADD as that takes
)

// services are those that kube-proxy knows, of two endpoints each.
const services = 1000

// proxyStart is what kube-proxy sees to once, and calls its chains by.
const proxyStart = `*filter
:INPUT ACCEPT [0:0]
:OUTPUT ACCEPT [0:0]
:KUBE-EXTERNAL-SERVICES - [0:0]
:KUBE-FIREWALL - [0:0]
:KUBE-FORWARD - [0:0]
:KUBE-NODEPORTS - [0:0]
:KUBE-PROXY-CANARY - [0:0]
:KUBE-PROXY-FIREWALL - [0:0]
:KUBE-SERVICES - [0:0]
-A INPUT -m conntrack --ctstate NEW -m comment --comment "kubernetes load balancer firewall" -j KUBE-PROXY-FIREWALL
-A INPUT -m comment --comment "kubernetes health check service ports" -j KUBE-NODEPORTS
-A INPUT -m conntrack --ctstate NEW -m comment --comment "kubernetes externally-visible service portals" -j KUBE-EXTERNAL-SERVICES
-A INPUT -j KUBE-FIREWALL
-A FORWARD -m conntrack --ctstate NEW -m comment --comment "kubernetes load balancer firewall" -j KUBE-PROXY-FIREWALL
-A FORWARD -m comment --comment "kubernetes forwarding rules" -j KUBE-FORWARD
-A FORWARD -m conntrack --ctstate NEW -m comment --comment "kubernetes service portals" -j KUBE-SERVICES
-A FORWARD -m conntrack --ctstate NEW -m comment --comment "kubernetes externally-visible service portals" -j KUBE-EXTERNAL-SERVICES
-A OUTPUT -m conntrack --ctstate NEW -m comment --comment "kubernetes load balancer firewall" -j KUBE-PROXY-FIREWALL
-A OUTPUT -m conntrack --ctstate NEW -m comment --comment "kubernetes service portals" -j KUBE-SERVICES
-A OUTPUT -j KUBE-FIREWALL
-A KUBE-FIREWALL ! -s 127.0.0.0/8 -d 127.0.0.0/8 -m comment --comment "block incoming localnet connections" -m conntrack ! --ctstate RELATED,ESTABLISHED,DNAT -j DROP
COMMIT
*nat
:PREROUTING ACCEPT [0:0]
:OUTPUT ACCEPT [0:0]
:POSTROUTING ACCEPT [0:0]
:KUBE-KUBELET-CANARY - [0:0]
:KUBE-MARK-MASQ - [0:0]
:KUBE-NODEPORTS - [0:0]
:KUBE-POSTROUTING - [0:0]
:KUBE-PROXY-CANARY - [0:0]
:KUBE-SERVICES - [0:0]
-A PREROUTING -m comment --comment "kubernetes service portals" -j KUBE-SERVICES
-A OUTPUT -m comment --comment "kubernetes service portals" -j KUBE-SERVICES
-A POSTROUTING -m comment --comment "kubernetes postrouting rules" -j KUBE-POSTROUTING
COMMIT
*mangle
:KUBE-KUBELET-CANARY - [0:0]
:KUBE-PROXY-CANARY - [0:0]
COMMIT
`

// proxyShared and proxySharedNAT are what each sync writes but for services, whose chains are declared between them.
const proxyShared = `*filter
:KUBE-NODEPORTS - [0:0]
:KUBE-SERVICES - [0:0]
:KUBE-EXTERNAL-SERVICES - [0:0]
:KUBE-FIREWALL - [0:0]
:KUBE-FORWARD - [0:0]
:KUBE-PROXY-FIREWALL - [0:0]
-A KUBE-FIREWALL -m comment --comment "block incoming localnet connections" -d 127.0.0.0/8 ! -s 127.0.0.0/8 -m conntrack ! --ctstate RELATED,ESTABLISHED,DNAT -j DROP
-A KUBE-FORWARD -m conntrack --ctstate INVALID -j DROP
-A KUBE-FORWARD -m comment --comment "kubernetes forwarding rules" -m mark --mark 0x4000/0x4000 -j ACCEPT
-A KUBE-FORWARD -m comment --comment "kubernetes forwarding conntrack rule" -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT
COMMIT
*nat
:KUBE-NODEPORTS - [0:0]
:KUBE-SERVICES - [0:0]
:KUBE-POSTROUTING - [0:0]
:KUBE-MARK-MASQ - [0:0]
`

const proxySharedNAT = `-A KUBE-POSTROUTING -m mark ! --mark 0x4000/0x4000 -j RETURN
-A KUBE-POSTROUTING -j MARK --xor-mark 0x4000
-A KUBE-POSTROUTING -m comment --comment "kubernetes service traffic requiring SNAT" -j MASQUERADE --random-fully
-A KUBE-MARK-MASQ -j MARK --or-mark 0x4000
`

// proxyNodePorts ends KUBE-SERVICES.
const proxyNodePorts = `-A KUBE-SERVICES -m comment --comment "kubernetes service nodeports; NOTE: this must be the last rule in this chain" ! -d 127.0.0.0/8 -m addrtype --dst-type LOCAL -j KUBE-NODEPORTS
`

// proxyService are the chains of one, by the numbers of its name and addresses.
type proxyService struct{ number, moved int }

func (s proxyService) name() string { return fmt.Sprintf("default/service-%d:http", s.number) }

func (s proxyService) address() string {
	return fmt.Sprintf("10.96.%d.%d", s.number/250, s.number%250+1)
}

// endpoints are a service's; its first moves with each sync.
func (s proxyService) endpoints() []string {
	return []string{
		fmt.Sprintf("10.244.%d.%d", s.number/250, (s.number+s.moved)%250+1),
		fmt.Sprintf("10.245.%d.%d", s.number/250, s.number%250+1),
	}
}

// proxyChain is a chain's name as kube-proxy makes it.
func proxyChain(prefix string, of ...string) string {
	sum := sha256.Sum256(fmt.Append(nil, of))
	return prefix + base32.StdEncoding.EncodeToString(sum[:])[:16]
}

// portal is a service's rule in KUBE-SERVICES.
func (s proxyService) portal(b *bytes.Buffer) {
	fmt.Fprintf(b, "-A KUBE-SERVICES -m comment --comment \"%s cluster IP\" -m tcp -p tcp -d %s --dport 80 -j %s\n",
		s.name(), s.address(), proxyChain("KUBE-SVC-", s.name()))
}

// declare names its chains, which flushes them.
func (s proxyService) declare(b *bytes.Buffer) {
	fmt.Fprintf(b, ":%s - [0:0]\n", proxyChain("KUBE-SVC-", s.name()))
	for _, endpoint := range s.endpoints() {
		fmt.Fprintf(b, ":%s - [0:0]\n", proxyChain("KUBE-SEP-", s.name(), endpoint))
	}
}

// write fills its chains.
func (s proxyService) write(b *bytes.Buffer) {
	chain, endpoints := proxyChain("KUBE-SVC-", s.name()), s.endpoints()
	fmt.Fprintf(b, "-A %s -m comment --comment \"%s cluster IP\" -m tcp -p tcp -d %s --dport 80 ! -s 10.88.0.0/16 -j KUBE-MARK-MASQ\n", chain, s.name(), s.address())
	for i, endpoint := range endpoints {
		own, share := proxyChain("KUBE-SEP-", s.name(), endpoint), ""
		if left := len(endpoints) - i; left > 1 {
			share = fmt.Sprintf("-m statistic --mode random --probability %.10f ", 1/float64(left))
		}
		fmt.Fprintf(b, "-A %s -m comment --comment \"%s -> %s:8080\" %s-j %s\n", chain, s.name(), endpoint, share, own)
		fmt.Fprintf(b, "-A %s -m comment --comment %s -s %s -j KUBE-MARK-MASQ\n", own, s.name(), endpoint)
		fmt.Fprintf(b, "-A %s -m comment --comment %s -m tcp -p tcp -j DNAT --to-destination %s:8080\n", own, s.name(), endpoint)
	}
}

// proxySync is what kube-proxy gives iptables-restore once an endpoint of the first service has moved so many times. Where
// it is not all, that is the chains which all services share, anew, and those of the services that differ.
func proxySync(moved int, all bool) []byte {
	var chains, rules bytes.Buffer
	for i := range services {
		s := proxyService{number: i}
		if i == 0 {
			s.moved = moved
		}
		s.portal(&rules)
		if i == 0 || all {
			s.declare(&chains)
			s.write(&rules)
		}
	}
	rules.WriteString(proxyNodePorts)
	if moved > 0 {
		before := proxyService{moved: moved - 1}
		gone := proxyChain("KUBE-SEP-", before.name(), before.endpoints()[0])
		fmt.Fprintf(&chains, ":%s - [0:0]\n", gone)
		fmt.Fprintf(&rules, "-X %s\n", gone)
	}
	return slices.Concat([]byte(proxyShared), chains.Bytes(), []byte(proxySharedNAT), rules.Bytes(), []byte("COMMIT\n"))
}

// addProxy has a node's iptables know the services.
func (n *node) addProxy(tb testing.TB) {
	tb.Helper()
	must.Succeed(tb, n.restore([]byte(proxyStart)))
	must.Succeed(tb, n.restore(proxySync(0, true)))
}

// proxyTakes is how long a sync does; for a third of it the kernel carries out no other transaction.
const proxyTakes = 100 * time.Millisecond

// disturb has kube-proxy follow an endpoint that has moved, if it does so on the node. What it gives waits for that.
func (c *comparison) disturb(n *node) (wait func() error) {
	done := make(chan error, 1)
	wait = func() error { return <-done }
	if n.proxy != changed && n.proxy != changing {
		done <- nil
	} else {
		n.syncs++
		go func() { done <- n.restore(proxySync(n.syncs, false)) }()
	}
	switch {
	case !c.proxy:
	case n.proxy == changing:
		time.Sleep(rand.N(proxyTakes))
	default: // what the kernel frees after a change is over, too
		err := wait()
		rest()
		done <- err
	}
	return wait
}

func (n *node) restore(rules []byte) error {
	cmd := exec.Command("iptables-restore", "-w", "5", "--noflush", "--counters")
	cmd.Stdin = bytes.NewReader(rules)
	return n.host.Do(func() error {
		if out, err := cmd.CombinedOutput(); err != nil {
			return fmt.Errorf("iptables-restore: %w: %s", err, out)
		}
		return nil
	})
}

// withoutProxy leaves kube-proxy's chains out of a listing: they change by themselves.
func withoutProxy(ruleset string) string {
	return regexp.MustCompile(`(?s)\tchain KUBE-.*?\n\t}\n`).ReplaceAllString(ruleset, "")
}

// besideServices are the plugin on nodes with kube-proxy and without.
func besideServices() []contender {
	list := []contender{tombolo()}
	for _, how := range []proxied{unchanged, changed, changing} {
		c := tombolo()
		c.name, c.proxy = c.name+"-"+string(how), how
		list = append(list, c)
	}
	return list
}
