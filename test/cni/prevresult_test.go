package cni

import (
	"encoding/json"
	"strings"
	"testing"

	current "github.com/containernetworking/cni/pkg/types/100"

	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
)

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
