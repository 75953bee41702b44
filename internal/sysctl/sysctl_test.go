package sysctl_test

import (
	"errors"
	"io/fs"
	"strings"
	"testing"

	"github.com/tombolo-cni/tombolo/internal/sysctl"
	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
)

func TestMain(m *testing.M) { nstest.Main(m) }

func TestParametersAreTheNamespacesOwn(t *testing.T) {
	t.Parallel()
	const path = "net/ipv4/ip_forward"
	a, b := nstest.New(t), nstest.New(t)
	before := nstest.Sysctl(t, b, path)
	if before != "0" {
		t.Fatalf("a new namespace has %s = %s", path, before)
	}
	err := a.Do(func() error {
		changed, err := sysctl.Ensure(path, "1")
		if err != nil || !changed {
			t.Errorf("Ensure: changed %t, %v", changed, err)
		}
		changed, err = sysctl.Ensure(path, "1")
		if err != nil || changed {
			t.Errorf("second Ensure: changed %t, %v", changed, err)
		}
		v, err := sysctl.Read(path)
		expect.Equal(t, v, "1", "Read gives")
		return err
	})
	must.Succeed(t, err)
	expect.Equal(t, nstest.Sysctl(t, b, path), before, "the other namespace has")
}

func TestLinkNamesMayHoldDots(t *testing.T) {
	t.Parallel()
	ns := nstest.New(t)
	nstest.Run(t, ns, "ip", "link", "add", "a.b", "type", "veth", "peer", "name", "c")
	err := ns.Do(func() error { return sysctl.Write(sysctl.Link("ipv6", "a.b", "accept_ra"), "0") })
	expect.Success(t, err)
	expect.Equal(t, nstest.Sysctl(t, ns, "net/ipv6/conf/a.b/accept_ra"), "0", "accept_ra is")
}

func TestErrorsNameTheFileAndTheValue(t *testing.T) {
	t.Parallel()
	if sysctl.Exists("net/ipv4/conf/no-such-link/rp_filter") {
		t.Error("a parameter of a link that is not there exists")
	}
	_, err := sysctl.Read("net/no/such")
	if !errors.Is(err, fs.ErrNotExist) || !strings.Contains(err.Error(), "/proc/sys/net/no/such") {
		t.Errorf("Read: %v", err)
	}
	err = nstest.New(t).Do(func() error { return sysctl.Write("net/ipv4/ip_forward", "many") })
	expect.Says(t, err, "write many to /proc/sys/net/ipv4/ip_forward: invalid argument", "Write")
}
