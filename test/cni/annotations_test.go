package cni

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/containernetworking/cni/libcni"
	current "github.com/containernetworking/cni/pkg/types/100"

	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
)

const (
	podAnnotations = "io.kubernetes.cri.pod-annotations"
	ourPrefix      = "tombolo-cni.github.io/"
)

// asPod is what containerd and CRI-O say of a Kubernetes pod, with its annotations: ours without the prefix, others' as they are.
func asPod(name string, annotations map[string]string) option {
	all := map[string]string{"kubernetes.io/config.source": "api", "kubectl.kubernetes.io/last-applied-configuration": `{"annotations":{"` + ourPrefix + `mac":"x"}}`}
	for k, v := range annotations {
		if !strings.Contains(k, "/") {
			k = ourPrefix + k
		}
		all[k] = v
	}
	namespace, name, _ := strings.Cut(name, "/")
	return func(rt *libcni.RuntimeConf) {
		rt.Args = [][2]string{{"IgnoreUnknown", "1"}, {"K8S_POD_NAMESPACE", namespace}, {"K8S_POD_NAME", name}, {"K8S_POD_INFRA_CONTAINER_ID", rt.ContainerID}, {"K8S_POD_UID", "7"}}
		if rt.CapabilityArgs == nil {
			rt.CapabilityArgs = map[string]any{}
		}
		rt.CapabilityArgs[podAnnotations] = &all // CRI-O passes a pointer, containerd the map
	}
}

// annotating is a network of the node's whose pods may have these annotations.
func annotating(settings ...string) conf {
	return conf{"annotations": settings, "capabilities": conf{podAnnotations: true, "bandwidth": true, "mac": true, "ips": true, "egressPolicy": true}}
}

func TestPodsAreWhatTheirAnnotationsSay(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	fields := annotating("ips", "mac", "bandwidth", "egressPolicy")
	fields["_"] = "a comment"
	w := n.podnet(fields)
	many := map[string]string{"example.com/binary": "\xff\x00\x01", "example.com/huge": strings.Repeat("x", 200<<10), "Tombolo/ips": "x", "tombolo-cni.github.io": "x"}
	for i := range 5000 {
		many[fmt.Sprintf("example.com/a%d", i)] = "x"
	}
	record := func(p *pod) (r struct {
		MAC, Egress string
		Bandwidth   struct{ Ingress struct{ Rate int } }
	}) {
		lines := strings.Split(strings.TrimSpace(w.recordOf(p)), "\n")
		unmarshal(t, lines[len(lines)-1], &r)
		return r
	}
	all := map[string]string{"ips": "10.77.0.77, fd77::77", "mac": "02:00:5e:00:00:07", "bandwidth": `{"ingressRate": 8000000}`, "egressPolicy": "replies"}
	for i, tt := range []struct {
		name                  string
		annotations           map[string]string
		more                  option // what the runtime passes besides
		ip4, ip6, mac, egress string
		rate                  int
	}{
		{"none", nil, nil, "10.77.0.2", "fd77::2", "", "", 0},
		{"others'", many, nil, "10.77.0.3", "fd77::3", "", "", 0},
		{"another network's", map[string]string{"other.ips": "x", "other.net.mac": "x", "podnet.x.mac": "x"}, nil, "10.77.0.4", "fd77::4", "", "", 0},
		{"all", all, nil, "10.77.0.77", "fd77::77", all["mac"], "replies", 8000000},
		{"lists", map[string]string{"ips": `["10.77.0.78", "fd77::78"]`, "egressPolicy": `["public", "10.9.0.0/16 tcp 5432"]`}, nil, "10.77.0.78", "fd77::78", "", "public, 10.9.0.0/16 tcp 5432", 0},
		{"this network before all", map[string]string{"ips": "10.99.0.1", "podnet.ips": "10.77.0.79,fd77::79", "podnet.mac": "02:00:5e:00:00:09"}, nil, "10.77.0.79", "fd77::79", "02:00:5e:00:00:09", "", 0},
		{"runtime before annotation", all, func(rt *libcni.RuntimeConf) {
			maps.Copy(rt.CapabilityArgs, map[string]any{"mac": "02:00:5e:00:00:0a", "bandwidth": conf{"ingressRate": 9000000}, "egressPolicy": "public"})
		}, "10.77.0.77", "fd77::77", "02:00:5e:00:00:0a", "public", 9000000},
		{"one address of each", map[string]string{"ips": "fd77::80"}, func(rt *libcni.RuntimeConf) { rt.CapabilityArgs["ips"] = []string{"10.77.0.80"} }, "10.77.0.80", "fd77::80", "", "", 0},
	} {
		p := n.pod(fmt.Sprintf("p%d", i))
		options := []option{asPod("a/"+p.id, tt.annotations)}
		if tt.more != nil {
			options = append(options, tt.more)
		}
		r := w.add(p, options...)
		got := record(p)
		expect.Equal(t, ip4(r).String()+" "+ip6(r).String(), tt.ip4+" "+tt.ip6, "%s: addresses", tt.name)
		expect.Equal(t, strings.HasPrefix(got.Egress, tt.egress) && (got.Egress == "") == (tt.egress == ""), true, "%s: egress %q", tt.name, got.Egress)
		expect.Equal(t, got.Bandwidth.Ingress.Rate, tt.rate, "%s: rate", tt.name)
		if tt.mac != "" {
			expect.Equal(t, got.MAC, tt.mac, "%s: MAC", tt.name)
		}
		expect.Success(t, w.check(p, options...), "%s: CHECK", tt.name)
		w.del(p, options...)
	}

	// A runtime passes null for a pod without annotations.
	p := n.pod("null")
	w.add(p, func(rt *libcni.RuntimeConf) { rt.CapabilityArgs = map[string]any{podAnnotations: nil} })
	w.del(p)
	n.wantNothing()
}

func TestAnnotationsThatAPodMayNotHave(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	for name, tt := range map[string]struct {
		permitted  []string
		key, value string
		code       uint
		says       string
	}{
		"not permitted":              {nil, "ips", "10.77.0.7", 7, `to permit it in network "podnet", add "ips" to "annotations"`},
		"not permitted here":         {nil, "podnet.mac", "02:00:5e:00:00:07", 7, `add "mac"`},
		"only others are":            {[]string{"mac"}, "egressPolicy", "all", 7, `add "egressPolicy"`},
		"DHCPs without DHCP":         {nil, "hostName", "x", 7, `add "hostName"`},
		"unknown":                    {[]string{"ips"}, "ip", "10.77.0.7", 7, `is not known: after "tombolo-cni.github.io/" use one of`},
		"other case":                 {[]string{"ips"}, "IPs", "10.77.0.7", 7, "is not known"},
		"prefix of another case":     {[]string{"ips"}, "Tombolo-CNI.github.io/ips", "10.77.0.7", 7, `annotation "Tombolo-CNI.github.io/ips" is not known`},
		"nothing after the prefix":   {[]string{"ips"}, ourPrefix, "", 7, "is not known"},
		"no address":                 {[]string{"ips"}, "ips", "localhost", 7, "not an IP address"},
		"no address of the network":  {[]string{"ips"}, "ips", "10.78.0.7", 7, "is in no range of it"},
		"the gateway":                {[]string{"ips"}, "ips", gateway4, 7, "is a gateway"},
		"two of one range":           {[]string{"ips"}, "ips", "10.77.0.7,10.77.0.8", 7, "gives one address"},
		"empty":                      {[]string{"ips"}, "ips", " ", 7, "is empty"},
		"an empty list":              {[]string{"ips"}, "ips", "[]", 7, "a text, or a list of texts"},
		"numbers":                    {[]string{"ips"}, "ips", "[7]", 7, "a text, or a list of texts"},
		"half a list":                {[]string{"ips"}, "ips", `["10.77.0.7"`, 7, "is not valid JSON"},
		"another setting behind it":  {[]string{"ips"}, "ips", `["10.77.0.7"],"mac":"02:00:5e:00:00:07"`, 7, "is not valid JSON"},
		"nested deeply":              {[]string{"bandwidth"}, "bandwidth", strings.Repeat("[", 100000), 7, "is not valid JSON"},
		"huge":                       {[]string{"mac"}, "mac", strings.Repeat("x", 250<<10), 7, "is not the MAC of one interface"},
		"binary":                     {[]string{"ips"}, "ips", "\xff\x00\x1b[2J", 7, "not an IP address"},
		"multicast":                  {[]string{"mac"}, "mac", "01:00:5e:00:00:07", 7, "is not the MAC of one interface"},
		"a MAC that Tombolo derives": {[]string{"mac"}, "mac", "0a:58:0a:4d:00:02", 7, "may be another pod's"},
		"an object for a MAC":        {[]string{"mac"}, "mac", `{"a": 1}`, 7, "expected a string"},
		"a text for limits":          {[]string{"bandwidth"}, "bandwidth", "10M", 7, "expected an object"},
		"a wrong limit":              {[]string{"bandwidth"}, "bandwidth", `{"ingressRate": 1}`, 7, "bandwidth of annotation"},
		"an unknown limit":           {[]string{"bandwidth"}, "bandwidth", `{"ingresRate": 8000}`, 2, `did you mean "ingressRate"`},
		"a limit twice":              {[]string{"bandwidth"}, "bandwidth", `{"ingressRate": 8000, "ingressRate": 9000}`, 7, "given twice"},
		"no callers":                 {[]string{"publishFrom"}, "publishFrom", "10.0.0.0/33", 7, "no prefix"},
		"no policy":                  {[]string{"egressPolicy"}, "egressPolicy", "open", 7, "open"},
	} {
		w, p := n.podnet(annotating(tt.permitted...)), n.pod("p"+strings.ReplaceAll(name, " ", "-"))
		if tt.permitted == nil {
			w = w.with(conf{"annotations": nil})
		}
		_, err := w.tryAdd(p, asPod("a/x", map[string]string{tt.key: tt.value}))
		if tt.code != 0 && err == nil {
			w.del(p)
		}
		wantError(t, err, tt.code, tt.says)
		if key := tt.key; err != nil && key != ourPrefix {
			expect.Contains(t, err.Error(), strings.TrimPrefix(key, ourPrefix), "%s", name)
			expect.That(t, len(err.Error()) < 2000, "%s: an error of %d bytes", name, len(err.Error()))
		}
		// Without the capability the runtime passes none, and DEL heeds none.
		expect.Success(t, w.tryDel(p, asPod("a/x", map[string]string{tt.key: tt.value})), "%s: DEL", name)
	}
	n.wantNothing()
}

// Annotations that are permitted let a pod take nothing that another pod has.
func TestAnnotationsTakeNothingFromOtherPods(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	w, other := n.podnet(annotating("ips", "mac")), n.network("other", annotating("mac")).with(conf{"ipam": hostLocal("10.78.0.0/24")})
	victim, mac := n.pod("victim"), "02:00:5e:00:00:07"
	ask := func(setting, value string) option { return asPod("evil/x", map[string]string{setting: value}) }
	w.add(victim, asPod("good/victim", map[string]string{"ips": "10.77.0.7,fd77::7", "mac": mac}))
	for setting, values := range map[string][]string{"ips": {"10.77.0.7", "fd77::7", "::ffff:10.77.0.7"}, "mac": {mac, "02-00-5E-00-00-07"}} {
		for _, value := range values {
			_, err := w.tryAdd(n.pod("thief"), ask(setting, value))
			wantError(t, err, map[string]uint{"ips": 101, "mac": 112}[setting], ourPrefix+setting)
			expect.Contains(t, fmt.Sprint(err), "victim", "whose it is")
		}
	}
	_, err := other.tryAdd(n.pod("thief"), ask("mac", mac))
	wantError(t, err, 112, "container victim on bridge cbr0")
	_, err = w.tryAdd(n.pod("thief"), ask("mac", nstest.MAC(t, n.ns, "cbr0")))
	wantError(t, err, 112, "belongs to bridge cbr0")
	w.del(victim)

	// At once at most one gets the MAC.
	pods, got := n.pods(6), make([]*current.Result, 6)
	var wg sync.WaitGroup
	for i, p := range pods {
		wg.Go(func() { got[i], _ = w.tryAdd(p, ask("mac", mac)) })
	}
	wg.Wait()
	expect.That(t, len(slices.DeleteFunc(got, func(r *current.Result) bool { return r == nil })) <= 1, "two pods have one MAC")
	for _, p := range pods {
		w.del(p)
	}
	// It is free again, also if its pod died without a DEL.
	dead := n.pod("dead")
	w.add(dead, ask("mac", mac))
	w.kills(t, dead)
	w.add(victim, ask("mac", mac))
	w.del(dead)
	w.del(victim)
	n.wantNothing()
}

// A pod's client identifier is one of its own namespace, so no pod gets another's lease.
func TestDHCPKnowsPodsByTheirAnnotations(t *testing.T) {
	t.Parallel()
	l := newLAN(t)
	w := l.network(annotating("clientID", "hostName", "mac"))
	ask := func(pod, id string) option {
		return asPod(pod, map[string]string{"clientID": id, "hostName": "printer-" + id[:1]})
	}
	add := func(p *pod, pod, id string) netip.Addr { return ip4(w.add(p, ask(pod, id))) }
	first := l.pod("first")
	address := add(first, "good/db-5f7-x", "db")
	expect.Contains(t, l.leased(), " "+address.String()+" printer-d ")
	expect.Contains(t, l.leased(), clientIDOf("good/db/lan/eth0"))
	for _, id := range []string{"db", "good.db"} { // another tenant's
		p := l.pod("thief" + id)
		expect.That(t, add(p, "evil/x", id) != address, "%s: two pods have %s", id, address)
		w.del(p)
	}
	for _, id := range []string{"../good/db", "good/db", "db/lan", "", "d b", strings.Repeat("x", 300)} {
		_, err := w.tryAdd(l.pod("forger"), asPod("evil/x", map[string]string{"clientID": id}))
		wantError(t, err, 7, ourPrefix+"clientID")
		if id != "" {
			_, err = w.tryAdd(l.pod("forger"), asPod("evil/x", map[string]string{"hostName": id}))
			wantError(t, err, 7, ourPrefix+"hostName")
		}
	}
	// Of its own namespace's pods one at a time has the address, and the next gets it again.
	second := l.pod("second")
	expect.That(t, add(second, "good/db-5f7-y", "db") != address, "two pods have %s", address)
	w.del(second)
	w.del(first)
	again := add(first, "good/db-5f7-x", "db")
	w.del(first)
	expect.Equal(t, add(second, "good/db-5f7-y", "db"), again, "the next pod's address")
	w.del(second)
	l.wantNothing()
}

// clientIDOf is option 61 as dnsmasq writes it.
func clientIDOf(text string) string {
	var b strings.Builder
	for _, c := range []byte("\x00" + text) {
		fmt.Fprintf(&b, ":%02x", c)
	}
	return b.String()[1:]
}

// A pod of a StatefulSet gets its address again, whatever came between.
func TestPodsKeepTheirAddressesByTheirNames(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	ipam := hostLocal("10.77.0.0/29", subnet6) // five addresses of IPv4
	ipam["keep"] = true
	fields := annotating("ips")
	fields["ipam"] = ipam
	w := n.podnet(fields)
	next := 0
	run := func(name string) (*pod, string) {
		next++
		p := n.pod(fmt.Sprintf("c%d", next))
		r := w.add(p, asPod(name, nil))
		return p, ip4(r).String() + " " + ip6(r).String()
	}
	end := func(p *pod) { w.del(p) }
	db, addresses := run("x/db-0")
	end(db)
	for range 3 { // jobs with names of their own
		p, got := run(fmt.Sprintf("x/job-%d", next))
		expect.That(t, strings.Fields(got)[0] != strings.Fields(addresses)[0], "a job has db-0's address %s", got)
		end(p)
	}

	// Another namespace's pod of the name is another, as one that asks for its address is.
	other, got := run("y/db-0")
	expect.That(t, got != addresses, "a pod of another namespace has %s", got)
	_, err := w.tryAdd(n.pod("thief"), asPod("y/thief", map[string]string{"ips": strings.Fields(addresses)[0]}))
	wantError(t, err, 101, "is kept for x/db-0 eth0")
	old, got := run("x/db-0")
	expect.Equal(t, got, addresses, "db-0 again")

	// The old pod's DEL comes after the new one's ADD.
	young, moved := run("x/db-0")
	expect.That(t, moved != addresses, "two pods have %s", moved)
	end(old)
	end(old)
	expect.Success(t, w.check(young, asPod("x/db-0", nil)))
	w.gc(young, other)
	expect.Success(t, w.check(young, asPod("x/db-0", nil)))
	end(young)
	again, got := run("x/db-0")
	expect.Equal(t, got, moved, "the last address of db-0")
	end(young) // a runtime may repeat a DEL
	expect.Success(t, w.check(again, asPod("x/db-0", nil)))

	// GC, and a runtime that restarts, lose nothing. A full range takes what was released first.
	w.gc()
	again, got = run("x/db-0")
	expect.Equal(t, got, moved, "after GC")
	end(again)
	var full []*pod
	for i := range 4 {
		p, got := run(fmt.Sprintf("x/full-%d", i))
		expect.That(t, got != moved, "a range with other free addresses gives %s", got)
		full = append(full, p)
	}
	expect.Success(t, w.status(), "STATUS while a pod that is gone keeps the last address")
	p, got := run("x/needs")
	expect.Equal(t, strings.Fields(got)[0], strings.Fields(moved)[0], "the last address of all")
	_, err = w.tryAdd(n.pod("late"), asPod("x/db-0", nil))
	wantError(t, err, 100, "is full")
	for _, p := range append(full, p) {
		end(p)
	}
	_, err = w.tryAdd(n.pod("nameless"))
	wantError(t, err, 7, "the pod needs a name (K8S_POD_NAMESPACE and K8S_POD_NAME)")
	n.wantNothing()
}
