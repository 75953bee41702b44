package cni

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"maps"
	"math"
	"math/rand/v2"
	"net/netip"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/containernetworking/cni/libcni"
	"github.com/containernetworking/cni/pkg/types"

	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
	"github.com/tombolo-cni/tombolo/netns"
)

// documented is a list of plugins, as it stands in the documentation of a program that calls plugins.
type documented struct {
	file   string              // in testdata/dropin
	source string              // where it stands
	change func(string) string // what the case has otherwise; nil for the list as it stands
	bridge string
	subnet string // of its IPv4 pods; that of the other network differs in the second number
	dual   bool
	called string // bridge-nf-call-iptables and -ip6tables, as the program's documentation wants them
	before string // commands on the host
}

func (d *documented) text(t testing.TB) string {
	t.Helper()
	data := must.Of(os.ReadFile(filepath.Join("testdata", "dropin", d.file))).Get(t)
	if d.change != nil {
		return d.change(string(data))
	}
	return string(data)
}

// machine is a node on which programs find a list's plugins, and their /run and /var/lib empty.
type machine struct {
	*side
	*documented
	out *netns.NS
	// The list's network and another, each with its pods' addresses by ID.
	nets [2]*libcni.NetworkConfigList
	at   map[string][]netip.Addr
	said []string // what the verbs ended with
}

// newMachine makes one with the reference's plugins, some of which Tombolo replaces by its own command.
func newMachine(t testing.TB, d *documented, ours []string) *machine {
	t.Helper()
	m := &machine{side: newSide(t, referenceDir(t), nil), documented: d, at: map[string][]netip.Addr{}}
	m.root = t.TempDir()
	for _, dir := range []string{"run", "lib"} {
		must.Succeed(t, os.Mkdir(filepath.Join(m.root, dir), 0o755))
	}
	if len(ours) > 0 {
		o := m.operate("install", "--names", strings.Join(ours, ","), m.programs)
		must.That(t, o.status == 0, "install: %s%s", o.stdout, o.stderr)
	}
	m.cache = filepath.Join(t.TempDir(), "cache")
	m.cni = libcni.NewCNIConfigWithCacheDir([]string{m.programs}, m.cache, &execIn{node: m.node})
	text := d.text(t)
	first := strings.Split(d.subnet, ".")
	other := strings.NewReplacer(`"name": "`, `"name": "other-`, `"`+d.bridge+`"`, `"other0"`, first[0]+"."+first[1]+".", first[0]+".199.", "4860::", "4861::")
	for i, text := range []string{text, other.Replace(text)} {
		m.nets[i] = must.Of(libcni.ConfListFromBytes([]byte(text))).Get(t)
	}
	for _, name := range []string{"iptables", "ip6tables"} {
		nstest.Sysctl(t, m.ns, "net/bridge/bridge-nf-call-"+name, d.called)
	}
	nstest.Sysctl(t, m.ns, "net/ipv6/conf/default/accept_dad", "0") // the reference does not wait for it on the host
	m.out = m.outside()
	m.ip("link set eth0 mtu 1400") // other than a bridge's
	for network, port := range map[string]uint16{"tcp": 80, "udp": 53} {
		nstest.Serve(t, m.out, network+"4", netip.AddrPortFrom(nstest.Addr(outside4), port))
		nstest.Serve(t, m.out, network+"6", netip.AddrPortFrom(nstest.Addr(outside6), port))
	}
	nstest.Run(t, m.out, "ip", "route", "add", first[0]+".0.0.0/8", "via", uplink4)
	nstest.Run(t, m.out, "ip", "-6", "route", "add", "2001:db8:4860::/46", "via", uplink6)
	m.run("sh", "-e", "-c", "true\n"+d.before)
	return m
}

// The pods: two of the list's network, one of another, one of which the runtime forgets, and one that comes last.
const podA, podB, podElsewhere, podStale, podLate = "a", "b", "elsewhere", "stale", "late"

func (m *machine) list(id string) *libcni.NetworkConfigList {
	if id == podElsewhere {
		return m.nets[1]
	}
	return m.nets[0]
}

// runtime is what the program says of a pod, ports and limits included.
func (m *machine) runtime(id string) *libcni.RuntimeConf {
	ports := map[string][]string{
		podA:         {"8080:80/tcp", "5300:53/udp", uplink4 + ":8181:80/tcp", "0.0.0.0:8383:80/tcp", "127.0.0.1:8484:80/tcp"},
		podElsewhere: {"9090:80/tcp"},
		podStale:     {"7070:80/tcp"},
	}
	options := []option{publish(m, ports[id]...)}
	if m.dual && id == podA {
		options = []option{publish(m, append(ports[id], uplink6+":8282:80/tcp", ":::8585:80/tcp")...)}
	}
	if id == podA {
		options = append(options, func(rt *libcni.RuntimeConf) {
			rt.CapabilityArgs["bandwidth"] = map[string]any{"ingressRate": 80000000, "ingressBurst": 800000, "egressRate": 40000000, "egressBurst": 400000}
		})
	}
	return m.of(id).runtime(options)
}

// verb calls a verb, and notes how it ended.
func (m *machine) verb(what string, err error) {
	m.Helper()
	text := "succeeds"
	if err != nil {
		text = "fails: " + err.Error()
	}
	m.said = append(m.said, "verb: "+what+" "+text)
}

func (m *machine) add(id string) {
	m.Helper()
	res, err := m.cni.AddNetworkList(context.Background(), m.list(id), m.runtime(id))
	m.verb("ADD of "+id, err)
	if err != nil {
		return
	}
	var b bytes.Buffer
	must.Succeed(m, res.PrintTo(&b))
	m.results[id] = strings.ReplaceAll(b.String(), m.of(id).path, "POD")
	for _, text := range regexp.MustCompile(`"address": *"([^"/]+)/`).FindAllStringSubmatch(b.String(), -1) {
		m.at[id] = append(m.at[id], nstest.Addr(text[1]))
	}
	for _, at := range []struct {
		network string
		port    int
	}{{"tcp", 80}, {"udp", 53}} {
		m.of(id).serve(m, at.network, at.port)
	}
}

// up adds the pods, and says what is there.
func (m *machine) up() nstest.Snapshot {
	m.Helper()
	for _, id := range []string{podA, podB, podElsewhere, podStale} {
		m.add(id)
	}
	list := m.links(m.bridge, m.of(podA))
	for _, id := range []string{podA, podElsewhere} {
		list = list.Plus("result of " + id + ": " + regexp.MustCompile(`"(ifb|bwp)[0-9a-f]+"`).ReplaceAllString(said(m, m.results[id]), "IFB"))
	}
	for line := range strings.Lines(m.shapers()) {
		list = list.Plus("limit: " + strings.TrimSpace(line))
	}
	for where, ns := range map[string]*netns.NS{"host": m.ns, "pod": m.of(podA).NS} {
		names := "all default lo eth0 " + m.bridge
		for line := range strings.Lines(nstest.Run(m, ns, "sh", "-c", `
cd /proc/sys/net
for name in `+names+`; do grep -sr . ipv4/conf/$name ipv6/conf/$name ipv4/neigh/$name ipv6/neigh/$name; done | grep -v -e stable_secret
grep -sr . bridge ipv4/ip_forward
true`)) {
			list = list.Plus("parameter of the " + where + ": " + strings.TrimSpace(line))
		}
	}
	return list
}

// probe is a call: from where to which address and port.
type probe struct {
	from, network string
	to            netip.AddrPort
	label         string // of the address
}

func (p probe) String() string {
	return fmt.Sprintf("packet: %s to %s, %s %d", p.from, p.label, p.network, p.to.Port())
}

func (m *machine) probes() []probe {
	var list []probe
	families := 1
	if m.dual {
		families = 2
	}
	ports := func(from, label string, to netip.Addr, ports ...string) {
		for _, port := range ports {
			var network string
			var number uint16
			fmt.Sscan(port, &network, &number)
			list = append(list, probe{from, network, netip.AddrPortFrom(to, number), label})
		}
	}
	outside, uplink := nstest.Addrs(outside4, outside6), nstest.Addrs(uplink4, uplink6)
	for _, from := range []string{podA, podB, podElsewhere, "outside", "host"} {
		for family := range families {
			text := []string{"IPv4", "IPv6"}[family]
			for _, to := range []string{podA, podB, podElsewhere} {
				if len(m.at[to]) > family {
					ports(from, to+" by "+text, m.at[to][family], "tcp 80", "udp 53", "tcp 81")
				}
			}
			if from != "outside" {
				ports(from, "outside by "+text, outside[family], "tcp 80", "udp 53", "tcp 81")
			}
			ports(from, "the host by "+text, uplink[family], "tcp 8080", "udp 5300", "tcp 8181", "tcp 8282", "tcp 8383", "tcp 8484", "tcp 8585", "tcp 9090", "tcp 8089")
			if from == podA || from == podB {
				gateway := m.at[podA][family].Prev() // the pods' is the first address
				ports(from, "its gateway by "+text, gateway, "tcp 8080", "udp 5300", "tcp 8089")
			}
		}
		if from == "host" {
			ports(from, "127.0.0.1", nstest.Addr("127.0.0.1"), "tcp 8080", "udp 5300", "tcp 8181", "tcp 8383", "tcp 8484", "tcp 8585", "tcp 9090", "tcp 8089")
			ports(from, "::1", nstest.Addr("::1"), "tcp 8080", "udp 5300", "tcp 8585", "tcp 8089")
		}
	}
	return list
}

func (m *machine) fate(p probe, wait time.Duration) string {
	from := map[string]*netns.NS{"outside": m.out, "host": m.ns}[p.from]
	if from == nil {
		from = m.of(p.from).NS
	}
	seen, err := nstest.AskWithin(m, from, p.network, p.to, wait)
	switch {
	case err == nil:
		return "answered, seen as " + seen.Addr().String()
	case errors.Is(err, syscall.ECONNREFUSED):
		return "refused"
	case errors.Is(err, syscall.EHOSTUNREACH), errors.Is(err, syscall.ENETUNREACH):
		return "unreachable"
	case os.IsTimeout(err):
		return "no answer"
	}
	return err.Error()
}

// late is how long a call may take that the machine is too busy to answer at once.
const late = 10 * time.Second

// fates makes calls at once, and says what becomes of each.
func (m *machine) fates(probes []probe, wait time.Duration) map[string]string {
	fates := map[string]string{}
	var each sync.WaitGroup
	var mu sync.Mutex
	for _, p := range probes {
		each.Go(func() {
			fate := m.fate(p, wait)
			mu.Lock()
			defer mu.Unlock()
			fates[p.String()] = fate
		})
	}
	each.Wait()
	return fates
}

// down has the runtime check, collect and delete the pods, and says what is left of them. A runtime that has
// lost its own records of a pod has the plugins alone collect it.
func (m *machine) down(lost bool) nstest.Snapshot {
	m.Helper()
	ctx := context.Background()
	for _, id := range []string{podA, podB, podElsewhere} {
		m.verb("CHECK of "+id, m.cni.CheckNetworkList(ctx, m.list(id), m.runtime(id)))
	}
	if lost {
		files, err := filepath.Glob(m.cache + "/results/*-" + podStale + "-eth0")
		must.That(m, err == nil && len(files) == 1, "the runtime's records: %q, %v", files, err)
		must.Succeed(m, os.Remove(files[0]))
	}
	m.verb("STATUS", m.cni.GetStatusNetworkList(ctx, m.nets[0]))
	m.verb("GC", m.cni.GCNetworkList(ctx, m.nets[0], &libcni.GCArgs{ValidAttachments: []types.GCAttachment{{ContainerID: podA, IfName: "eth0"}, {ContainerID: podB, IfName: "eth0"}}}))
	if len(m.at[podStale]) == 0 {
		return m.said
	}
	list := nstest.Snapshot{fmt.Sprintf("reserved after GC: %t", strings.Contains(m.reserved(), m.at[podStale][0].String()))}
	for _, id := range []string{podA, podA, podB, podElsewhere} {
		m.verb("DEL of "+id, m.cni.DelNetworkList(ctx, m.list(id), m.runtime(id)))
	}
	return list.Plus(m.left()...).Plus(m.said...)
}

func (m *machine) left() nstest.Snapshot {
	m.Helper()
	var list nstest.Snapshot
	rules := m.run("nft", "list", "ruleset")
	for id, addrs := range m.at {
		for _, a := range addrs {
			if regexp.MustCompile(regexp.QuoteMeta(a.String()) + `\b`).MatchString(rules) {
				list = list.Plus("left of " + id + ": rules for its address " + a.String())
			}
		}
	}
	for _, port := range []string{"8080", "5300", "8181", "8282", "8383", "8484", "8585", "9090", "7070"} {
		if regexp.MustCompile(`\b` + port + `\b`).MatchString(rules) {
			list = list.Plus("left: rules for port " + port)
		}
	}
	for line := range strings.Lines(m.run("ip", "-br", "link")) {
		list = list.Plus("left: link " + strings.Fields(line)[0])
	}
	for _, name := range []string{m.bridge, "other0"} {
		list = list.Plus("left: route_localnet of " + name + " is " + nstest.Sysctl(m, m.ns, "net/ipv4/conf/"+name+"/route_localnet"))
	}
	ofNetwork := regexp.MustCompile(`/run/tombolo/(epoch|lock|networks/[^/]*)$|/lib/cni/networks/[^/]*/(lock|last_reserved_ip\.[01]|\.tombolo-epoch)$`)
	must.Succeed(m, filepath.WalkDir(m.root, func(path string, d os.DirEntry, err error) error {
		if err == nil && !d.IsDir() && !ofNetwork.MatchString(path) {
			list = list.Plus("left: file " + strings.TrimPrefix(path, m.root))
		}
		return err
	}))
	return list
}

// reserved are the addresses that host-local has on record.
func (m *machine) reserved() string {
	files := must.Of(filepath.Glob(m.root + "/lib/cni/networks/*/*")).Get(m)
	return strings.Join(files, "\n")
}

// difference is one that remains, on purpose.
type difference struct {
	what         string // a regular expression of the start of the lines that it is about
	theirs, ours string // of the rest, with the reference and with this program
	says         string // what docs/drop-in.md says of it
	mixture      string // if not any
}

// differences are all that remain between what the reference's plugins do with documented lists, and this
// program by their names.
func differences() []difference {
	const seen = `answered, seen as \S+`
	const noRouter = "A host that is no router does not become one"
	return []difference{
		{what: `parameter of the host: (ipv4/ip_forward|ipv4/conf/all/forwarding|ipv6/conf/[^/]*/forwarding):`,
			theirs: `1`, ours: `0`, says: noRouter},
		{what: `parameter of the host: ipv4/conf/[^/]*/forwarding:`, theirs: `1`, ours: `116`, says: noRouter},
		{what: `parameter of the host: ipv6/conf/[^/]*/force_forwarding:`, theirs: `0`, ours: `1`, says: noRouter},
		// by the kernel, with ip_forward
		{what: `parameter of the host: ipv4/conf/all/accept_redirects:`,
			theirs: `0`, ours: `1`, says: noRouter},
		{what: `packet: (a to a|b to b|elsewhere to elsewhere) by .*: `, theirs: `no answer`, ours: seen + `|refused`, says: "its `lo` is up"},
		{what: `packet: (a|b|elsewhere) to (the host|its gateway) by .*: `, theirs: seen, ours: seen, says: "keeps its source address if bridged packets pass iptables"},
		{what: `packet: outside to the host by .*: `, theirs: `no answer`, ours: `answered, seen as (` + outside4 + `|` + outside6 + `)`, says: "host ports passes a FORWARD policy of DROP"},
		{what: `packet: host to ::1, .*: `, theirs: `no answer`, ours: `refused`, says: "`::1` refuses at once"},
		{what: `left: route_localnet of \S+ is `, theirs: `1`, ours: `0`, says: "the last DEL sets `route_localnet` back"},
		{what: `parameter of the (host|pod): ipv6/conf/[^/]*/addr_gen_mode:`, theirs: `0`, ours: `1`, says: "`addr_gen_mode`"},
		{what: `parameter of the pod: ipv6/conf/eth0/accept_dad:`, theirs: `0`, ours: `1`, says: "`accept_dad`"},
		{what: `parameter of the pod: ipv6/conf/eth0/accept_ra:`, theirs: `1`, ours: `0`, says: "`accept_ra`"},
	}
}

// unexplained are the lines of a diff that no difference on purpose is about; it notes those that are.
func unexplained(mixture, diff string, seen *sync.Map) string {
	var list []string
	for line := range strings.Lines(diff) {
		line = strings.TrimSpace(line)
		explained := false
		for _, d := range differences() {
			rest := map[byte]string{'-': d.theirs, '+': d.ours}[line[0]]
			if (d.mixture == "" || d.mixture == mixture) && regexp.MustCompile("^. "+d.what+"("+rest+")$").MatchString(line) {
				explained = true
				seen.Store(d.what+d.ours, true)
			}
		}
		if !explained {
			list = append(list, line)
		}
	}
	return strings.Join(list, "\n")
}

// chain is the list of Kubernetes with all of the plugins that its documentation has, and a backend.
func chain(backend string) func(string) string {
	return strings.NewReplacer(`"cniVersion": "1.0.0"`, `"cniVersion": "1.1.0"`, `"promiscMode": true`, `"ipMasqBackend": "`+backend+`"`,
		`"externalSetMarkChain": "KUBE-MARK-MASQ"`, `"backend": "`+backend+`"`,
		"   }\n ]\n}", `}, {"type": "firewall"}, {"type": "bandwidth", "capabilities": {"bandwidth": true}} ]}`).Replace
}

func documentedLists() map[string]*documented {
	const drop = "iptables -P FORWARD DROP; ip6tables -P FORWARD DROP\n"
	const kubernetes = "kubernetes.io/docs/tasks/administer-cluster/migrating-from-dockershim/troubleshooting-cni-plugin-related-errors"
	list := map[string]*documented{
		"Kubernetes": {file: "kubernetes.conflist", source: kubernetes, bridge: "cni0", subnet: "10.88.0.0/16", dual: true, called: "1", before: `
for family in iptables ip6tables; do # as kube-proxy does
	$family -t nat -N KUBE-MARK-MASQ; $family -t nat -A KUBE-MARK-MASQ -j MARK --or-mark 0x4000
	$family -t nat -N KUBE-POSTROUTING; $family -t nat -A POSTROUTING -j KUBE-POSTROUTING
	$family -t nat -A KUBE-POSTROUTING -m mark --mark 0x4000/0x4000 -j MASQUERADE
done`},
		"podman":  {file: "podman.conflist", source: "github.com/containers/podman cni/87-podman-bridge.conflist", bridge: "cni-podman0", subnet: "10.88.0.0/16", called: "0", before: drop},
		"nerdctl": {file: "nerdctl.conflist", source: "github.com/containerd/nerdctl docs/cni.md", bridge: "nerdctl0", subnet: "10.4.0.0/24", called: "0", before: drop},
		"Nomad": {file: "nomad.conflist", source: "developer.hashicorp.com/nomad/docs/networking/cni", bridge: "nomad", subnet: "172.26.64.0/20", called: "1",
			before: drop + "iptables -N NOMAD-ADMIN; iptables -A NOMAD-ADMIN -o nomad -d 172.26.64.0/20 -j ACCEPT"}, // as Nomad does
	}
	for _, backend := range []string{"iptables", "nftables"} {
		list["all by "+backend] = &documented{file: "kubernetes.conflist", source: kubernetes, change: chain(backend), bridge: "cni0", subnet: "10.88.0.0/16", dual: true, called: "1", before: drop}
	}
	return list
}

func (d *documented) types(t testing.TB) []string {
	var list []string
	for _, m := range regexp.MustCompile(`"type": "([^"]*)"`).FindAllStringSubmatch(d.text(t), -1) {
		list = append(list, m[1])
	}
	slices.Sort(list)
	return list
}

// everything is the list of which make test has some mixtures, too.
const everything = "all by iptables"

// mixtures are the names of which Tombolo is the plugin: all, and so many of these, by chance: each alone, and all
// but each.
func (d *documented) mixtures(t testing.TB, most int) map[string][]string {
	others := map[string][]string{}
	plugins := d.types(t)
	for _, name := range plugins {
		others["only "+name] = []string{name}
		others["all but "+name] = slices.DeleteFunc(slices.Clone(plugins), func(other string) bool { return other == name })
	}
	list := map[string][]string{"all": {"all"}}
	names := slices.Sorted(maps.Keys(others))
	for _, i := range rand.Perm(len(names))[:min(most, len(names))] {
		list[names[i]] = others[names[i]]
	}
	return list
}

// Lists of plugins as they stand in the documentation of the programs that call them do the same with this
// program by the reference's names, or some of them, as with the reference: the same links, addresses, routes and
// parameters, the same fate of each packet, the same limits and results; and nothing is left of a pod.
// What differs is on a list, and documented.
func TestDocumentedListsDoTheSameByName(t *testing.T) {
	t.Parallel()
	var seen sync.Map
	long := os.Getenv("TOMBOLO_LONG") != ""
	t.Run("lists", func(t *testing.T) {
		for name, d := range documentedLists() {
			nstest.RunParallel(t, name, func(t *testing.T) {
				mixtures := 0
				switch {
				case long:
					mixtures = math.MaxInt
				case name == everything:
					mixtures = 3
				}
				compareByName(t, d, mixtures, &seen)
			})
		}
	})
	text := must.Of(os.ReadFile("../../docs/drop-in.md")).Get(t)
	for _, d := range differences() {
		_, there := seen.Load(d.what + d.ours)
		expect.That(t, there || !long, "nothing differs any more as %s says", d.what)
		expect.That(t, bytes.Contains(text, []byte(d.says)), "docs/drop-in.md does not say %q", d.says)
	}
}

func compareByName(t *testing.T, d *documented, mixtures int, seen *sync.Map) {
	t.Log("the list is that of " + d.source)
	theirs := newMachine(t, d, nil)
	there := theirs.up()
	calls := theirs.probes()
	fates := theirs.fates(calls, noAnswer)
	answered := []string{"a to outside by IPv4, tcp 80", "b to a by IPv4, udp 53", "b to the host by IPv4, tcp 8080", "host to the host by IPv4, tcp 8383", "host to 127.0.0.1, tcp 8484"}
	for _, p := range calls {
		expect.That(t, !slices.Contains(answered, strings.TrimPrefix(p.String(), "packet: ")) || strings.HasPrefix(theirs.fate(p, late), "answered"),
			"with the reference, %s is not answered, so that little is compared", p)
	}
	var left sync.Map
	t.Run("with", func(t *testing.T) {
		for name, ours := range d.mixtures(t, mixtures) {
			nstest.RunParallel(t, name, func(t *testing.T) {
				m := newMachine(t, d, ours)
				got, want := m.up(), there
				w, g := maps.Clone(fates), m.fates(calls, noAnswer)
				again := slices.DeleteFunc(slices.Clone(calls), func(p probe) bool {
					was, is := p.String()+": "+w[p.String()], p.String()+": "+g[p.String()]
					return was == is || unexplained(name, "- "+was+"\n+ "+is, seen) == ""
				})
				maps.Copy(w, theirs.fates(again, late))
				maps.Copy(g, m.fates(again, late))
				for _, p := range calls {
					want, got = want.Plus(p.String()+": "+w[p.String()]), got.Plus(p.String()+": "+g[p.String()])
				}
				left.Store(name, m.down(name == "all" && strings.HasPrefix(m.nets[0].CNIVersion, "1.1.")))
				expect.Equal(t, unexplained(name, want.Diff(got), seen), "", "the reference's (-) and this one's (+)")
			})
		}
	})
	want := theirs.down(false)
	left.Range(func(name, got any) bool {
		if diff := unexplained(name.(string), want.Diff(got.(nstest.Snapshot)), seen); diff != "" {
			t.Errorf("with %s, at the end of pods, the reference's (-) and this one's (+):\n%s", name, diff)
		}
		return true
	})
}

// A node changes to this program's names while pods of the reference's run, or back: packets meet what they met
// before, also once a pod of the other side has come; and the other side's DEL leaves nothing.
func TestDocumentedListsChangeOverWithPodsRunning(t *testing.T) {
	t.Parallel()
	for name, d := range documentedLists() {
		if !strings.HasPrefix(name, "all by") && os.Getenv("TOMBOLO_LONG") == "" {
			continue // their plugins and fields are in those
		}
		for _, back := range []bool{false, true} {
			nstest.RunParallel(t, fmt.Sprintf("%s, back %t", name, back), func(t *testing.T) {
				m := newMachine(t, d, map[bool][]string{true: {"all"}}[back])
				m.up()
				calls := m.probes()
				before := m.fates(calls, noAnswer)
				// A busy machine answers many calls at once late, and those of now cannot be made later.
				silent := slices.DeleteFunc(slices.Clone(calls), func(p probe) bool { return before[p.String()] != "no answer" })
				maps.Copy(before, m.fates(silent, late/3))
				same := func(when string) {
					t.Helper()
					after := m.fates(calls, noAnswer)
					again := slices.DeleteFunc(slices.Clone(calls), func(p probe) bool { return before[p.String()] == after[p.String()] })
					maps.Copy(after, m.fates(again, late))
					for _, p := range again {
						was, is := before[p.String()], after[p.String()]
						expect.That(t, was == is, "%s, %s: %s, and was %s", when, p, is, was)
					}
				}
				change := []string{"install", "--names", "all", m.programs}
				if back {
					change = []string{"install", "--undo", m.programs}
				}
				o := m.operate(change...)
				must.That(t, o.status == 0, "%q: %s%s", change, o.stdout, o.stderr)
				same("with the other programs")
				m.add(podLate)
				same("with a pod of the other programs")
				ctx := context.Background()
				for _, id := range []string{podLate, podStale, podA, podB, podElsewhere} {
					m.verb("DEL of "+id, m.cni.DelNetworkList(ctx, m.list(id), m.runtime(id)))
				}
				for id := range m.at {
					vanish(t, m.of(id).path)
				}
				o = m.operate("gc")
				expect.That(t, !back || o.status == 0, "gc: %s%s", o.stdout, o.stderr)
				said := strings.Join(m.said, "\n")
				expect.That(t, !strings.Contains(said, "fails"), "the verbs:\n%s", said)
				expected := regexp.MustCompile(`^left: (link (lo|eth0@\w+|other0|` + m.bridge + `)|route_localnet of .*)$`)
				left := slices.DeleteFunc(m.left(), expected.MatchString)
				expect.That(t, len(left) == 0, "at the end:\n%s", strings.Join(left, "\n"))
			})
		}
	}
}
