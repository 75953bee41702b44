package main

import (
	"strings"
	"testing"

	"github.com/tombolo-cni/tombolo/internal/nstest"
	"github.com/tombolo-cni/tombolo/netns"
)

func TestResultMustHaveTheAddresses(t *testing.T) {
	t.Parallel()
	const (
		v4 = `{"address":"10.88.0.2/16","gateway":"10.88.0.1"}`
		v6 = `{"address":"fd00:88::2/64","gateway":"fd00:88::1"}`
	)
	for _, test := range []struct {
		name, result string
		fails        string // empty: it does not
	}{
		{"both families", `{"ips":[` + v4 + `,` + v6 + `]}`, ""},
		{"IPv6 first", `{"ips":[` + v6 + `,` + v4 + `]}`, "want one of 10.88.0.0/16"},
		{"one family", `{"ips":[` + v4 + `]}`, "1 addresses, want 2"},
		{"another gateway", `{"ips":[` + v4 + `,` + strings.Replace(v6, "::1", "::9", 1) + `]}`, "by gateway fd00:88::9"},
		{"another subnet", `{"ips":[` + strings.Replace(v4, "10.88.0.2", "10.99.0.2", 1) + `,` + v6 + `]}`, "10.99.0.2"},
		{"nothing", ``, "decode result"},
		{"rubbish", `[]`, "decode result"},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			err := checkResult([]byte(test.result), subnets(true))
			if (err == nil) != (test.fails == "") || err != nil && !strings.Contains(err.Error(), test.fails) {
				t.Errorf("got %v, want %q", err, test.fails)
			}
		})
	}
}

func TestPingIsAnswered(t *testing.T) {
	t.Parallel()
	ns := nstest.New(t)
	nstest.Run(t, ns, "ip", "link", "set", "lo", "up")
	for _, to := range []string{"127.0.0.1", "::1"} {
		if err := ping(ns, nstest.Addr(to), pingLimit); err != nil {
			t.Error(err)
		}
	}
}

// TestPingOutlastsErrors sets the link up only after a first error.
func TestPingOutlastsErrors(t *testing.T) {
	t.Parallel()
	ns := nstest.New(t)
	if err := ping(ns, nstest.Addr("127.0.0.1"), pingAgain); err == nil {
		t.Fatal("a link that is down answered")
	}
	pinged := make(chan error)
	go func() { pinged <- ping(ns, nstest.Addr("127.0.0.1"), pingLimit) }()
	nstest.Run(t, ns, "ip", "link", "set", "lo", "up")
	if err := <-pinged; err != nil {
		t.Error(err)
	}
}

func TestPingOfNobodyFails(t *testing.T) {
	t.Parallel()
	ns := nstest.New(t)
	for _, to := range []string{"10.88.0.1", "fd00:88::1"} {
		err := ping(ns, nstest.Addr(to), 2*pingAgain)
		if err == nil || !strings.Contains(err.Error(), to) {
			t.Errorf("%s, to which there is no route: %v", to, err)
		}
	}
}

func TestLeftoversAreFound(t *testing.T) {
	t.Parallel()
	host, pod := nstest.New(t), nstest.New(t)
	n := &node{contender: floor, ns: namedNS{NS: host}, state: t.TempDir()}
	path := nstest.Path(t, pod)
	if err := proveGone(n, []string{"lo"}, path); err != nil {
		t.Errorf("nothing is left, but: %v", err)
	}
	before, err := n.inventory()
	if err != nil {
		t.Fatal(err)
	}
	for name, ns := range map[string]*netns.NS{"in the host's namespace": host, "in the pod's": pod} {
		nstest.Run(t, ns, "ip", "link", "add", "left0", "type", "bridge")
		if err := proveGone(n, []string{"lo"}, path); err == nil || !strings.Contains(err.Error(), "left0") {
			t.Errorf("a link %s: %v", name, err)
		}
		nstest.Run(t, ns, "ip", "link", "delete", "left0")
	}
	nstest.Run(t, host, "nft", "add table inet left")
	after, err := n.inventory()
	if err != nil {
		t.Fatal(err)
	}
	if after == before {
		t.Errorf("a table more is not in the inventory: %s", after)
	}
}
