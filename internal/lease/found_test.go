package lease

import (
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/insomniacslk/dhcp/dhcpv4"
	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/addr"
	"github.com/tombolo-cni/tombolo/dhcpc"
	"github.com/tombolo-cni/tombolo/internal/golden"
	"github.com/tombolo-cni/tombolo/internal/nstest"
)

// networkd252 is what systemd-networkd 252 wrote.
const networkd252 = `# This is private data. Do not parse.
ADDRESS=10.9.0.32
NETMASK=255.255.255.0
ROUTER=10.9.0.1
SERVER_ADDRESS=10.9.0.1
NEXT_SERVER=10.9.0.1
BROADCAST=10.9.0.255
T1=1800
T2=3150
LIFETIME=3600
DNS=10.9.0.53 10.9.0.54
DOMAINNAME=example.org
HOSTNAME=vm
CLASSLESS_ROUTES=10.5.0.0/16,10.9.0.2 0.0.0.0/0,10.9.0.1
CLIENTID=ff731a04cb00020000ab110033bdebf95e192c
`

// networkdJSON is the form of the newest versions.
const networkdJSON = `{
	"Address" : [10,9,0,32], "AddressString" : "10.9.0.32", "Netmask" : [255,255,255,0],
	"Router" : [[10,9,0,1]], "Server_Address" : [10,9,0,1], "MTU" : 1400,
	"T1" : "30min", "T2" : "52min 30s", "Lifetime" : "1h",
	"Servers" : {"DNS" : [[10,9,0,53],[10,9,0,54]]}, "Domain_Name" : "example.org", "Hostname" : "vm",
	"Classless_Routes" : [
		{"Destination" : [10,5,0,0], "DestinationString" : "10.5.0.0", "Gateway" : [10,9,0,2], "DestinationPrefixLength" : 16},
		{"Destination" : [0,0,0,0], "Gateway" : [10,9,0,1], "DestinationPrefixLength" : 0}],
	"Client_Id" : [255,115,26,4,203,0,2,0,0,171,17,0,51,189,235,249,94,25,44], "Timestamp_realtime" : "Sun 2026-03-01 12:00:00.000000 UTC"
}
`

// packet is an ACK, as dhcpcd keeps it.
func packet(tb testing.TB) []byte {
	tb.Helper()
	d, err := dhcpv4.New(dhcpv4.WithMessageType(dhcpv4.MessageTypeAck), dhcpv4.WithYourIP(net.IPv4(10, 9, 0, 32)), dhcpv4.WithHwAddr(nicMAC),
		dhcpv4.WithOption(dhcpv4.OptServerIdentifier(net.IPv4(10, 9, 0, 1))), dhcpv4.WithRouter(net.IPv4(10, 9, 0, 1)),
		dhcpv4.WithDNS(net.IPv4(10, 9, 0, 53), net.IPv4(10, 9, 0, 54)), dhcpv4.WithLeaseTime(3600),
		dhcpv4.WithOption(dhcpv4.OptRenewTimeValue(30*time.Minute)), dhcpv4.WithOption(dhcpv4.OptRebindingTimeValue(3150*time.Second)),
		dhcpv4.WithOption(dhcpv4.OptDomainName("example.org")), dhcpv4.WithOption(dhcpv4.OptHostName("vm")),
		dhcpv4.WithOption(dhcpv4.OptClasslessStaticRoute(
			&dhcpv4.Route{Dest: &net.IPNet{IP: net.IPv4(10, 5, 0, 0), Mask: net.CIDRMask(16, 32)}, Router: net.IPv4(10, 9, 0, 2)},
			&dhcpv4.Route{Dest: &net.IPNet{IP: net.IPv4zero, Mask: net.CIDRMask(0, 32)}, Router: net.IPv4(10, 9, 0, 1)})),
		dhcpv4.WithOption(dhcpv4.Option{Code: dhcpv4.OptionInterfaceMTU, Value: dhcpv4.Uint16(1400)}),
		dhcpv4.WithOption(dhcpv4.OptClientIdentifier([]byte{0xff, 0x73, 0x1a, 4, 0xcb, 0, 2, 0, 0, 0xab, 0x11, 0, 0x33, 0xbd, 0xeb, 0xf9, 0x5e, 0x19, 0x2c})))
	if err != nil {
		tb.Fatal(err)
	}
	return d.ToBytes()
}

// text says what was found, but for where and when.
func (f *found) text() string {
	if f == nil {
		return "nothing"
	}
	return fmt.Sprintf("%s of %v for %v, %v, %v to %s (%t) %q: routes %v, routers %v, DNS %v, %q, MTU %d",
		f.address, f.server, f.renew, f.rebind, f.lifetime, f.clientID, f.identified, f.hostName, f.routes, f.routers, f.dns, f.domain, f.mtu)
}

func TestTheManagersFilesSayTheSame(t *testing.T) {
	t.Parallel()
	const want = `10.9.0.32 of 10.9.0.1 for 30m0s, 52m30s, 1h0m0s to ff:73:1a:04:cb:00:02:00:00:ab:11:00:33:bd:eb:f9:5e:19:2c (true) "vm": ` +
		`routes [10.5.0.0/16 via 10.9.0.2 0.0.0.0/0 via 10.9.0.1], routers [10.9.0.1], DNS [10.9.0.53 10.9.0.54], "example.org", MTU 1400`
	for name, f := range map[string]*found{
		"networkd, version 252":    parseKeys([]byte(networkd252 + "MTU=1400\n")),
		"networkd, times in words": parseKeys([]byte(strings.NewReplacer("T1=1800", "T1=30min", "T2=3150", "T2=52min 30s", "LIFETIME=3600", "LIFETIME=1h").Replace(networkd252) + "MTU=1400")),
		"networkd, quoted":         parseKeys([]byte(strings.Replace(networkd252, "DNS=10.9.0.53 10.9.0.54", `DNS="10.9.0.53 10.9.0.54"`, 1) + "MTU=1400")),
		"networkd, JSON":           parseKeys([]byte(networkdJSON)),
		"dhcpcd":                   parsePacket(packet(t)),
	} {
		if got := f.text(); got != want {
			t.Errorf("%s:\n%s, want\n%s", name, got, want)
		}
	}
}

func TestWhatAFileLeavesOutIsLeftOut(t *testing.T) {
	t.Parallel()
	for name, tt := range map[string]struct {
		f    *found
		want string
	}{
		"routes by routers": {parseKeys([]byte("ADDRESS=10.9.0.32\nROUTER=10.9.0.1 10.9.0.2\nROUTES=10.5.0.0/16,10.9.0.2\n")),
			`routes [10.5.0.0/16 via 10.9.0.2 0.0.0.0/0 via 10.9.0.1], routers [10.9.0.1 10.9.0.2]`},
		"a route on link":      {parseKeys([]byte("ADDRESS=10.9.0.32\nCLASSLESS_ROUTES=10.5.1.2/16,0.0.0.0\n")), `routes [10.5.0.0/16 on link]`},
		"without an end":       {parseKeys([]byte("ADDRESS=10.9.0.32\nLIFETIME=infinity")), fmt.Sprintf("for 0s, 0s, %v to", forever)},
		"identifier too short": {parseKeys([]byte("ADDRESS=10.9.0.32\nCLIENTID=ff")), "to  (false)"},
		"identifier no hex":    {parseKeys([]byte("ADDRESS=10.9.0.32\nCLIENTID=zz00")), "to  (false)"},
		"names no text":        {parseKeys([]byte("ADDRESS=10.9.0.32\nHOSTNAME=\xff\nDOMAINNAME=a\x01b")), `(false) "": routes [], routers [], DNS [], "", MTU 0`},
		"server nobody":        {parseKeys([]byte("ADDRESS=10.9.0.32\nSERVER_ADDRESS=255.255.255.255")), "of invalid IP for"},
		"no address":           {parseKeys([]byte("ROUTER=10.9.0.1")), "nothing"},
		"address IPv6":         {parseKeys([]byte("ADDRESS=fd00::1")), "nothing"},
		"address 0.0.0.0":      {parseKeys([]byte("ADDRESS=0.0.0.0")), "nothing"},
		"JSON cut short":       {parseKeys([]byte(networkdJSON[:200])), "nothing"},
		"JSON with text":       {parseKeys([]byte(`{"Address":"10.9.0.32","Router":["10.9.0.1"],"Client_Id":[300,1]}`)), `to  (false) "": routes [0.0.0.0/0 via 10.9.0.1]`},
		"JSON of nothing":      {parseKeys([]byte(`{"Address":[10,9,0,320]}`)), "nothing"},
		"no ACK":               {parsePacket(append(make([]byte, 236), 0x63, 0x82, 0x53, 0x63, 255)), "nothing"},
		"no packet":            {parsePacket([]byte("lease")), "nothing"},
	} {
		if got := tt.f.text(); !strings.Contains(got, tt.want) {
			t.Errorf("%s:\n%s, want in it\n%s", name, got, tt.want)
		}
	}
}

func TestTimesAsSystemdWritesThem(t *testing.T) {
	t.Parallel()
	for text, want := range map[string]time.Duration{
		"3600": time.Hour, "0": 0, "": 0, "1h": time.Hour, "1h 30min": 90 * time.Minute, "52min 30s": 3150 * time.Second, "1d 12h": 36 * time.Hour,
		"1w": 7 * 24 * time.Hour, "1month 1d": (2629800 + 86400) * time.Second, "1y": 31557600 * time.Second, "infinity": forever, "4294967295": forever,
		"-1": 0, "1x": 0, "h": 0, "99999999999": 0, "4294967294y": forever,
	} {
		if got := parseSpan(text); got != want {
			t.Errorf("%q is %v, want %v", text, got, want)
		}
	}
}

func TestTimesThatMakeNoSenseAreTheUsualOnes(t *testing.T) {
	t.Parallel()
	now := at(0)
	left := 40 * time.Minute
	has := &addr.Address{Prefix: netip.MustParsePrefix("10.9.0.32/24"), Valid: &left}
	for name, tt := range map[string]struct {
		f                         found
		sinceGrant, renew, rebind time.Duration
	}{
		"none":                 {found{}, 0, 20 * time.Minute, 35 * time.Minute},
		"in force":             {found{lifetime: time.Hour, renew: 10 * time.Minute, rebind: 30 * time.Minute}, 20 * time.Minute, 10 * time.Minute, 30 * time.Minute},
		"T1 after T2":          {found{lifetime: time.Hour, renew: 50 * time.Minute, rebind: 30 * time.Minute}, 20 * time.Minute, 30 * time.Minute, 30 * time.Minute},
		"T2 after the end":     {found{lifetime: time.Hour, rebind: 2 * time.Hour}, 20 * time.Minute, 30 * time.Minute, 3150 * time.Second},
		"shorter than is left": {found{lifetime: time.Minute, renew: time.Second}, 0, time.Second, 35 * time.Minute},
		"for ever":             {found{lifetime: forever}, 0, 20 * time.Minute, 35 * time.Minute},
	} {
		l := tt.f.lease(now, has)
		l.MAC = dhcpc.Hex(nicMAC)
		if err := l.Validate(); err != nil {
			t.Errorf("%s: %v", name, err)
		}
		if now.Sub(l.Obtained) != tt.sinceGrant || l.Renew.Sub(l.Obtained) != tt.renew || l.Rebind.Sub(l.Obtained) != tt.rebind || l.Expire != now.Add(left) {
			t.Errorf("%s: granted %v ago, T1 %v, T2 %v, ends in %v", name, now.Sub(l.Obtained), l.Renew.Sub(l.Obtained), l.Rebind.Sub(l.Obtained), l.Expire.Sub(now))
		}
	}
}

func TestForeignFilesAreReadWithCare(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	path := func(name string) string { return filepath.Join(dir, name) }
	long := strings.Repeat("x", maxForeign) + "the end"
	for name, text := range map[string]string{"short": "text", "empty": "", "long": long} {
		if err := os.WriteFile(path(name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		got, written, err := readForeign(path(name))
		if want := text[:min(len(text), maxForeign)]; err != nil || string(got) != want || time.Since(written) > time.Hour {
			t.Errorf("%s: %d bytes of %v, %v; want %d", name, len(got), written, err, len(want))
		}
	}
	if err := unix.Mkfifo(path("fifo"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink("short", path("link")); err != nil {
		t.Fatal(err)
	}
	if got, _, err := readForeign(path("link")); err != nil || string(got) != "text" {
		t.Errorf("by a link: %q, %v", got, err)
	}
	for _, name := range []string{"fifo", ".", "none"} {
		if _, _, err := readForeign(path(name)); err == nil {
			t.Errorf("%s was read", name)
		}
	}
}

// check holds what was found to what a record needs.
func (f *found) check(t *testing.T) {
	t.Helper()
	if f == nil {
		return
	}
	left := time.Hour
	has := &addr.Address{Prefix: netip.PrefixFrom(f.address, 24), Valid: &left}
	l := f.lease(at(0), has)
	l.MAC, l.ClientID = dhcpc.Hex(nicMAC), f.clientID
	r := &Record{
		State: Adopting, Token: "1", Network: hostName, ContainerID: hostName, IfName: "eth0", Bridge: "br0",
		Client: Client{MAC: l.MAC, ClientID: f.clientID, HostName: f.hostName}, Lease: l, Host: &Host{NIC: "eth0"},
	}
	data, err := encode(r)
	if err != nil {
		t.Fatalf("%s: %v", f.text(), err)
	}
	if _, err := decode(data); err != nil {
		t.Fatalf("%s, as %s: %v", f.text(), data, err)
	}
}

func FuzzKeys(f *testing.F) {
	for name, text := range map[string]string{
		"networkd": networkd252, "words": "ADDRESS=10.9.0.32\nT1=1h 30min\nLIFETIME=infinity\n", "routes": "ADDRESS=10.9.0.32\nROUTES=10.5.0.0/16,10.9.0.2 x/y\n",
		"json": networkdJSON, "empty": "", "json-odd": `{"Address":[1,2],"T1":1}`,
	} {
		seed(f, "FuzzKeys", name, []byte(text))
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		parseKeys(data).check(t)
		parseNetworkManager(data).check(t)
	})
}

func FuzzPacket(f *testing.F) {
	whole := packet(f)
	for name, data := range map[string][]byte{"whole": whole, "cut": whole[:len(whole)-20], "header": whole[:240], "empty": nil} {
		seed(f, "FuzzPacket", name, data)
	}
	f.Fuzz(func(t *testing.T, data []byte) { parsePacket(data).check(t) })
}

func seed(f *testing.F, target, name string, data []byte) {
	f.Helper()
	f.Add(data)
	if golden.Updates() {
		nstest.SaveCorpus(f, target, name, data)
	}
}
