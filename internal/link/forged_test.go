package link

import (
	"bytes"
	"encoding/binary"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
)

// attr is an attribute as the kernel writes it, whose length has 16 bits whatever it is.
func attr(typ uint16, data ...[]byte) []byte {
	b := make([]byte, unix.NLA_HDRLEN)
	b = append(b, bytes.Join(data, nil)...)
	binary.NativeEndian.PutUint16(b, uint16(len(b)))
	binary.NativeEndian.PutUint16(b[2:], typ)
	return append(b, make([]byte, -len(b)&3)...)
}

func u32(v uint32) []byte { return binary.NativeEndian.AppendUint32(nil, v) }

// The kernel writes each MAC of a macvlan's, as many as it was told, and of a vlan each mapping of priorities: so much
// that lengths wrap, and that what it was told is read as attributes of the link.
func TestAttributesThatAPodWroteIntoALinkAreNotRead(t *testing.T) {
	t.Parallel()
	const own, forged, host = 5, 7, 0
	var mappings []byte
	for len(mappings) < 0x10000 {
		mappings = append(mappings, attr(1, u32(unix.IFLA_LINK<<16|8), u32(forged))...)
	}
	before := bytes.Join([][]byte{attr(unix.IFLA_IFNAME, []byte("eth0\x00")), attr(unix.IFLA_MTU, u32(1400))}, nil)
	behind := append(attr(unix.IFLA_LINK_NETNSID, u32(host)), attr(unix.IFLA_LINK, u32(own))...)
	for kind, data := range map[string][]byte{ // what is behind the vlan's is left out with it
		"vlan": attr(unix.IFLA_INFO_DATA, attr(unix.IFLA_VLAN_ID, []byte{7, 0}), attr(unix.IFLA_VLAN_EGRESS_QOS, mappings)),
		"veth": nil,
	} {
		info := attr(unix.IFLA_LINKINFO, attr(unix.IFLA_INFO_KIND, []byte(kind+"\x00")), data)
		message := append(bytes.Join([][]byte{make([]byte, unix.SizeofIfInfomsg), before, info, behind}, nil), attr(unix.IFLA_PROP_LIST, make([]byte, 65500))...)
		var l Info
		expect.Success(t, l.Decode(message), "%s", kind)
		expect.That(t, l.Name == "eth0" && l.MTU == 1400 && (l.Lower == own) == (kind == "veth") && l.Lower != forged &&
			l.Elsewhere == (kind == "veth"),
			"%s: %+v", kind, l)
	}
}
