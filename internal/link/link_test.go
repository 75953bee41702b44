package link

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"net/netip"
	"strings"
	"testing"

	"github.com/jsimonetti/rtnetlink/v2"
	"github.com/jsimonetti/rtnetlink/v2/driver"
	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/nl"
	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/golden"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nltest"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
)

func TestMain(m *testing.M) { nstest.Main(m) }

// listed makes links of all sorts with iproute2, and reads them.
func listed(t *testing.T, each func(data []byte)) map[string]*Info {
	t.Helper()
	ns, other := nstest.New(t), nstest.New(t)
	nstest.Veth(t, ns, "eth0", ns, "peer0")
	nstest.Veth(t, ns, "away0", other, "eth0")
	for _, args := range []string{
		"link add br0 type bridge stp_state 1 nf_call_iptables 1", "link set peer0 master br0", "link set peer0 up alias whose group 29",
		"link set peer0 type bridge_slave hairpin on learning off isolated on", "link set dev peer0 mtu 1400 address 02:00:00:00:00:07",
		"link set br0 up", "link add vx0 type vxlan id 7 dev eth0 dstport 4789", "link add vx1 type vxlan id 8 remote 192.0.2.1 dstport 4790",
		"link add mv0 link eth0 type macvlan",
	} {
		nstest.Run(t, ns, "ip", strings.Fields(args)...)
	}
	conn := must.Of(nl.Dial(unix.NETLINK_ROUTE, ns)).Get(t)
	t.Cleanup(func() { conn.Close() })
	all := map[string]*Info{}
	ask, err := (&Request{Index: 0, mask: skipStats()}).body().MarshalBinary()
	must.Succeed(t, err)
	err = conn.List(context.Background(), "list", netlink.Message{Header: netlink.Header{Type: unix.RTM_GETLINK}, Data: ask}, nil, func(m netlink.Message) error {
		var l Info
		err := l.Decode(m.Data)
		all[l.Name] = &l
		each(m.Data)
		return err
	})
	must.Succeed(t, err)
	return all
}

func TestLinksAreReadAsTheyWereMade(t *testing.T) {
	t.Parallel()
	all := listed(t, func(data []byte) {
		var l Info
		if err := l.Decode(data); err == nil && golden.Updates() {
			nstest.SaveCorpus(t, "FuzzLink", l.Name, data)
		}
	})
	port := all["peer0"]
	if port.Kind != "veth" || port.PortOf != "bridge" || port.Master != all["br0"].Index || port.Lower != all["eth0"].Index || port.Elsewhere ||
		port.MTU != 1400 || port.MAC.String() != "02:00:00:00:00:07" || port.Alias != "whose" || port.Group != 29 || !port.Up() || port.Type != 1 {
		t.Errorf("the port: %+v", port)
	}
	if p := port.Port; p == nil || *p.Mode != 1 || *p.Learning != 0 || *p.Isolated != 1 || *p.UnicastFlood != 1 || *p.McastFlood != 1 || p.State == nil || *p.GroupFwdMask != 0 {
		t.Errorf("the port's flags: %+v", port.Port)
	}
	if b := all["br0"].Bridge; b == nil || *b.StpState != driver.BridgeStpStateEnabled || *b.NfCallIptables != 1 || *b.NfCallIp6tables != 0 {
		t.Errorf("the bridge: %+v", all["br0"].Bridge)
	}
	if l := all["vx0"]; l.Lower != all["eth0"].Index || l.Bridge != nil || all["vx1"].Lower != 0 {
		t.Errorf("the tunnels: %+v, %+v", l, all["vx1"])
	}
	l := all["away0"]
	expect.That(t, l.Elsewhere && l.Lower != 0 && l.Port == nil, "the veth to another namespace: %+v", l)
	if v, ok := all["lo"].IPv4.At(0); !ok || all["lo"].Kind != "" {
		t.Errorf("lo: %d %+v", v, all["lo"])
	}
}

// The library reads the same, as far as it reads.
func TestTheLibraryReadsTheSame(t *testing.T) {
	t.Parallel()
	listed(t, func(data []byte) {
		var l Info
		var theirs rtnetlink.LinkMessage
		must.Succeed(t, errors.Join(l.Decode(data), theirs.UnmarshalBinary(data)))
		a := theirs.Attributes
		alias, master, kind := "", 0, ""
		if a.Alias != nil {
			alias = *a.Alias
		}
		if a.Master != nil {
			master = int(*a.Master)
		}
		if a.Info != nil {
			kind = a.Info.Kind
		}
		if a.Name != l.Name || alias != l.Alias || master != l.Master || kind != l.Kind || !bytes.Equal(a.Address, l.MAC) || int(a.MTU) != l.MTU ||
			theirs.Flags != l.Flags || theirs.Type != l.Type || int(theirs.Index) != l.Index || *a.NetDevGroup != l.Group {
			t.Errorf("%+v, and to the library %+v", l, theirs)
		}
		if a.Info != nil && l.Bridge != nil {
			b := a.Info.Data.(*driver.Bridge)
			expect.That(t, *b.NfCallIptables == *l.Bridge.NfCallIptables && *b.StpState == *l.Bridge.StpState,
				"%+v, and to the library %+v", l.Bridge, b)
		}
	})
}

func TestOnlyWhatIsAskedForIsRead(t *testing.T) {
	t.Parallel()
	data := nltest.Body(make([]byte, unix.SizeofIfInfomsg), func(ae *netlink.AttributeEncoder) {
		ae.String(unix.IFLA_IFNAME, "a")
		ae.String(unix.IFLA_IFALIAS, "b")
		ae.Bytes(unix.IFLA_MTU, []byte{1}) // no number
	})
	var l Info
	binary.NativeEndian.PutUint32(data[4:], 7)
	err := l.Decode(data, unix.IFLA_IFALIAS)
	expect.That(t, err == nil && l.Index == 7 && l.Name == "" && l.Alias == "b", "%+v, %v", l, err)
	expect.Is(t, l.Decode(data), nl.ErrMalformed, "an MTU of a byte")
}

func TestTokenAndRouterFlagsAreRead(t *testing.T) {
	t.Parallel()
	data := nltest.Body(make([]byte, unix.SizeofIfInfomsg), func(ae *netlink.AttributeEncoder) {
		ae.Nested(unix.IFLA_AF_SPEC, func(ae *netlink.AttributeEncoder) error {
			ae.Nested(unix.AF_INET6, func(ae *netlink.AttributeEncoder) error {
				ae.Uint32(inet6Flags, 0x20)
				ae.Bytes(inet6Conf, []byte{1, 0, 0, 0})
				nl.PutAddr(ae, inet6Token, netip.MustParseAddr("::7"))
				return nil
			})
			ae.Bytes(unix.AF_BRIDGE, []byte{1, 2, 3}) // in a shape of its own
			return nil
		})
	})
	var l Info
	err := l.Decode(data)
	expect.That(t, err == nil && l.RouterFlags == 0x20 && l.Token.String() == "::7", "%+v, %v", l, err)
	v, ok := l.IPv6.At(0)
	expect.That(t, ok && v == 1, "parameter 0 is %d, %v", v, ok)
	_, ok = l.IPv6.At(1)
	expect.That(t, !ok, "there is a parameter 1")
}

func TestABridgeDecodesInFewAllocations(t *testing.T) {
	var bridge []byte
	listed(t, func(data []byte) {
		var l Info
		must.Succeed(t, l.Decode(data))
		if l.Name == "br0" {
			bridge = bytes.Clone(data)
		}
	})
	var l Info
	full := testing.AllocsPerRun(100, func() { _ = l.Decode(bridge) })
	few := testing.AllocsPerRun(100, func() { _ = l.Decode(bridge, unix.IFLA_IFNAME, unix.IFLA_IFALIAS) })
	t.Logf("%.0f allocations, %.0f for what tells whose it is", full, few)
	expect.That(t, full <= 60 && few <= 6, "%.0f allocations for a bridge, %.0f for what tells whose it is", full, few)
}

// FuzzLink holds that no reply of the kernel, or of what takes itself for it, makes the
// decoder panic. The corpus has replies of a real kernel.
func FuzzLink(f *testing.F) {
	f.Add([]byte{})
	f.Add(make([]byte, 16))
	f.Fuzz(func(t *testing.T, data []byte) {
		var l Info
		if err := l.Decode(data); err != nil {
			must.That(t, errors.Is(err, nl.ErrMalformed), "%v is not %v", err, nl.ErrMalformed)
			return
		}
		expect.That(t, len(data) >= unix.SizeofIfInfomsg, "link %d of %d bytes", l.Index, len(data))
		expect.That(t, len(l.Name)+len(l.Alias)+len(l.IPv4)+len(l.IPv6) <= len(data),
			"more came out than went in: %+v", l)
		expect.Equal(t, l.Up(), (l.Flags&unix.IFF_UP != 0), "up or not")
		_, _ = l.IPv6.At(0)
	})
}
