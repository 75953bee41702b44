package link

import (
	"net"
	"net/netip"
	"testing"

	"github.com/jsimonetti/rtnetlink/v2/driver"
	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/nl"
	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/nltest"
)

// What the library leaves out, or refuses, the kernel is to hear and to answer.
func TestRequestsSayAllThatIsAskedFor(t *testing.T) {
	t.Parallel()
	mac := net.HardwareAddr{2, 0, 0, 0, 0, 1}
	for name, tt := range map[string]struct {
		r    Request
		want string
	}{
		"by its index":           {Request{Index: 7, Flags: unix.IFF_UP, Change: unix.IFF_UP}, "00000000 07000000 01000000 01000000"},
		"by its name":            {Request{Name: "a"}, "00000000 00000000 00000000 00000000 [3: 6100]"},
		"of no name":             {Request{}, "00000000 00000000 00000000 00000000 [3: 00]"},
		"all of a group":         {Request{Group: new(uint32(7))}, "00000000 00000000 00000000 00000000 [27: 07000000]"},
		"back to the main group": {Request{Index: 7, Group: new(uint32(0))}, "00000000 07000000 00000000 00000000 [27: 00000000]"},
		"no alias":               {Request{Index: 7, Alias: new("")}, "00000000 07000000 00000000 00000000 [20: 00]"},
		"no master":              {Request{Index: 7, Master: new(0)}, "00000000 07000000 00000000 00000000 [10: 00000000]"},
		"an MTU of 0":            {Request{Index: 7, MTU: new(0)}, "00000000 07000000 00000000 00000000 [4: 00000000]"},
		"a MAC and an MTU":       {Request{Index: 7, MAC: mac, MTU: new(1500)}, "00000000 07000000 00000000 00000000 [4: dc050000] [1: 020000000001]"},
		"a veth of an MTU that is none": {Request{Name: "a", MTU: new(67), Peer: &Request{Name: "b"}},
			"00000000 00000000 00000000 00000000 [3: 6100] [18: 090001007665746800000000280002802400010000000000000000000000000000000000060003006200000008001f0001000000] [4: 43000000]"},
		"flags of a port, without a kind": {Request{Index: 7, Port: &driver.BridgePort{Mode: new(driver.BridgeEnableEnabled)}},
			"00000000 07000000 00000000 00000000 [18: [4: 62726964676500] [5: [4: 01]]]"},
		"of the families": {Request{Index: 7, IPv4: []Parameter{{8, 1}}, NoLinkLocal: true},
			"00000000 07000000 00000000 00000000 [26: [2: [1: [8: 01000000]]] [10: [8: 01]]]"},
		"a token": {Request{Index: 7, Token: netip.MustParseAddr("::1")},
			"00000000 07000000 00000000 00000000 [26: [10: [7: 00000000000000000000000000000001]]]"},
		"a tunnel's lower link": {Request{Index: 7, Data: &driver.Vxlan{Link: new(uint32(3))}},
			"00000000 07000000 00000000 00000000 [18: 0a00010076786c616e0000000c0002800800030003000000]"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var b nl.Batch
			tt.r.Set(&b, "set", "x")
			want := "16 flags 0x5: " + tt.want + "\n"
			expect.Equal(t, nltest.Text(16, b.Bytes()), want, "got")
		})
	}
}

func TestRequestsHaveTheFlagsOfTheirVerb(t *testing.T) {
	t.Parallel()
	var b nl.Batch
	Request{Name: "a", Kind: "bridge"}.Create(&b, "add", "a")
	Request{Name: "a", Peer: &Request{Name: "b"}}.Create(&b, "add", "a")
	Request{Index: 3}.Delete(&b, "a")
	Get(&b, "a", 0, new(Info))
	Get(&b, "not looked at", 3, new(Info))
	const want = `16 flags 0x605: 00000000 00000000 00000000 00000000 [3: 6100] [18: 0b0001006272696467650000]
16 flags 0x605: 00000000 00000000 00000000 00000000 [3: 6100] [18: 090001007665746800000000280002802400010000000000000000000000000000000000060003006200000008001f0001000000] [31: 01000000]
17 flags 0x5: 00000000 03000000 00000000 00000000
18 flags 0x1: 00000000 00000000 00000000 00000000 [3: 6100] [29: 08000000]
18 flags 0x1: 00000000 03000000 00000000 00000000 [29: 08000000]
`
	expect.Equal(t, nltest.Text(16, b.Bytes()), want)
}
