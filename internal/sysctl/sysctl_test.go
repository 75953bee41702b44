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
	must.That(t, before == "0", "a new namespace has %s = %s", path, before)
	must.Succeed(t, a.Do(func() error {
		changed, err := sysctl.Ensure(path, "1")
		expect.That(t, err == nil && changed, "Ensure: changed %t, %v", changed, err)
		changed, err = sysctl.Ensure(path, "1")
		expect.That(t, err == nil && !changed, "second Ensure: changed %t, %v", changed, err)
		v, err := sysctl.Read(path)
		expect.Equal(t, v, "1", "Read gives")
		return err
	}))
	expect.Equal(t, nstest.Sysctl(t, b, path), before, "the other namespace has")
}

func TestLinkNamesMayHoldDots(t *testing.T) {
	t.Parallel()
	ns := nstest.New(t)
	nstest.Run(t, ns, "ip", "link", "add", "a.b", "type", "veth", "peer", "name", "c")
	expect.Success(t, ns.Do(func() error { return sysctl.Write(sysctl.Link("ipv6", "a.b", "accept_ra"), "0") }))
	expect.Equal(t, nstest.Sysctl(t, ns, "net/ipv6/conf/a.b/accept_ra"), "0", "accept_ra is")
}

func TestErrorsNameTheFileAndTheValue(t *testing.T) {
	t.Parallel()
	expect.That(t, !sysctl.Exists("net/ipv4/conf/no-such-link/rp_filter"),
		"a parameter of a link that is not there exists")
	_, err := sysctl.Read("net/no/such")
	expect.That(t, errors.Is(err, fs.ErrNotExist) && strings.Contains(err.Error(), "/proc/sys/net/no/such"),
		"Read: %v", err)
	err = nstest.New(t).Do(func() error { return sysctl.Write("net/ipv4/ip_forward", "many") })
	expect.Says(t, err, "write many to /proc/sys/net/ipv4/ip_forward: invalid argument", "Write")
}
