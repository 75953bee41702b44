package lease

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
)

// networkd252 is what systemd-networkd 252 wrote.
const networkd252 = `# This is private data. Do not parse.
ADDRESS=10.9.0.32
NETMASK=255.255.255.0
ROUTER=10.9.0.1
T1=1800
CLASSLESS_ROUTES=10.5.0.0/16,10.9.0.2 0.0.0.0/0,10.9.0.1
CLIENTID=ff731a04cb00020000ab110033bdebf95e192c
`

// networkdJSON is the form of the newest versions.
const networkdJSON = `{
	"Address" : [10,9,0,32], "AddressString" : "10.9.0.32", "Netmask" : [255,255,255,0],
	"T1" : "30min", "Servers" : {"DNS" : [[10,9,0,53],[10,9,0,54]]},
	"Client_Id" : [255,115,26,4,203,0,2,0,0,171,17,0,51,189,235,249,94,25,44], "Timestamp_realtime" : "Sun 2026-03-01 12:00:00.000000 UTC"
}
`

func TestWhatSystemdNetworkdLeasedIsRead(t *testing.T) {
	t.Parallel()
	const id = "ff:73:1a:04:cb:00:02:00:00:ab:11:00:33:bd:eb:f9:5e:19:2c"
	for name, tt := range map[string]struct {
		file  string
		known bool
	}{
		"version 252":           {networkd252, true},
		"JSON":                  {networkdJSON, true},
		"none":                  {"", false},
		"no identifier":         {"ADDRESS=10.9.0.32\n", false},
		"no address":            {"CLIENTID=ff731a04\n", false},
		"an identifier of text": {"ADDRESS=10.9.0.32\nCLIENTID=box\n", false},
		"numbers of no byte":    {`{"Address":[10,9,0,320],"Client_Id":[1,2]}`, false},
		"half of an object":     {networkdJSON[:80], false},
	} {
		root := t.TempDir()
		dir := filepath.Join(root, "run/systemd/netif/leases")
		must.Succeed(t, os.MkdirAll(dir, 0o755))
		must.Succeed(t, os.WriteFile(filepath.Join(dir, "2"), []byte(tt.file), 0o644))
		address, got, known := Networkd(root, 2)
		expect.That(t, known == tt.known && (!known || address.String() == "10.9.0.32" && got.String() == id),
			"%s: %s, %s, %t", name, address, got, known)
	}
	_, _, known := Networkd(t.TempDir(), 2)
	expect.That(t, !known, "a lease without a file")
}

func TestClientIdentifiersAsOperatorsNameThem(t *testing.T) {
	t.Parallel()
	for text, want := range map[string]string{
		"mac": "01:02:00:00:00:00:09", "none": "", "ff731a04": "ff:73:1a:04", "FF:73:1a:04": "ff:73:1a:04",
	} {
		got, err := ClientID(text, nicMAC)
		expect.That(t, err == nil && got.String() == want, "%s: %s, %v, want %s", text, got, err, want)
	}
	for _, text := range []string{"", "f", "ff", "eth0", "0x1234"} {
		got, err := ClientID(text, nicMAC)
		expect.That(t, err != nil, "%q: %s, want an error", text, got)
	}
}

func FuzzNetworkd(f *testing.F) {
	f.Add([]byte(networkd252))
	f.Add([]byte(networkdJSON))
	f.Fuzz(func(t *testing.T, data []byte) {
		address, id, known := readNetworkd(data)
		expect.That(t, !known || address.Is4() && len(id) >= 2 && len(id) <= 255, "%s, %s", address, id)
	})
}
