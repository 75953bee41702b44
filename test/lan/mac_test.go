package lan

import (
	"encoding/json"
	"strings"
	"testing"
	"time"

	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
)

// A pod with the MAC of the host, or of the host's router, would cut the host off.
func TestNoPodGetsTheMACOfAnotherMachine(t *testing.T) {
	t.Parallel()
	l := newHost(t)
	n := l.network(object{"ipam": staticAddresses(t.TempDir()), "lanGuard": false})
	n.add(l.newPod("first"))
	router, own := macOf(t, l.router, nic), macOf(t, l.host, nic)
	n.refusesMAC("unmet", router, "another machine") // which the host has never sent to
	m := l.usualFlows(both()...)
	tuned := n.add(l.newPod("tuned"))

	for name, c := range map[string]struct{ mac, says string }{
		"router":    {router, "another machine"},
		"other":     {macOf(t, l.other, nic), "another machine"},
		"host":      {own, "belongs to uplink"},
		"multicast": {"01:00:5e:00:00:01", "MAC of one interface"},
	} {
		wantWithin(t, "ADD with the MAC of "+name, limit{}, m.during(func() { n.refusesMAC(name, c.mac, c.says) }))
		wantWithin(t, "tuning to the MAC of "+name, limit{}, m.during(func() {
			began := time.Now()
			_, err := n.tune(tuned, c.mac)
			expect.That(t, err != nil, "tuning gives the MAC of %s", name)
			expect.That(t, time.Since(began) < aMinute, "it took %s", time.Since(began))
		}))
		expect.That(t, macOf(t, tuned.place, nic) != c.mac, "the pod has the MAC of %s", name)
	}
	must.Of(n.tune(tuned, "02:00:00:00:00:77")).Get(t)
	expect.Equal(t, macOf(t, tuned.place, nic), "02:00:00:00:00:77", "a MAC that nobody has")
	expect.Success(t, nstest.Ping(t, tuned.ns, l.other.ip4), "from the pod with another MAC")
}

func TestNoPodOnTheSystemsBridgeGetsTheMACOfTheRouter(t *testing.T) {
	t.Parallel()
	l := newHost(t)
	ip(t, l.host.ns, "link add "+bridge+" type bridge forward_delay 0")
	l.moveToBridge()
	n := l.network(object{"ipam": staticAddresses(t.TempDir()), "lanGuard": false})
	n.refusesMAC("router", macOf(t, l.router, nic), "another machine")
	expect.Success(t, nstest.Ping(t, l.host.ns, l.router.ip4), "the host's router")
}

// refusesMAC fails the test unless an ADD with a MAC is refused.
func (n *network) refusesMAC(name, mac, says string) {
	n.Helper()
	p := n.newPod(name)
	_, err := n.another(object{"args": object{"cni": object{"mac": mac}}}).verb("ADD", p)
	expect.That(n, err != nil && strings.Contains(err.Error(), says), "an ADD with the MAC of %s: %v, want an error with %q", name, err, says)
	n.del(p)
}

// tune has the plugin tuning give a pod another MAC.
func (n *network) tune(p *pod, mac string) (string, error) {
	n.Helper()
	conf := object{"cniVersion": "1.1.0", "name": "home", "type": "tuning", "mac": mac, "dataDir": n.TempDir(), "prevResult": p.result, "stateDir": n.state}
	stdin := must.Of(json.Marshal(conf)).Get(n)
	environ := []string{"CNI_COMMAND=ADD", "CNI_CONTAINERID=" + p.id, "CNI_NETNS=" + p.path, "CNI_IFNAME=" + nic, "CNI_PATH=/"}
	return n.exec("tombolo-cni", environ, stdin, "as", "/opt/cni/bin/tuning")
}
