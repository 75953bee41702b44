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

func TestDirectoryStaysThatOfItsNamespace(t *testing.T) {
	t.Parallel()
	ns, other := nstest.New(t), nstest.New(t)
	var d *sysctl.Dir
	must.Succeed(t, ns.Do(func() error {
		var err error
		d, err = sysctl.OpenDir("net/ipv6/conf")
		return err
	}))
	defer d.Close()
	// A link that was not there when it was opened.
	nstest.Veth(t, ns, "eth0", other, "eth0")
	use := func() error {
		for i, want := range []bool{true, false} {
			expect.Of(d.Ensure("eth0/accept_ra_defrtr", "0")).Is(t, want, "Ensure, time %d", i+1)
		}
		return d.Write("eth0/accept_ra", "0")
	}
	for name, do := range map[string]func(func() error) error{
		"of the test": func(fn func() error) error { return fn() }, "another": other.Do, "its own": ns.Do,
	} {
		nstest.Sysctl(t, ns, "net/ipv6/conf/eth0/accept_ra", "1")
		nstest.Sysctl(t, ns, "net/ipv6/conf/eth0/accept_ra_defrtr", "1")
		expect.Success(t, do(use), "in the namespace %s", name)
		here, there := nstest.Sysctl(t, ns, "net/ipv6/conf/eth0/accept_ra"), nstest.Sysctl(t, other, "net/ipv6/conf/eth0/accept_ra")
		expect.That(t, here == "0" && there == "1", "in the namespace %s: accept_ra is %s, and %s in the other", name, here, there)
	}
}

func TestDirectorysErrorsNameTheFile(t *testing.T) {
	t.Parallel()
	_, err := sysctl.OpenDir("net/no/such")
	expect.That(t, errors.Is(err, fs.ErrNotExist) && strings.Contains(err.Error(), "/proc/sys/net/no/such"), "OpenDir: %v", err)
	expect.Failure(t, expect.Err(sysctl.OpenDir("net/ipv4/ip_forward")), "a file is opened as a directory")
	d := must.Of(sysctl.OpenDir("net/ipv4/conf")).Get(t)
	defer d.Close()
	if _, err := d.Ensure("none/rp_filter", "0"); !errors.Is(err, fs.ErrNotExist) || !strings.Contains(err.Error(), "/proc/sys/net/ipv4/conf/none/rp_filter") {
		t.Errorf("Ensure: %v", err)
	}
	if err := d.Write("none/rp_filter", "0"); !errors.Is(err, fs.ErrNotExist) || !strings.Contains(err.Error(), "write 0 to /proc/sys/net/ipv4/conf/none/rp_filter") {
		t.Errorf("Write: %v", err)
	}
}
