package bench

import (
	"bytes"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/lease"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
	"github.com/tombolo-cni/tombolo/netns"
)

// Where addresses are leased a node has a bridge from the start, and on it the veth of a
// router, which runs dnsmasq in a namespace of its own. The router has the gateway's
// address, so that results and pods are proven as everybody's are.
const (
	lanBridge    = "br0"
	routerIfname = "eth0"
	dhcpRange    = "10.88.1.0,10.88.250.255,255.255.0.0,"
)

// lan is what a node needs to lease addresses.
type lan struct {
	router  *netns.NS
	mac     net.HardwareAddr // of the router
	server  *daemon
	keeper  *daemon // tombolod, or the reference's daemon
	log     string  // of the server
	leased  string  // the server's file of leases
	records string  // where tombolo keeps its own, on a disk: each is fsynced
	socket  string  // of the reference's daemon
}

func dhcp(name string, rapid bool) feature { return feature{name: name, dhcp: true, rapid: rapid} }

func needDHCP(tb testing.TB) {
	tb.Helper()
	if _, err := exec.LookPath("dnsmasq"); err != nil {
		tb.Skip("dnsmasq is missing, the DHCP server (Debian: apt-get install dnsmasq-base)")
	}
}

// addLAN makes the node's bridge and its router, and starts the server and what keeps the
// leases: the reference's daemon, or tombolod.
func (n *node) addLAN(tb testing.TB) {
	tb.Helper()
	records := must.Of(os.MkdirTemp("/var/tmp", "tombolo-bench-")).Get(tb)
	tb.Cleanup(func() { os.RemoveAll(records) })
	l := &lan{router: nstest.New(tb), records: records, socket: filepath.Join(n.dir, "dhcp.sock")}
	l.log, l.leased = filepath.Join(n.dir, "dnsmasq.log"), filepath.Join(n.dir, "dnsmasq.leases")
	n.lan = l
	nstest.Run(tb, n.host, "ip", "link", "add", lanBridge, "type", "bridge")
	nstest.Run(tb, n.host, "ip", "link", "set", lanBridge, "up")
	nstest.Veth(tb, n.host, "lan0", l.router, routerIfname)
	nstest.Run(tb, n.host, "ip", "link", "set", "lan0", "master", lanBridge)
	subnet := subnets(false)[0]
	nstest.Run(tb, l.router, "ip", "link", "set", "lo", "up")
	nstest.Run(tb, l.router, "ip", "address", "add", netip.PrefixFrom(gatewayOf(subnet), subnet.Bits()).String(), "dev", routerIfname)
	l.mac = must.Of(hardwareAddress(l.router, routerIfname)).Get(tb)
	argv := []string{"dnsmasq", "--keep-in-foreground", "--conf-file=/dev/null", "--no-resolv", "--no-hosts", "--port=0", "--pid-file=",
		// A change of the user or the group would cost it the signal that ends it with us.
		"--user=root", "--group=root", "--bind-interfaces", "--interface=" + routerIfname, "--except-interface=lo", "--dhcp-authoritative",
		"--no-ping", // else it waits before each OFFER whether the address answers
		"--dhcp-range=" + dhcpRange + "1h", "--dhcp-lease-max=60000", "--dhcp-leasefile=" + l.leased, "--log-facility=" + l.log}
	if n.feature.renewed {
		// Option 58 is when to renew, in seconds. The lease itself is long enough to outlast
		// any delay. A thousand leases in a file that is written anew with each change would
		// keep the server from its work.
		argv = append(argv, "--dhcp-option=58,60", "--leasefile-ro")
	}
	if n.feature.rapid {
		argv = append(argv, "--dhcp-rapid-commit")
	}
	l.server = startDaemon(tb, l.router, l.log+".err", func() bool {
		text, _ := os.ReadFile(l.log)
		return strings.Contains(string(text), "DHCP, IP range")
	}, argv...)
	if n.name == reference {
		path, _ := peer("dhcp")
		// It loses the first packet of some ADDs, since it sends before the link carries any,
		// and asks again after ten seconds unless it is told to do so after one.
		l.keeper = startDaemon(tb, n.host, l.log+".keeper", func() bool {
			conn, err := net.Dial("unix", l.socket)
			if err == nil {
				conn.Close()
			}
			return err == nil
		}, path, "daemon", "-socketpath", l.socket, "-timeout", "1s")
		return
	}
	l.keeper = startDaemon(tb, n.host, l.log+".keeper", func() bool {
		leases, err := lease.Open(records)
		return err == nil && leases.CheckKeeper() == nil
	}, program(tb, "tombolod"), "--leases", records, "--state", filepath.Join(n.dir, "state"), "--log-level", "warn")
}

// explain adds to an error what the node's daemons said last.
func (n *node) explain(err error) error {
	if n.lan != nil {
		err = fmt.Errorf("%w\nserver: %s\nkeeper: %s", err, n.lan.server.said(), n.lan.keeper.said())
	}
	return err
}

// leases are the addresses that the server has given, by dnsmasq's file: time, MAC,
// address, name and client's identity, separated by spaces. The server writes it anew with
// each change, from the beginning: a reader may meet it while it is short.
func (l *lan) leases() (map[netip.Addr]bool, error) {
	text, err := os.ReadFile(l.leased)
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, err
	}
	found := map[netip.Addr]bool{}
	for line := range strings.Lines(string(text)) {
		if fields := strings.Fields(line); len(fields) > 2 {
			if address, err := netip.ParseAddr(fields[2]); err == nil {
				found[address] = true
			}
		}
	}
	return found, nil
}

// leaseOf is the address that a pod's result has.
func leaseOf(p *pod) (netip.Addr, error) {
	ips, err := addresses(p.result)
	if err != nil || len(ips) == 0 {
		return netip.Addr{}, fmt.Errorf("no address in result %q: %w", p.result, err)
	}
	address, _ := netip.AddrFromSlice(ips[0].Address.IP)
	return address.Unmap(), nil
}

// proveLease waits until the server has a pod's lease in its file, or no more.
func (n *node) proveLease(p *pod, wanted bool) error {
	address, err := leaseOf(p)
	for until := time.Now().Add(patience); err == nil; time.Sleep(5 * time.Millisecond) {
		var leases map[netip.Addr]bool
		leases, err = n.lan.leases()
		switch {
		case err == nil && leases[address] == wanted:
			return nil
		case err == nil && time.Now().After(until):
			err = fmt.Errorf("the server's lease of %s: %t, want %t", address, !wanted, wanted)
		}
	}
	return err
}

// introduce tells a pod and its router each other's MAC address for good. The kernel has
// one table of neighbours for all namespaces together, of 1,024 by default, and drops
// packets, also those of others on this machine, when it is full. Permanent neighbours
// are not counted.
func (n *node) introduce(p *pod) error {
	address, err := leaseOf(p)
	if err != nil {
		return err
	}
	mac, err := hardwareAddress(p.ns, podIfname)
	if err != nil {
		return err
	}
	know := func(ns *netns.NS, address netip.Addr, mac net.HardwareAddr, link string) error {
		_, err := nstest.Try(ns, "ip", "neigh", "replace", address.String(), "lladdr", mac.String(), "nud", "permanent", "dev", link)
		return err
	}
	return errors.Join(know(n.lan.router, address, mac, routerIfname), know(p.ns, gatewayOf(subnets(false)[0]), n.lan.mac, podIfname))
}

func hardwareAddress(ns *netns.NS, name string) (net.HardwareAddr, error) {
	var link *net.Interface
	err := ns.Do(func() error {
		var err error
		link, err = net.InterfaceByName(name)
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("look up %s: %w", name, err)
	}
	return link.HardwareAddr, nil
}

// daemon is a program that runs beside the measurement, and ends with it.
type daemon struct {
	cmd    *exec.Cmd
	output string // the file that has what it wrote
	ended  chan struct{}
}

// startDaemon runs a program in a namespace and waits until it is ready.
func startDaemon(tb testing.TB, ns *netns.NS, output string, ready func() bool, argv ...string) *daemon {
	tb.Helper()
	file, err := os.Create(output)
	must.Succeed(tb, err)
	defer file.Close()
	d := &daemon{cmd: exec.Command(argv[0], argv[1:]...), output: output, ended: make(chan struct{})}
	d.cmd.Stdout, d.cmd.Stderr = file, file
	d.cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: unix.SIGKILL}
	started := make(chan error, 1)
	go func() {
		defer close(d.ended)
		_ = ns.Do(func() error {
			err := d.cmd.Start()
			started <- err
			if err == nil {
				// Here, since the daemon gets its signal when the thread ends that started it.
				err = d.cmd.Wait()
			}
			return err
		})
	}()
	must.Succeed(tb, <-started, "start %s", argv[0])
	tb.Cleanup(func() {
		_ = d.cmd.Process.Kill()
		<-d.ended
	})
	limit := time.After(patience)
	for !ready() {
		select {
		case <-d.ended:
			tb.Fatalf("%s has ended: %s", argv[0], d.said())
		case <-limit:
			tb.Fatalf("%s is not ready after %s: %s", argv[0], patience, d.said())
		case <-time.After(5 * time.Millisecond):
		}
	}
	return d
}

func (d *daemon) said() string {
	text, err := os.ReadFile(d.output)
	if err != nil {
		return err.Error()
	}
	return string(bytes.TrimSpace(text[max(0, len(text)-2048):]))
}

// cpu is the user and system time of the daemon's threads, those that ended included, to
// the nanosecond: the clock of clock_getcpuclockid(3).
func (d *daemon) cpu() (time.Duration, error) {
	const scheduled = 2 // CPUCLOCK_SCHED of linux/posix-timers.h, of a whole process
	var used unix.Timespec
	if err := unix.ClockGettime(int32(^d.cmd.Process.Pid<<3|scheduled), &used); err != nil {
		return 0, fmt.Errorf("read CPU time of %s: %w", d.cmd.Path, err)
	}
	return time.Duration(used.Nano()), nil
}

// status is a number of proc_pid_status(5), without its unit.
func (d *daemon) status(name string) (int, error) {
	text, err := os.ReadFile("/proc/" + strconv.Itoa(d.cmd.Process.Pid) + "/status")
	for line := range strings.Lines(string(text)) {
		key, value, _ := strings.Cut(line, ":")
		if fields := strings.Fields(value); key == name && len(fields) > 0 {
			return strconv.Atoi(fields[0])
		}
	}
	return 0, fmt.Errorf("the status of %s has no %s: %w", d.cmd.Path, name, err)
}
