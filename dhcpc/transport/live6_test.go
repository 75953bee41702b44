package transport_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/insomniacslk/dhcp/dhcpv6"
	sockets "github.com/mdlayher/packet"

	"github.com/tombolo-cni/tombolo"
	"github.com/tombolo-cni/tombolo/dhcpc"
	"github.com/tombolo-cni/tombolo/dhcpc/dhcp6"
	"github.com/tombolo-cni/tombolo/dhcpc/transport"
	"github.com/tombolo-cni/tombolo/internal/nstest"
	"github.com/tombolo-cni/tombolo/netns"
)

// lan6 is a bridge with a server in a namespace of its own at one port and a pod at another.
type lan6 struct {
	host, pod, server *netns.NS
	eth0, port        int // the pod's end of its link, and the host's
}

const server6, linkLocal6 = "fd00:9::1", "fe80::7"

func newLAN6(t testing.TB) *lan6 {
	t.Helper()
	l := &lan6{host: nstest.New(t), pod: nstest.New(t), server: nstest.New(t)}
	nstest.Run(t, l.host, "ip", "link", "add", "br0", "type", "bridge", "forward_delay", "0", "mcast_snooping", "0")
	nstest.Run(t, l.host, "ip", "link", "set", "br0", "up")
	l.eth0, l.port = nstest.Veth(t, l.pod, "eth0", l.host, "pod")
	nstest.Veth(t, l.server, "eth0", l.host, "server")
	for _, port := range []string{"pod", "server"} {
		nstest.Run(t, l.host, "ip", "link", "set", port, "master", "br0")
	}
	nstest.Run(t, l.server, "ip", "address", "add", server6+"/64", "dev", "eth0", "nodad")
	nstest.Run(t, l.server, "ip", "link", "set", "lo", "up")
	nstest.Run(t, l.server, "ip", "address", "add", "fe80::1/64", "dev", "eth0", "nodad")
	nstest.Run(t, l.pod, "ip", "address", "add", linkLocal6+"/64", "dev", "eth0", "nodad")
	return l
}

func (l *lan6) client(t testing.TB, change func(*dhcp6.Config)) *dhcp6.Client {
	t.Helper()
	cfg := &dhcp6.Config{DUID: dhcp6.DUID([16]byte{9, 7}), IAID: 7, HostName: "pod-7", Timeout: longEnough, InUse: l.inUse(t),
		Dial: transport.Dialer6(&transport.Config{NetNS: l.pod, Link: l.eth0})}
	if change != nil {
		change(cfg)
	}
	c, err := dhcp6.New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// inUse has the pod's kernel look for another host with the address.
func (l *lan6) inUse(t testing.TB) func(context.Context, *dhcp6.Lease) (bool, error) {
	return func(_ context.Context, lease *dhcp6.Lease) (bool, error) {
		nstest.Run(t, l.pod, "ip", "address", "replace", lease.Address.String()+"/128", "dev", "eth0")
		shown := ""
		until(t, func() bool {
			shown = nstest.Run(t, l.pod, "ip", "-6", "-o", "address", "show", "dev", "eth0", "to", lease.Address.String())
			return shown == "" || strings.Contains(shown, "dadfailed") || !strings.Contains(shown, "tentative")
		})
		if shown != "" && !strings.Contains(shown, "dadfailed") {
			return false, nil
		}
		if shown != "" {
			nstest.Run(t, l.pod, "ip", "address", "del", lease.Address.String()+"/128", "dev", "eth0")
		}
		return true, nil
	}
}

// outside hears at the host's end of the pod's link.
func (l *lan6) outside(t testing.TB) func(*dhcp6.Config) {
	return func(c *dhcp6.Config) {
		w, err := transport.DialWitness6(l.witness(t))
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { w.Close() })
		dial := c.Dial
		c.Dial = func(ctx context.Context) (dhcp6.Transport, error) {
			conn, err := dial(ctx)
			if err != nil {
				return nil, err
			}
			return w.For(conn), nil
		}
	}
}

func (l *lan6) witness(t testing.TB) *transport.Config {
	mac, err := net.ParseMAC(nstest.MAC(t, l.pod, "eth0"))
	if err != nil {
		t.Fatal(err)
	}
	return &transport.Config{NetNS: l.host, Link: l.port, MAC: mac}
}

// dueAt is a lease as if it had been granted so long ago that a time of it is now.
func dueAt(l *dhcp6.Lease, at time.Time) *dhcp6.Lease {
	moved, back := *l, time.Until(at)
	for _, one := range []*time.Time{&moved.Obtained, &moved.Renew, &moved.Rebind, &moved.Preferred, &moved.Expire} {
		if !one.IsZero() {
			*one = one.Add(-back)
		}
	}
	return &moved
}

// renewed is the lease that a client has of the first thing that happens to one.
func renewed(t testing.TB, c *dhcp6.Client, l *dhcp6.Lease) *dhcp6.Lease {
	t.Helper()
	ctx, cancel := context.WithCancel(soon(t))
	defer cancel()
	var got *dhcp6.Lease
	err := c.Run(ctx, l, func(_, next *dhcp6.Lease) error {
		got = next
		cancel()
		return nil
	})
	if !errors.Is(err, context.Canceled) || got == nil {
		t.Fatalf("%v, %v", got, err)
	}
	return got
}

// life is that of a lease, told by the server's file of leases.
func (l *lan6) life(t *testing.T, change func(*dhcp6.Config), holds func(netip.Addr) bool) {
	t.Helper()
	c := l.client(t, change)
	ctx := soon(t)
	lease, err := c.Acquire(ctx)
	if err != nil {
		t.Fatal(err)
	}
	if !netip.MustParsePrefix("fd00:9::/64").Contains(lease.Address) || len(lease.DNS) != 1 || lease.DNS[0] != netip.MustParseAddr("fd00:9::53") ||
		strings.Join(lease.Search, " ") != "pod.lan" || len(lease.Ignored) != 0 {
		t.Errorf("lease %+v", lease)
	}
	until(t, func() bool { return holds(lease.Address) })
	for name, at := range map[string]time.Time{"renewal": lease.Renew, "rebinding": lease.Rebind} {
		if got := renewed(t, c, dueAt(lease, at)); got.Address != lease.Address || !got.Obtained.After(lease.Obtained) {
			t.Errorf("%s: %+v", name, got)
		}
	}
	if err := c.Release(ctx, lease); err != nil {
		t.Fatal(err)
	}
	until(t, func() bool { return !holds(lease.Address) })
	info, err := c.Inform(ctx)
	if err != nil || len(info.DNS) != 1 || strings.Join(info.Search, " ") != "pod.lan" {
		t.Errorf("information %+v, %v", info, err)
	}
	wanted := netip.MustParseAddr("fd00:9::1aa")
	again, err := l.client(t, func(c *dhcp6.Config) { change(c); c.Address = wanted }).Acquire(ctx)
	if err != nil || again.Address != wanted {
		t.Errorf("leased %v, %v, and asked for %s", again, err, wanted)
	}
}

func dnsmasq6(t testing.TB, l *lan6, pool string) func(netip.Addr) bool {
	t.Helper()
	d := nstest.NewDnsmasq(t, l.server, "eth0", "--dhcp-range="+pool+",64,120s", "--dhcp-option=option6:dns-server,[fd00:9::53]", "--dhcp-option=option6:domain-search,pod.lan")
	return func(a netip.Addr) bool { return strings.Contains(d.Leased(), " "+a.String()+" ") }
}

func TestDnsmasqLeasesIPv6(t *testing.T) {
	t.Parallel()
	for name, change := range map[string]func(*testing.T, *lan6, *dhcp6.Config){
		"by four messages": func(*testing.T, *lan6, *dhcp6.Config) {},
		"by two, heard outside": func(t *testing.T, l *lan6, c *dhcp6.Config) {
			c.RapidCommit = true
			l.outside(t)(c)
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			l := newLAN6(t)
			holds := dnsmasq6(t, l, "fd00:9::100,fd00:9::1ff")
			l.life(t, func(c *dhcp6.Config) { change(t, l, c) }, holds)
		})
	}
}

func TestKeaLeasesIPv6(t *testing.T) {
	t.Parallel()
	l := newLAN6(t)
	holds := kea6(t, l)
	l.life(t, func(c *dhcp6.Config) {
		c.RapidCommit = true
		l.outside(t)(c)
	}, holds)
}

// kea6 starts a server, and tells what it holds by the file that it appends to.
func kea6(t testing.TB, l *lan6) func(netip.Addr) bool {
	t.Helper()
	nstest.Need(t, "kea-dhcp6")
	type conf = map[string]any
	dir := t.TempDir()
	leases, log := filepath.Join(dir, "leases.csv"), filepath.Join(dir, "log")
	text, err := json.Marshal(conf{"Dhcp6": conf{
		"interfaces-config": conf{"interfaces": []string{"eth0"}},
		"lease-database":    conf{"type": "memfile", "name": leases, "lfc-interval": 0},
		"server-id":         conf{"type": "LL", "persist": false},
		"subnet6": []conf{{
			"id": 1, "subnet": "fd00:9::/64", "interface": "eth0", "pools": []conf{{"pool": "fd00:9::100 - fd00:9::1ff"}},
			"valid-lifetime": 4000, "preferred-lifetime": 3000, "renew-timer": 1000, "rebind-timer": 2000, "rapid-commit": true,
			"option-data": []conf{{"name": "dns-servers", "data": "fd00:9::53"}, {"name": "domain-search", "data": "pod.lan"}},
		}},
		"loggers": []conf{{"name": "kea-dhcp6", "severity": "INFO", "output_options": []conf{{"output": log, "maxsize": 0}}}},
	}})
	if err == nil {
		err = os.WriteFile(filepath.Join(dir, "kea.json"), text, 0o600)
	}
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command("kea-dhcp6", "-c", filepath.Join(dir, "kea.json"))
	cmd.Env = append(os.Environ(), "KEA_LOCKFILE_DIR="+dir, "KEA_PIDFILE_DIR="+dir)
	var out strings.Builder
	cmd.Stdout, cmd.Stderr = &out, &out
	if err := l.server.Do(cmd.Start); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
		if t.Failed() {
			t.Logf("kea: %s\n%s", &out, nstest.ReadIf(t, log))
		}
	})
	until(t, func() bool { return strings.Contains(nstest.ReadIf(t, log), "DHCP6_STARTED ") })
	return func(a netip.Addr) bool {
		held := false
		for line := range strings.Lines(nstest.ReadIf(t, leases)) {
			if field := strings.Split(line, ","); len(field) > 4 && field[0] == a.String() {
				held = field[2] != "0" // valid_lifetime
			}
		}
		return held
	}
}

// The kernel's duplicate address detection finds another host: the server hears of it, and gives another
// address.
func TestAnIPv6AddressThatAnotherHostHasIsDeclined(t *testing.T) {
	t.Parallel()
	l := newLAN6(t)
	dnsmasq6(t, l, "fd00:9::100,fd00:9::101")
	other := nstest.New(t)
	nstest.Veth(t, other, "eth0", l.host, "other")
	nstest.Run(t, l.host, "ip", "link", "set", "other", "master", "br0")
	free := l.client(t, nil)
	taken, err := free.Acquire(soon(t))
	if err == nil {
		err = free.Release(soon(t), taken)
	}
	if err != nil {
		t.Fatal(err)
	}
	nstest.Run(t, l.pod, "ip", "address", "del", taken.Address.String()+"/128", "dev", "eth0")
	nstest.Run(t, other, "ip", "address", "add", taken.Address.String()+"/64", "dev", "eth0", "nodad")
	nstest.Sysctl(t, l.pod, "net/ipv6/conf/eth0/accept_dad", "1")
	var looked []netip.Addr
	c := l.client(t, func(c *dhcp6.Config) {
		l.outside(t)(c)
		look := c.InUse
		c.InUse = func(ctx context.Context, lease *dhcp6.Lease) (bool, error) {
			looked = append(looked, lease.Address)
			return look(ctx, lease)
		}
	})
	got, err := c.Acquire(soon(t))
	if err != nil || got.Address == taken.Address || len(looked) != 2 || looked[0] != taken.Address {
		t.Errorf("leased %v, %v after a look for %v; another host has %s", got, err, looked, taken.Address)
	}
}

// serve6 answers every SOLICIT with an address at once.
func serve6(t testing.TB, ns *netns.NS, link string, address netip.Addr) {
	t.Helper()
	var conn net.PacketConn
	err := ns.Do(func() error {
		index, err := net.InterfaceByName(link)
		if err != nil {
			return err
		}
		conn, err = net.ListenMulticastUDP("udp6", index, &net.UDPAddr{IP: net.ParseIP(dhcp6.Group), Port: dhcp6.ServerPort, Zone: link})
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		buf := make([]byte, 1500)
		for {
			n, from, err := conn.ReadFrom(buf)
			if err != nil {
				return
			}
			m, err := dhcpv6.MessageFromBytes(buf[:n])
			if err != nil || m.MessageType != dhcpv6.MessageTypeSolicit {
				continue
			}
			reply, err := dhcpv6.NewReplyFromMessage(m, dhcpv6.WithServerID(&dhcpv6.DUIDUUID{}), dhcpv6.WithOption(&dhcpv6.OptIANA{
				IaId: m.Options.OneIANA().IaId, Options: dhcpv6.IdentityOptions{Options: []dhcpv6.Option{
					&dhcpv6.OptIAAddress{IPv6Addr: address.AsSlice(), PreferredLifetime: time.Hour, ValidLifetime: time.Hour}}}}))
			if err != nil {
				t.Error(err)
				return
			}
			reply.AddOption(&dhcpv6.OptionGeneric{OptionCode: dhcpv6.OptionRapidCommit})
			_, _ = conn.WriteTo(reply.ToBytes(), from)
		}
	}()
	t.Cleanup(func() { conn.Close(); <-done })
}

// A pod's own server gives it the router's address. A client that hears in the pod believes it.
func TestAPodThatAnswersItselfByDHCPv6IsNotBelieved(t *testing.T) {
	t.Parallel()
	for _, way := range nstest.Diversions() {
		t.Run(way, func(t *testing.T) {
			t.Parallel()
			l := newLAN6(t)
			witness := l.outside(t)
			rogue := nstest.Divert(t, l.pod, "eth0", way)
			l.eth0 = nstest.Index(t, l.pod, "eth0")
			nstest.Run(t, l.pod, "ip", "address", "replace", linkLocal6+"/64", "dev", "eth0", "nodad")
			nstest.Run(t, rogue, "ip", "address", "add", "fe80::66/64", "dev", "eth0", "nodad")
			forged := netip.MustParseAddr("fd00:9::66")
			serve6(t, rogue, "eth0", forged)
			for _, inPod := range []bool{true, false} {
				c := l.client(t, func(c *dhcp6.Config) {
					c.RapidCommit, c.InUse = true, nil
					if !inPod {
						c.Timeout = 3 * time.Second
						witness(c)
					}
				})
				lease, err := c.Acquire(soon(t))
				switch {
				case inPod && (err != nil || lease.Address != forged):
					t.Fatalf("the pod's server did not answer: %v, %v", lease, err)
				case !inPod && !errors.Is(err, dhcpc.ErrTimeout):
					t.Errorf("the pod leased %v, %v by its own word", lease, err)
				}
			}
		})
	}
}

func TestAWitnessOfIPv6HearsWhatIsForItsClientAlone(t *testing.T) {
	t.Parallel()
	l := newLAN6(t)
	w, err := transport.DialWitness6(l.witness(t))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { w.Close() })
	say := func(ns *netns.NS, to string, port int, text string) {
		t.Helper()
		if err := ns.Do(func() error {
			// By number: package net remembers the names of one namespace.
			link, err := net.InterfaceByName("eth0")
			if err != nil {
				return err
			}
			conn, err := net.DialUDP("udp6", nil, &net.UDPAddr{IP: net.ParseIP(to), Port: port, Zone: strconv.Itoa(link.Index)})
			if err != nil {
				return err
			}
			defer conn.Close()
			_, err = conn.Write([]byte(text))
			return err
		}); err != nil {
			t.Fatal(err)
		}
	}
	say(l.server, dhcp6.Group, dhcp6.ClientPort, "to all")
	say(l.server, linkLocal6, dhcp6.ServerPort, "to another port")
	say(l.pod, dhcp6.Group, dhcp6.ClientPort, "by the pod")
	say(l.server, linkLocal6, dhcp6.ClientPort, "to the client")
	if got, err := w.Receive(soon(t), time.Time{}); err != nil || string(got) != "to the client" {
		t.Errorf("%q, %v", got, err)
	}
	if got, err := w.Receive(soon(t), time.Now()); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("%q, %v", got, err)
	}
}

// listen6 listens where servers do.
func listen6(t testing.TB, ns *netns.NS, link string) *net.UDPConn {
	t.Helper()
	var conn *net.UDPConn
	if err := ns.Do(func() error {
		l, err := net.InterfaceByName(link)
		if err != nil {
			return err
		}
		conn, err = net.ListenMulticastUDP("udp6", l, &net.UDPAddr{IP: net.ParseIP(dhcp6.Group), Port: dhcp6.ServerPort})
		return err
	}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	if err := conn.SetReadDeadline(time.Now().Add(longEnough)); err != nil {
		t.Fatal(err)
	}
	return conn
}

// A bridge's port has no address: what is to reach servers from there is a frame of its own.
func TestAMessageGoesOutByAPortInThePodsName(t *testing.T) {
	t.Parallel()
	l := newLAN6(t)
	server := listen6(t, l.server, "eth0")
	mac, message := net.HardwareAddr{2, 0, 10, 9, 0, 7}, []byte{8, 1, 2, 3, 4} // of an odd length
	by := &transport.Config{NetNS: l.host, Link: nstest.Index(t, l.host, "server"), MAC: mac}
	if err := transport.Send6(&transport.Config{NetNS: by.NetNS, Link: by.Link}, message); !errors.Is(err, unix.EADDRNOTAVAIL) {
		t.Errorf("without a MAC address: %v: the port has an address, and this tests nothing", err)
	}
	var out *sockets.Conn
	if err := l.host.Do(func() (err error) {
		out, err = sockets.Listen(&net.Interface{Index: by.Link}, sockets.Raw, unix.ETH_P_ALL, nil)
		return err
	}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { out.Close() })
	if err := out.SetReadDeadline(time.Now().Add(longEnough)); err != nil {
		t.Fatal(err)
	}
	// leaves gives the client's next frame on its way out.
	leaves := func() []byte {
		t.Helper()
		frame := make([]byte, 2000)
		for {
			n, _, err := out.ReadFrom(frame)
			if err != nil {
				t.Fatal(err)
			}
			if n > 12 && bytes.Equal(frame[6:12], mac) {
				return frame[:n]
			}
		}
	}
	if err := transport.Send6(by, message); err != nil {
		t.Fatal(err)
	}
	plain := leaves()
	heard := make([]byte, 100)
	n, from, err := server.ReadFromUDP(heard)
	if err != nil || !bytes.Equal(heard[:n], message) || from.Port != dhcp6.ClientPort || from.IP.String() != "fe80::aff:fe09:7" {
		t.Errorf("the server heard %x from %v, %v", heard[:n], from, err)
	}
	by.VLAN = 0x123
	if err := transport.Send6(by, message); err != nil {
		t.Fatal(err)
	}
	if got, want := leaves(), slices.Insert(plain, 12, 0x81, 0, 1, 0x23); !bytes.Equal(got, want) {
		t.Errorf("with a tag it is\n%x, want\n%x", got, want)
	}
}

func TestDialingIPv6SaysWhatIsWrong(t *testing.T) {
	t.Parallel()
	l := newLAN6(t)
	for name, err := range map[string]error{
		"no configuration": second6(transport.DialUDP6(nil)), "no link": second6(transport.DialUDP6(&transport.Config{})),
		"a message without a link": transport.Send6(nil, nil), "a tag without a MAC address": transport.Send6(&transport.Config{Link: 1, VLAN: 5}, nil),
		"a MAC address of 8 bytes":   transport.Send6(&transport.Config{Link: 1, MAC: make([]byte, 8)}, nil),
		"a message that is too long": transport.Send6(&transport.Config{NetNS: l.pod, Link: l.eth0, MAC: make([]byte, 6)}, make([]byte, 1<<16)),
		"a witness of nothing":       second6(transport.DialWitness6(nil)),
	} {
		if !errors.Is(err, tombolo.ErrInvalid) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if _, err := transport.DialWitness6(&transport.Config{Link: 1}); err == nil {
		t.Error("a witness without the client's MAC address")
	}
	// A program of the pod's has the port, and shares it with nobody.
	var conn *net.UDPConn
	if err := l.pod.Do(func() error {
		var err error
		conn, err = net.ListenUDP("udp6", &net.UDPAddr{Port: dhcp6.ClientPort})
		return err
	}); err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	if _, err := transport.DialUDP6(&transport.Config{NetNS: l.pod, Link: l.eth0}); !errors.Is(err, unix.EADDRINUSE) {
		t.Errorf("of a port that is in use: %v", err)
	}
}

func second6[T any](_ T, err error) error { return err }
