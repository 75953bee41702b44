package cni

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	current "github.com/containernetworking/cni/pkg/types/100"

	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
)

func TestCHECKFindsWhatIsNotAsItWasMade(t *testing.T) {
	t.Parallel()
	inPod := func(command string) func(*network, *pod) {
		return func(w *network, p *pod) { w.Helper(); nstest.Run(w, p.NS, "ip", strings.Fields(command)...) }
	}
	onNode := func(command string) func(*network, *pod) {
		return func(w *network, p *pod) { w.Helper(); w.ip(strings.ReplaceAll(command, "PORT", w.port(p))) }
	}
	nft := func(line string) func(*network, *pod) { return func(w *network, _ *pod) { w.Helper(); w.nft(line) } }
	for _, tt := range []struct {
		name  string
		spoil func(*network, *pod)
		says  string
	}{
		{"the port is gone", onNode("link del PORT"), "link veth"},
		{"the port is down", onNode("link set PORT down"), "link is down, should be up"},
		{"the port is off the bridge", onNode("link set PORT nomaster"), "membership in bridge cbr0 is missing"},
		{"the bridge is gone", onNode("link del cbr0"), "bridge cbr0 is missing"},
		{"the bridge is down", onNode("link set cbr0 down"), "bridge cbr0: link is down, should be up"},
		{"the port's MTU", onNode("link set PORT mtu 1300"), "MTU is 1300, should be 1500"},
		{"the port's MAC", onNode("link set PORT address 02:00:00:00:00:77"), "MAC is 02:00:00:00:00:77"},
		{"the port's alias", onNode("link set PORT alias mine"), `alias is "mine"`},
		{"hairpin", onNode("link set PORT type bridge_slave hairpin off"), "hairpin is off, should be on"},
		{"isolation", onNode("link set PORT type bridge_slave isolated on"), "isolation is on, should be off"},
		{"the pod's interface is down", inPod("link set eth0 down"), "interface eth0: link is down"},
		{"the pod's MAC", inPod("link set eth0 address 02:00:00:00:00:78"), "MAC is 02:00:00:00:00:78"},
		{"the pod's IPv4 address", inPod("address del 10.77.0.2/24 dev eth0"), "address 10.77.0.2/24 is missing"},
		{"the pod's IPv6 address", inPod("address del fd77::2/64 dev eth0"), "address fd77::2/64 is missing"},
		{"the pod's default route", inPod("route del default"), "route default via 10.77.0.1"},
		{"the pod's default route, IPv6", inPod("-6 route del default"), "route default via fd77::1"},
		{"a route of the ipam", inPod("route del 10.1.0.0/16"), "route 10.1.0.0/16"},
		{"the IPv4 gateway", onNode("address del 10.77.0.1/24 dev cbr0"), "the gateway 10.77.0.1/24 is missing"},
		{"the IPv6 gateway", onNode("address del fd77::1/64 dev cbr0"), "the gateway fd77::1/64 is missing"},
		{"the gateway is another link's", func(w *network, _ *pod) {
			w.ip("address del 10.77.0.1/24 dev cbr0")
			w.ip("address add 10.77.0.1/32 dev lo")
		}, "the gateway 10.77.0.1/24 is missing"},
		{"IPv4 is not forwarded", func(w *network, _ *pod) {
			nstest.Sysctl(w, w.ns, "net/ipv4/ip_forward", "1") // 0 again takes it from every link
			nstest.Sysctl(w, w.ns, "net/ipv4/ip_forward", "0")
		}, "does not forward"},
		{"IPv6 is not forwarded", func(w *network, _ *pod) {
			nstest.Sysctl(w, w.ns, "net/ipv6/conf/all/forwarding", "0")
		}, "does not forward"},
		{"the table is gone", nft("delete table inet tombolo"), "table inet tombolo is missing"},
		{"the table is flushed", nft("flush table inet tombolo"), "masquerade"},
		{"the masquerade chain is gone", nft("delete chain inet tombolo masq-podnet"), "chain masq-podnet is missing"},
		{"the masquerade rules are gone", nft("flush chain inet tombolo masq-podnet"), "masquerade what pods send to elsewhere"},
		{"the forward rules are gone", nft("flush chain inet tombolo forward"), "mark what pods send"},
		{"the forward chain is gone", nft("delete chain inet tombolo forward"), "chain forward is missing"},
		{"an element of the forward set is gone", nft(`delete element inet tombolo pods4 { "cbr0" . 10.77.0.2 }`), "cbr0 . 10.77.0.2 is missing"},
		{"an element of the masquerade set is gone", nft(`delete element inet tombolo masq6-podnet { fd77::2 }`), "fd77::2 is missing"},
		{"an element is another's", func(w *network, _ *pod) {
			w.nft(`delete element inet tombolo pods4 { "cbr0" . 10.77.0.2 }`)
			w.nft(`add element inet tombolo pods4 { "cbr0" . 10.77.0.2 comment "mine" }`)
		}, "owner of element cbr0 . 10.77.0.2"},
		{"the table is dormant", nft(`add table inet tombolo { flags dormant; }`), "dormant"},
		{"a reservation is gone", func(w *network, _ *pod) {
			must.Succeed(w, os.RemoveAll(w.state+"/ipam/podnet/10.77.0.2"))
		}, "10.77.0.2 is not reserved"},
		{"a reservation is another's", func(w *network, _ *pod) {
			must.Succeed(w, os.WriteFile(w.state+"/ipam/podnet/fd77::2", []byte("other\r\neth0"), 0o600))
		}, "fd77::2 is not reserved"},
		{"the record is gone", func(w *network, _ *pod) { must.Succeed(w, os.RemoveAll(w.state+"/attachments")) }, "no attachment eth0"},
		{"the network's record is gone", func(w *network, _ *pod) { must.Succeed(w, os.RemoveAll(w.state+"/networks")) }, "record of network"},
		{"the state is gone", func(w *network, _ *pod) { must.Succeed(w, os.RemoveAll(w.state)) }, "no attachment eth0"},
	} {
		nstest.RunParallel(t, tt.name, func(t *testing.T) {
			n := newNode(t)
			ipam := dualStack()
			ipam["routes"] = []conf{{"dst": "10.1.0.0/16"}}
			w := n.podnet(conf{"ipam": ipam})
			p := w.addPod("a")
			must.Succeed(t, w.check(p), "CHECK right after ADD")
			tt.spoil(w, p)
			wantError(t, w.check(p), 113, tt.says)
			if strings.Contains(tt.says, "mine") || strings.Contains(tt.name, "another's") {
				return // what somebody else has taken stays
			}
			// Whatever it was does not keep DEL from its work.
			w.del(p)
			n.wantNothing()
		})
	}
}

func TestCHECKListsAllThatIsWrong(t *testing.T) {
	n := parallelNode(t)
	w := n.podnet(nil)
	p := w.addPod("a")
	n.ip("link set " + w.port(p) + " nomaster mtu 1400")
	nstest.Run(t, p.NS, "ip", "route", "del", "default")
	n.nft("flush chain inet tombolo masq-podnet")
	must.Succeed(t, os.RemoveAll(n.state+"/ipam/podnet/10.77.0.2"))
	err := w.check(p)
	for _, part := range []string{"membership in bridge cbr0", "MTU is 1400", "route default via 10.77.0.1", "masquerade what pods send", "10.77.0.2 is not reserved"} {
		wantError(t, err, 113, part)
	}
}

func TestCHECKToleratesWhatAChainedPluginChanged(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		name   string
		inPod  []string
		change func(*current.Result)
	}{
		{"nothing", nil, func(*current.Result) {}},
		{"the pod's MAC", []string{"link set eth0 address 02:00:00:00:00:99"}, func(r *current.Result) { r.Interfaces[2].Mac = "02:00:00:00:00:99" }},
		{"a larger MTU", []string{"link set eth0 mtu 9000"}, func(*current.Result) {}},
		{"the default route leads elsewhere", []string{"route replace default via 10.77.0.9 proto 116"}, func(*current.Result) {}},
		{"a smaller MTU", []string{"link set eth0 mtu 1400"}, func(r *current.Result) { r.Interfaces[2].Mtu = 1400 }},
		{"routes in another table", []string{
			"route add default via 10.77.0.1 dev eth0 table 100", "route del default",
			"-6 route add default via fd77::1 dev eth0 table 100", "-6 route del default",
		}, func(*current.Result) {}},
		{"a route taken out", []string{"-6 route del default"}, func(r *current.Result) { r.Routes = r.Routes[:1] }},
		{"an address taken out", []string{"address del fd77::2/64 dev eth0", "-6 route del default"}, func(r *current.Result) {
			r.IPs, r.Routes = r.IPs[:1], r.Routes[:1]
		}},
		{"more of everything", []string{
			"address add 10.99.0.5/24 dev eth0", "link add more0 type veth peer name more1", "route add 10.98.0.0/16 via 10.77.0.9",
		}, func(r *current.Result) {
			r.Interfaces = append(r.Interfaces, &current.Interface{Name: "more0", Sandbox: r.Interfaces[2].Sandbox})
		}},
		{"its own interface first", nil, func(r *current.Result) {
			r.Interfaces = append([]*current.Interface{{Name: "ifb0"}}, r.Interfaces...)
			for _, ip := range r.IPs {
				*ip.Interface++
			}
		}},
		{"addresses of another interface", nil, func(r *current.Result) {
			other := len(r.Interfaces)
			r.Interfaces = append(r.Interfaces, &current.Interface{Name: "net1", Sandbox: r.Interfaces[2].Sandbox})
			r.IPs = append(r.IPs, &current.IPConfig{Interface: &other, Address: ipNet(t, "10.98.0.7/24")})
		}},
	} {
		nstest.RunParallel(t, tt.name, func(t *testing.T) {
			n := newNode(t)
			w := n.podnet(nil)
			p := n.pod("a")
			r := w.add(p)
			for _, command := range tt.inPod {
				nstest.Run(t, p.NS, "ip", strings.Fields(command)...)
			}
			tt.change(r)
			stdin := w.stdin(conf{"prevResult": r})
			c := call{verb: "CHECK", id: p.id, netns: p.path, ifName: "eth0", stdin: stdin}
			expect.Equal(t, n.callOK(c), "", "CHECK printed")
			c.verb = "DEL"
			n.callOK(c)
			n.wantNothing()
		})
	}
}

func TestCHECKPassesForEachKindOfNetwork(t *testing.T) {
	t.Parallel()
	routed := hostLocal(subnet4)
	routed["routes"] = []conf{{"dst": "192.0.2.7/24"}, {"dst": "0.0.0.0/0", "gw": "10.77.0.9", "table": 254}}
	for name, fields := range map[string]conf{
		"gateway":                   nil,
		"IPv4 only":                 {"ipam": hostLocal(subnet4)},
		"IPv6 only":                 {"ipam": hostLocal(subnet6)},
		"no masquerade":             {"ipMasq": false},
		"no gateway":                {"isGateway": false},
		"layer 2":                   {"mode": "l2"},
		"layer 2 without ipam":      {"mode": "l2", "ipam": nil},
		"interface down":            {"disableContainerInterface": true, "ipam": nil},
		"static":                    {"ipam": fixed(conf{"address": "10.77.0.2/24", "gateway": gateway4})},
		"isolated, without hairpin": {"portIsolation": true, "hairpinMode": false},
		"another mark":              {"forwardMark": "0x20000"},
		"routes":                    {"ipam": routed},
		"a gateway elsewhere":       {"isGateway": false, "isDefaultGateway": true, "ipam": fixed(conf{"address": "10.77.0.2/32", "gateway": "10.99.0.1"})},
		"small":                     {"mtu": 1280},
	} {
		nstest.RunParallel(t, name, func(t *testing.T) {
			n := newNode(t)
			w := n.podnet(fields)
			a, b := n.pod("a"), n.pod("b")
			w.add(a)
			if name != "static" && name != "a gateway elsewhere" {
				w.add(b)
			}
			expect.Success(t, w.check(a))
			w.del(a)
			w.del(b)
			n.wantNothing()
		})
	}
}

func TestCHECKOfAnADDThatNeverEnded(t *testing.T) {
	n := parallelNode(t)
	w := n.podnet(nil)
	p := w.addPod("a")
	for _, name := range n.files(n.state + "/attachments") {
		path := filepath.Join(n.state, "attachments", name)
		data := must.Of(os.ReadFile(path)).Get(t)
		// The record's first line is what it was while ADD was at it.
		begun, _, _ := strings.Cut(string(data), "\n")
		must.Succeed(t, os.WriteFile(path, []byte(begun+"\n"), 0o600))
	}
	wantError(t, w.check(p), 113, "did not finish")
	w.del(p)
	n.wantNothing()
}

// checkWith is CHECK of a pod with another result than that of its ADD.
func (w *network) checkWith(p *pod, prev any) (outcome, string) {
	w.Helper()
	o := w.call(call{verb: "CHECK", id: p.id, netns: p.path, ifName: "eth0", stdin: w.stdin(conf{"prevResult": prev})})
	e := failure(o.stdout)
	if o.status == 0 || e == nil {
		expect.Equal(w, o.status, 0, "CHECK: %+v", o)
		return o, ""
	}
	expect.Equal(w, e.Code, 113, "CHECK: %+v", o)
	return o, e.Msg
}

func TestCHECKComparesTheResultWithWhatIsThere(t *testing.T) {
	n := parallelNode(t)
	w := n.podnet(nil)
	p := n.pod("a")
	made := w.add(p)
	change := func(f func(r *current.Result)) *current.Result {
		data := must.Of(json.Marshal(made)).Get(t)
		var r current.Result
		must.Succeed(t, json.Unmarshal(data, &r))
		f(&r)
		return &r
	}
	pod := len(made.Interfaces) - 1
	address := func(text string, interfaceIndex *int) *current.IPConfig {
		prefix := nstest.Prefix(text)
		var ip current.IPConfig
		ip.Interface = interfaceIndex
		ip.Address.IP = prefix.Addr().AsSlice()
		ip.Address.Mask = made.IPs[0].Address.Mask
		return &ip
	}
	for _, tt := range []struct {
		name string
		prev *current.Result
		says []string // nothing: CHECK succeeds
	}{
		{"as it was", change(func(*current.Result) {}), nil},
		{"no addresses", change(func(r *current.Result) { r.IPs = nil }), nil},
		{"one address is missing", change(func(r *current.Result) { r.IPs = r.IPs[:1] }), nil},
		{"an address that the pod has not got", change(func(r *current.Result) { r.IPs = append(r.IPs, address("10.77.0.77/24", &pod)) }), []string{"address 10.77.0.77/24 is missing"}},
		{"the same, of no interface", change(func(r *current.Result) { r.IPs = append(r.IPs, address("10.77.0.77/24", nil)) }), []string{"address 10.77.0.77/24 is missing"}},
		{"another prefix length", change(func(r *current.Result) { r.IPs[0].Address.Mask[2] = 0 }), []string{"address 10.77.0.2/16 is missing"}},
		{"addresses of the host's end", change(func(r *current.Result) {
			for _, ip := range r.IPs {
				ip.Interface = new(int)
			}
		}), nil},
		{"no interface of the pod", change(func(r *current.Result) {
			r.Interfaces = r.Interfaces[:pod]
			for _, ip := range r.IPs {
				ip.Interface = nil
			}
		}), []string{"1 difference: prevResult has no interface eth0 of the pod"}},
		{"no interfaces", change(func(r *current.Result) {
			r.Interfaces = nil
			for _, ip := range r.IPs {
				ip.Interface = nil
			}
		}), []string{"prevResult has no interface eth0 of the pod"}},
		{"a MAC that is none", change(func(r *current.Result) { r.Interfaces[pod].Mac = "zz" }), []string{`1 difference: prevResult gives the interface eth0 the MAC "zz", which is invalid`}},
		{"a MAC of eight bytes", change(func(r *current.Result) { r.Interfaces[pod].Mac = "02:00:00:00:00:00:00:01" }), []string{"which is invalid"}},
		{"a MAC of control characters", change(func(r *current.Result) { r.Interfaces[pod].Mac = "\x1b[31m" + strings.Repeat("x", 500) }), []string{`the MAC "\x1b[31mxxx`}},
		{"the port's MAC is none", change(func(r *current.Result) { r.Interfaces[1].Mac = "zz" }), []string{`MAC "zz"`}},
		{"another MAC", change(func(r *current.Result) { r.Interfaces[pod].Mac = "02:00:00:00:00:01" }), []string{"should be 02:00:00:00:00:01"}},
		// What plugins after this one may do.
		{"the addresses name no interface", change(func(r *current.Result) {
			for _, ip := range r.IPs {
				ip.Interface = nil
			}
		}), nil},
		{"another interface, with an address", change(func(r *current.Result) {
			r.Interfaces = append(r.Interfaces, &current.Interface{Name: "net1", Sandbox: p.path, Mac: "zz"})
			other := len(r.Interfaces) - 1
			r.IPs = append(r.IPs, address("192.0.2.1/24", &other), address("192.0.2.2/24", nil))
		}), nil},
		{"the MAC is left out", change(func(r *current.Result) { r.Interfaces[pod].Mac, r.Interfaces[1].Mac = "", "" }), nil},
		{"the port is left out", change(func(r *current.Result) {
			r.Interfaces = r.Interfaces[pod:]
			for _, ip := range r.IPs {
				ip.Interface = new(int)
			}
		}), nil},
		{"the routes are left out", change(func(r *current.Result) { r.Routes = nil }), nil},
	} {
		o, msg := w.checkWith(p, tt.prev)
		expect.Equal(t, o.status == 0, (len(tt.says) == 0), "%s: %+v", tt.name, o)
		for _, text := range tt.says {
			expect.Contains(t, msg, text, "%s", tt.name)
		}
	}
	// An address that another plugin has added is one of the pod's from then on.
	nstest.Run(t, p.NS, "ip", "address", "add", "10.77.0.77/24", "dev", "eth0")
	o, _ := w.checkWith(p, change(func(r *current.Result) { r.IPs = append(r.IPs, address("10.77.0.77/24", &pod)) }))
	expect.That(t, o.status == 0, "with an address of another plugin's: %+v", o)
}
