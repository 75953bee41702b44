package cni

import (
	"fmt"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/tombolo-cni/tombolo/internal/nstest"
)

// What a pod puts in its interface's place may be a link that nobody can delete, or one that the kernel says more of than
// fits into an answer. The DEL of the list does not fail for it.
func TestALinkInTheInterfacesPlaceStopsNoDEL(t *testing.T) {
	t.Parallel()
	const tune = `{"type":"tuning","dataDir":"DATA/t","mtu":1400}`
	much := "link add link aside name eth0 type macvlan mode source\n"
	for i := range 1600 {
		much += fmt.Sprintf("link set eth0 type macvlan macaddr add 02:00:00:00:%02x:%02x\n", i>>8, i&0xff)
	}
	for i := range 496 { // the kernel takes no more of this length
		much += fmt.Sprintf("link property add dev eth0 altname n%0126d\n", i)
	}
	for name, commands := range map[string]string{
		"lo renamed":                 "link set lo down\nlink set lo name eth0",
		"lo by an alternative name":  "link property add dev lo altname eth0",
		"a link with many MACs":      much,
		"one that takes no such MTU": "link set aside mtu 1300\nlink add link aside name eth0 type macvlan",
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := newSide(t, referenceDir(t), byName())
			plugins := []string{attackedBridge, tune}
			s.chain("ADD", "a", plugins)
			dir := t.TempDir()
			nstest.PutFile(t, dir, "commands", "link set eth0 down\nlink set eth0 name aside\n"+commands)
			nstest.Run(t, s.of("a").NS, "ip", "-batch", filepath.Join(dir, "commands"))
			s.chain("DEL", "a", plugins)
			if left := s.run("ip", "-br", "link", "show", "type", "veth"); left != "" {
				t.Errorf("DEL leaves %s", left)
			}
			if left := s.files(); left != "" {
				t.Errorf("DEL leaves %s", left)
			}
		})
	}
}

// A pod that gets a further network while it runs can give the interface of another of its networks the name of the new one,
// before the next plugin of the list looks. The limits that it has there stay.
func TestAPodsLinkOfOneNetworkPassesForNoneOfAnother(t *testing.T) {
	t.Parallel()
	const limit = `{"type":"bandwidth","ingressRate":%d,"ingressBurst":800000,"egressRate":%[1]d,"egressBurst":800000}`
	for name, ours := range map[string][]string{"first by the reference's": {"bandwidth"}, "first by ours": byName()} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := newSide(t, referenceDir(t), ours)
			s.chain("ADD", "a", []string{attackedBridge, fmt.Sprintf(limit, 8_000_000)})
			port := regexp.MustCompile(`veth[0-9a-f]+`).FindString(s.results["a"])
			limits := func() string {
				return s.run("tc", "qdisc", "show", "dev", port) + s.run("tc", "filter", "show", "dev", port, "ingress")
			}
			before := limits()
			if !strings.Contains(before, "rate 8Mbit") {
				t.Fatalf("the pod has no limit:\n%s", before)
			}

			s.network = "more"
			programs := s.programs
			s.programs = newSide(t, referenceDir(t), nil).programs
			pod := s.of("a").NS
			nstest.Run(t, pod, "ip", "link", "set", "eth0", "name", "kept")
			bridge := strings.NewReplacer("10.5.", "10.6.", `"isGateway"`, `"bridge":"cni1","isGateway"`).Replace(attackedBridge)
			prev := s.chain("ADD", "a", []string{bridge})
			s.programs = programs
			nstest.Run(t, pod, "ip", "link", "set", "eth0", "name", "aside")
			nstest.Run(t, pod, "ip", "link", "set", "kept", "name", "eth0")
			call := func(what string) outcome {
				full := `{"cniVersion":"1.0.0","name":"more","stateDir":"STATE","prevResult":` + prev + "," + strings.TrimPrefix(fmt.Sprintf(limit, 1_000_000_000), "{")
				return s.call(verb{plugin: "bandwidth", verb: what, id: "a", conf: full})
			}
			o := call("ADD")
			if e := failure(o.stdout); e == nil || !strings.Contains(e.Msg, "is another of the container's") {
				t.Errorf("ADD: %s", o.stdout)
			}
			if after := limits(); after != before {
				t.Errorf("the limits were\n%s\nand after ADD they are\n%s", before, after)
			}
			if o := call("DEL"); o.status != 0 {
				t.Errorf("DEL: %s", o.stdout)
			}
			if after := limits(); after != before {
				t.Errorf("the limits were\n%s\nand after DEL they are\n%s", before, after)
			}
		})
	}
}
