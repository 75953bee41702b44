package lan

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"maps"
	"math/rand/v2"
	"net"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/bridge/share"
	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
	"github.com/tombolo-cni/tombolo/netns"
)

// plain is a network whose pods are plain machines of the LAN, with fixed addresses unless an IPAM is among the fields.
func plain(t testing.TB, fields object) object {
	all := object{"defaultRoute": "router", "lanGuard": false, "ipam": addressesFrom(t, "192.168.50.150", "fd50::150")}
	maps.Copy(all, fields)
	return all
}

// addressesFrom has host-local take addresses from these on.
func addressesFrom(t testing.TB, first ...string) object {
	var ranges []any
	for _, text := range first {
		address := nstest.Addr(text)
		bits := map[bool]int{true: 24, false: 64}[address.Is4()]
		ranges = append(ranges, []any{object{"subnet": netip.PrefixFrom(address, bits).Masked().String(), "rangeStart": text}})
	}
	return object{"type": "host-local", "dataDir": t.TempDir(), "ranges": ranges}
}

// Everybody reaches everybody once, by everybody's own MAC, and nobody else hears of it.
func TestHostPodsAndLANAreNeighbours(t *testing.T) {
	for _, guard := range []bool{false, true} {
		t.Run(fmt.Sprint("lanGuard ", guard), func(t *testing.T) {
			t.Parallel()
			l, _ := newLab(t)
			n := l.network(plain(t, object{"lanGuard": guard, "ipv6": "slaac", "ipam": staticAddresses(t.TempDir())}))
			a, b := l.newPod("a"), l.newPod("b")
			for i, p := range []*pod{a, b} {
				n.add(p)
				if !guard { // which lets out no address that is neither known nor made of the MAC
					ip(t, p.ns, fmt.Sprintf("address add fd50::7e3:1b0d:42:%d/64 dev %s nodad", i+1, nic)) // as a temporary one
				}
				l.ready(p.ns)
			}
			ip(t, l.router.ns, "route add 255.255.255.255/32 dev "+nic)
			all := l.tapped(a, b)
			all.talk()
			all.resolve(guard)
			all.announce()
		})
	}
}

// addresses returns those of a machine: both families', link-local, and temporary.
func (m *machine) addresses() (list []netip.Addr) {
	m.Helper()
	for line := range strings.Lines(nstest.Run(m, m.ns, "ip", "-o", "address", "show", "dev", nic)) {
		list = append(list, must.Of(netip.ParsePrefix(strings.Fields(line)[3])).Get(m).Addr())
	}
	return list
}

// talk has each machine ask each other at each of its addresses.
func (all *everyone) talk() {
	all.Helper()
	cells := 0
	for _, to := range all.machines {
		for _, address := range to.addresses() {
			for _, from := range all.machines {
				beyond := from.name == "internet" || to.name == "internet"
				if from == to || beyond && (address.IsLinkLocalUnicast() || from.name == "router" || to.name == "router") {
					continue
				}
				at := address
				if at.IsLinkLocalUnicast() {
					at = at.WithZone(fmt.Sprint(from.index)) // package net caches names
				}
				cells++
				text := fmt.Sprintf("ask %s %s %d.", from.name, at, cells)
				if err := from.question(netip.AddrPortFrom(at, bellPort), text); err != nil {
					all.Errorf("%s to %s at %s: %v", from.name, to.name, at, err)
					continue
				}
				expect.Equal(all, to.heard(text), 1, "%s: heard by the server", text)
				for _, m := range all.machines {
					want := 0
					if m == from || m == to || m.name == "router" && beyond {
						want = 1
					}
					expect.Equal(all, m.count(containing(text)), want, "%s: frames that %s received", text, m.name)
				}
				if beyond {
					continue
				}
				for _, f := range from.frames() {
					if f.came() && bytes.Contains(f.data, []byte(text)) {
						expect.Equal(all, net.HardwareAddr(f.data[6:12]).String(), to.mac.String(), "%s: the MAC of the answer", text)
					}
				}
				if from.inside() && to.inside() {
					for _, f := range all.onLAN[1].frames() {
						expect.That(all, !bytes.Contains(f.data, []byte(text)), "%s: on the wire", text)
					}
				}
			}
		}
	}
	all.Logf("%d cells", cells)
}

// inside reports whether a machine is the host or one of its pods.
func (m *machine) inside() bool {
	return !slices.Contains([]string{"other", "router", "internet"}, m.name)
}

// resolve has each machine ask for each other's MAC, and whether its addresses are taken.
func (all *everyone) resolve(guard bool) {
	all.Helper()
	type asked struct {
		from, to      *machine
		mark          string
		probe, silent bool
	}
	var list []asked
	for _, from := range all.onLAN {
		for _, to := range all.onLAN {
			if from == to {
				continue
			}
			for _, probe := range []bool{false, true} {
				// A guard keeps a pod from asking whether another's address is taken: it has none of those.
				silent := guard && probe && from.inside() && from.name != "host"
				q := asked{from, to, fmt.Sprintf("who has %s? %s %t.", to.name, from.name, probe), probe, silent}
				from.send(arpRequest(from, to, probe, q.mark))
				list = append(list, q)
			}
		}
	}
	all.settle()
	for _, q := range list {
		for _, m := range all.onLAN {
			want := 1
			if m == q.from || q.silent {
				want = 0
			}
			expect.Equal(all, m.count(containing(q.mark)), want, "%s: heard by %s", q.mark, m.name)
		}
	}
	for _, from := range all.onLAN {
		for _, to := range all.onLAN {
			for _, probe := range []bool{false, true} {
				if from == to || guard && probe && from.inside() && from.name != "host" {
					continue
				}
				asked := to.count(func(data []byte) bool {
					return isARP(data, 1, senderOf(from, probe), to.ip4) && bytes.Equal(data[22:28], from.mac)
				})
				answers := from.count(func(data []byte) bool {
					return isARP(data, 2, to.ip4, senderOf(from, probe)) && bytes.Equal(data[32:38], from.mac)
				})
				right := from.count(func(data []byte) bool {
					isAnswer := isARP(data, 2, to.ip4, senderOf(from, probe))
					return isAnswer && bytes.Equal(data[22:28], to.mac) && bytes.Equal(data[6:12], to.mac)
				})
				what := fmt.Sprintf("%s asks for %s, probe %t", from.name, to.name, probe)
				expect.That(all, asked > 0 && answers == asked, "%s: %d answers to %d requests", what, answers, asked)
				expect.Equal(all, right, answers, "%s: answers by its MAC", what)
			}
		}
	}
}

func senderOf(m *machine, probe bool) netip.Addr {
	if probe {
		return netip.IPv4Unspecified()
	}
	return m.ip4
}

// arpRequest asks for a machine's MAC, or as a probe whether its address is taken (RFC 5227).
func arpRequest(from, to *machine, probe bool, mark string) []byte {
	return bytes.Join([][]byte{
		{0xff, 0xff, 0xff, 0xff, 0xff, 0xff}, from.mac, {0x08, 0x06, 0, 1, 8, 0, 6, 4, 0, 1},
		from.mac, senderOf(from, probe).AsSlice(), make([]byte, 6), to.ip4.AsSlice(), []byte(mark),
	}, nil)
}

// isARP reports whether a frame is ARP with this operation, sender and target.
func isARP(data []byte, operation uint16, sender, target netip.Addr) bool {
	return len(data) >= 42 && binary.BigEndian.Uint16(data[12:]) == unix.ETH_P_ARP &&
		binary.BigEndian.Uint16(data[20:]) == operation && bytes.Equal(data[28:32], sender.AsSlice()) && bytes.Equal(data[38:42], target.AsSlice())
}

// announce has each machine talk to groups, and each other hear it once.
func (all *everyone) announce() {
	all.Helper()
	texts := map[string]*machine{}
	for _, from := range all.onLAN {
		for _, group := range groups() {
			to := netip.MustParseAddr(group)
			conn := from.bells[0]
			if to.Is6() {
				to, conn = to.WithZone(fmt.Sprint(from.index)), from.bells[1] // package net caches names
			}
			text := fmt.Sprintf("%s is here: %s.", from.name, group)
			texts[text] = from
			must.Succeed(all, from.ns.Do(func() error {
				_, err := conn.WriteToUDP([]byte(text), &net.UDPAddr{IP: to.AsSlice(), Port: bellPort, Zone: to.Zone()})
				return err
			}), "%s", text)
		}
	}
	all.settle()
	for text, from := range texts {
		for _, m := range all.onLAN {
			want := 1
			if m == from {
				want = 0
			}
			expect.Equal(all, m.count(containing(text)), want, "%s: frames that %s received", text, m.name)
			if strings.HasSuffix(text, ".255.") {
				want = 1 // the kernel hands broadcasts to its own servers too
			}
			must.Until(all, text+" is read by the server of "+m.name, func() bool { return m.heard(text) >= want })
			expect.Equal(all, m.heard(text), want, "%s: heard by the server of %s", text, m.name)
		}
	}
}

// An address that another machine has is found to be taken, once, and one that nobody has is not.
func TestDuplicateAddressesAreNoticed(t *testing.T) {
	t.Parallel()
	l := newHost(t)
	n := l.network(plain(t, nil))
	a, b := n.add(l.newPod("a")), n.add(l.newPod("b"))
	all := l.tapped(a, b)
	for _, m := range all.onLAN {
		for name, value := range map[string]string{"conf/" + nic + "/accept_dad": "1", "conf/all/accept_dad": "1",
			"conf/" + nic + "/router_solicitation_delay": "0", "neigh/" + nic + "/retrans_time_ms": "300"} {
			nstest.Sysctl(t, m.ns, "net/ipv6/"+name, value)
		}
	}
	address := func(owner, from int) string { return fmt.Sprintf("fd50::d:%d:%d", owner+1, from+1) }
	tentative := func(m *machine) bool {
		return strings.Contains(nstest.Run(t, m.ns, "ip", "-6", "address", "show", "dev", nic), "tentative")
	}
	failed := func(m *machine) string {
		return nstest.Run(t, m.ns, "ip", "-6", "-o", "address", "show", "dev", nic, "dadfailed")
	}
	for _, duplicates := range []bool{false, true} {
		for i, m := range all.onLAN {
			var lines []string
			for k := range all.onLAN {
				own := address(i, k)
				if duplicates {
					own = address(k, i)
				}
				if k != i {
					lines = append(lines, "address add "+own+"/64 dev "+nic)
				}
			}
			ip(t, m.ns, lines...)
		}
		for i, m := range all.onLAN {
			must.Until(t, "all addresses are checked", func() bool {
				return !tentative(m) || strings.Count(failed(m), "fd50::d:") == len(all.onLAN)-1
			})
			for k := range all.onLAN {
				isTaken := strings.Contains(failed(m), address(i, k)+"/64")
				expect.That(t, !isTaken, "%s: its own address %s is said to be taken", m.name, address(i, k))
				if duplicates && k != i {
					isTaken := strings.Contains(failed(m), address(k, i)+"/64")
					expect.That(t, isTaken, "%s has not noticed that %s has %s", m.name, all.onLAN[k].name, address(k, i))
				}
			}
		}
	}
	all.settle()
	for i, owner := range all.onLAN {
		for k, from := range all.onLAN {
			if i == k {
				continue
			}
			target := netip.MustParseAddr(address(i, k))
			asked := owner.count(func(data []byte) bool {
				return isND(data, 135, target) && bytes.Equal(data[6:12], from.mac) && bytes.Equal(data[22:38], make([]byte, 16))
			})
			expect.That(t, asked > 0, "%s has heard no probe of %s", owner.name, from.name)
			for _, m := range all.onLAN {
				if m != owner {
					answers := m.count(func(data []byte) bool {
						return isND(data, 136, target) && bytes.Equal(data[6:12], owner.mac) && bytes.Equal(data[80:86], owner.mac)
					})
					expect.Equal(t, answers, asked, "%s hears the answers of %s to %s", m.name, owner.name, from.name)
				}
			}
		}
	}
}

// isND reports whether a frame is neighbour discovery of this type about an address.
func isND(data []byte, kind byte, target netip.Addr) bool {
	return len(data) >= 86 && binary.BigEndian.Uint16(data[12:]) == unix.ETH_P_IPV6 &&
		data[20] == unix.IPPROTO_ICMPV6 && data[54] == kind && bytes.Equal(data[62:78], target.AsSlice())
}

// carry has datagrams in fragments, and a stream of segments that are larger than any frame, go both ways between pods and
// everybody, whole.
func (all *everyone) carry(fragments int, streams bool) {
	all.Helper()
	for _, to := range all.machines {
		for _, from := range all.machines {
			if from == to || !from.inside() && !to.inside() || from.name == "internet" || to.name == "internet" {
				continue
			}
			for _, family := range both() {
				at := netip.AddrPortFrom(to.at(family), bellPort)
				text := "ask " + from.name + strings.Repeat(to.name, fragments)[:fragments]
				expect.Success(all, from.question(at, text), "%s to %s, %d bytes", from.name, at, fragments)
				if streams {
					all.pour(from, to, family)
				}
				for _, m := range all.machines {
					m.measure()
				}
			}
		}
	}
}

// pour sends bytes at random by a stream, and compares what comes.
func (all *everyone) pour(from, to *machine, family int) {
	all.Helper()
	out, in, err := stream(from.place, to.place, family)
	must.Succeed(all, err)
	defer in.Close()
	sent := make([]byte, 4<<20)
	seed := rand.NewChaCha8([32]byte{byte(family)})
	_, _ = seed.Read(sent)
	must.Succeed(all, in.SetDeadline(time.Now().Add(time.Minute)))
	go func() {
		_, _ = out.Write(sent)
		out.Close()
	}()
	got, err := io.ReadAll(in)
	expect.That(all, err == nil && bytes.Equal(got, sent), "%s to %s over IPv%d: %d bytes of %d came, or others: %v",
		from.name, to.name, family, len(got), len(sent), err)
}

// measure notes the length of the largest frame that a machine has received, and forgets them all.
func (m *machine) measure() {
	m.Helper()
	for _, f := range m.frames() {
		if f.came() {
			m.largest = max(m.largest, len(f.data))
		}
	}
	m.seen = nil
}

func TestLargePacketsPassWhole(t *testing.T) {
	t.Parallel()
	for name, set := range map[string]struct{ offloads, filtered bool }{
		"offloads on": {true, false}, "offloads on, and br_netfilter": {true, true}, "offloads off": {false, false},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			l := newHost(t)
			l.callIPTables(map[bool]string{true: "1", false: "0"}[set.filtered])
			l.dropInvalid()
			n := l.network(plain(t, nil))
			pods := []*pod{n.add(l.newPod("a")), n.add(l.newPod("b"))}
			if !set.offloads {
				for _, ns := range []*netns.NS{l.host.ns, l.other.ns, pods[0].ns} {
					must.Succeed(t, ns.Do(func() error {
						errs := []error{setTxChecksum(nic, 0)}
						for _, command := range []uint32{unix.ETHTOOL_SGSO, unix.ETHTOOL_STSO, unix.ETHTOOL_SGRO} {
							errs = append(errs, expect.Err(ethtool(nic, command, 0)))
						}
						return errors.Join(errs...)
					}))
				}
			}
			all := l.tapped(pods...)
			all.carry(30000, true)
			for _, m := range all.onLAN {
				if set.offloads && m.inside() {
					expect.That(t, m.largest > 60000, "the largest frame that %s received had %d bytes", m.name, m.largest)
				}
			}
		})
	}
}

// The pair has the NIC's MTU, and gets another one when the NIC does.
func TestJumboFramesPass(t *testing.T) {
	t.Parallel()
	l := newHost(t)
	setMTU := func(mtu int) {
		for i, p := range []place{l.router, l.other, l.host} {
			ip(t, l.wire, fmt.Sprintf("link set port%d mtu %d", i+1, mtu))
			ip(t, p.ns, fmt.Sprintf("link set %s mtu %d", nic, mtu))
		}
	}
	whole := func(m *machine, to netip.Addr, size int) {
		t.Helper()
		nstest.Run(t, m.ns, "ping", "-c1", "-w10", "-Mdo", "-s"+fmt.Sprint(size-28), to.String())
	}
	setMTU(4000)
	n := l.network(plain(t, nil))
	n.keeper()
	pods := []*pod{n.add(l.newPod("a"))}
	setMTU(9000)
	outer, port := share.Pair(bridge)
	must.Until(t, "the pair follows", func() bool {
		links := l.hostRun("ip", "-o", "link", "show", "dev", outer) + l.hostRun("ip", "-o", "link", "show", "dev", port)
		return strings.Count(links, "mtu 9000 ") == 2
	})
	pods = append(pods, n.add(l.newPod("b")))
	all := l.tapped(pods...)
	for _, m := range all.onLAN {
		for _, to := range all.onLAN {
			if m != to && (m.name == "b" || to.name == "b") && m.name != "a" && to.name != "a" {
				whole(m, to.ip4, 9000)
			}
		}
	}
	whole(all.onLAN[3], all.onLAN[1].ip4, 4000) // it keeps its own
}

// Two networks on one bridge share its share: still nobody hears anything twice.
func TestTwoNetworksOnOneBridgeHearTheLANOnce(t *testing.T) {
	t.Parallel()
	l := newHost(t)
	n := l.network(plain(t, nil))
	guests := n.another(object{"name": "guests", "ipam": addressesFrom(t, "192.168.50.170", "fd50::170")})
	pods := []*pod{n.add(l.newPod("a")), guests.add(l.newPod("b"))}
	for _, p := range pods {
		l.ready(p.ns)
	}
	ip(t, l.router.ns, "route add 255.255.255.255/32 dev "+nic)
	all := l.tapped(pods...)
	all.talk()
	all.announce()
	n.del(pods[0])
	n.operate("remove", "home")
	expect.Success(t, nstest.Ping(t, l.other.ns, pods[1].ip4), "the other network's pod")

	// A third one, whose pods go out by the host, has other needs of the bridge.
	routed := n.another(object{"name": "routed", "defaultRoute": "host", "ipam": addressesFrom(t, "192.168.50.180")})
	c := routed.add(l.newPod("c"))
	guests.add(l.newPod("d"))
	expect.Contains(t, n.operate("check"), "3 attachments: nothing differs", "check")
	expect.Success(t, nstest.Ping(t, l.other.ns, c.ip4), "the routed network's pod")
	routed.del(c)
	routed.operate("remove", "routed")
	n.operate("repair")
	expect.Contains(t, l.hostRun("ip", "-d", "link", "show", "br0"), "nf_call_iptables 0", "after the removal")
}

// A second NIC is on another LAN, and another bridge shares it.
func TestTwoBridgesShareTwoNICs(t *testing.T) {
	t.Parallel()
	l := newHost(t)
	far := l2(t)
	printer := quiet(t)
	for i, ns := range []*netns.NS{l.host.ns, printer} {
		end := []string{"eth1", nic}[i]
		ip(t, far, fmt.Sprintf("link add p%d type veth peer name %s netns %s", i, end, fd(ns)),
			fmt.Sprintf("link set p%d master switch up", i))
		ip(t, ns, "link set "+end+" up", fmt.Sprintf("address add 192.168.60.%d/24 dev %s", i+1, end))
	}
	n := l.network(plain(t, nil))
	a := n.add(l.newPod("a"))
	second := n.another(object{"name": "second", "bridge": "br1", "uplink": "eth1", "ipam": addressesFrom(t, "192.168.60.150")})
	b := second.add(l.newPod("b"))
	for _, pair := range [][2]*netns.NS{{l.host.ns, b.ns}, {printer, b.ns}} {
		expect.Success(t, nstest.Ping(t, pair[0], b.ip4), "the pod on the second LAN")
	}
	for to, from := range map[string]*netns.NS{
		"192.168.60.1": b.ns, "192.168.60.2": b.ns, otherIP4: a.ns, hostIP4: a.ns, a.ip4.String(): l.other.ns,
	} {
		expect.Success(t, nstest.Ping(t, from, nstest.Addr(to)), "to %s", to)
	}
	n.check(a)
	second.check(b)
	second.del(b)
	second.operate("remove", "second")
	after := l.hostRun("ip", "-o", "link", "show", "dev", "eth1")
	expect.That(t, !strings.Contains(after, "PROMISC"), "after the removal: %s", after)
	expect.Success(t, nstest.Ping(t, a.ns, nstest.Addr(otherIP4)), "the first LAN")
}
