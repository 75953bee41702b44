package view

import (
	"encoding/xml"
	"fmt"
	"io"
	"net/netip"
	"os"
	"regexp"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/google/go-cmp/cmp"

	"github.com/tombolo-cni/tombolo"
	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/golden"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/ipam"
	"github.com/tombolo-cni/tombolo/network"
	"github.com/tombolo-cni/tombolo/nft"
)

func attachment(of, pod string, id int, addresses ...string) network.Report {
	a := &network.Attachment{Key: network.Key{Network: of, ContainerID: fmt.Sprintf("%016x", id), IfName: "eth0"}, Pod: pod, Ready: true}
	for _, text := range addresses {
		a.Addresses = append(a.Addresses, ipam.Address{Prefix: netip.MustParsePrefix(text)})
	}
	return network.Report{Attachment: a}
}

// sample is a node with all there can be, and something wrong with some of it.
func sample(t *testing.T) *Node {
	t.Helper()
	dir := forge(t)
	networks, _, err := Load(t.Context(), open(t, dir), dir, "")
	must.Succeed(t, err)
	repair := func(text string) []tombolo.Difference {
		return []tombolo.Difference{{Text: text, Remedy: tombolo.RemedyRepair}}
	}
	web := attachment("pods", "default/web-0", 1, "10.61.0.10/24", "fd61::2/64")
	web.Ports = []nft.Port{{Protocol: nft.TCP, HostPort: 8080, PodPort: 80}, {Protocol: nft.UDP, HostAddr: netip.MustParseAddr("192.0.2.1"), HostPort: 53, PodPort: 5353}}
	busy := attachment("pods", "default/many-ports", 2, "10.61.0.11/24")
	for i := range uint16(20) {
		busy.Ports = append(busy.Ports, nft.Port{Protocol: nft.TCP, HostPort: 9000 + i, PodPort: 90})
	}
	lost := attachment("pods", "default/web-1", 3, "10.61.0.12/24", "fd61::4/64")
	lost.Differences = repair("set pods4 of table inet tombolo: element 10.61.0.12 is missing")
	evil := attachment("pods", hostile, 4, "10.61.0.13/24")
	evil.Differences = repair("the alias " + hostile + " is not ours")
	adding := attachment("pods", "", 5)
	adding.Ready = false
	in := &network.Inspection{
		Attachments: []network.Report{web, busy, lost, evil, adding,
			attachment("pods", "default/db-0", 6, "10.61.0.14/24", "fd61::6/64"), attachment("pods", "kube-system/dns", 7, "10.61.0.15/24", "fd61::7/64"),
			attachment("home", "default/cam", 8, "192.168.1.20/24"), attachment("fixed", "default/fix", 9, "10.65.0.9/24"),
			attachment("delegated", "default/db", 10, "10.64.0.9/24"), attachment("lost", "default/lost", 11)},
		Networks: []network.NetworkReport{{Network: "earlier", Differences: repair("bridge cbr1: the gateway 10.63.0.1/29 is missing")}},
	}
	return &Node{networks: networks, inspection: in, uplinks: []network.UplinkReport{
		{NIC: "eth0", Bridge: "lan0", State: "taken"},
		{NIC: "eth1\x1b[2J", Bridge: "br1", State: "taken", Differences: []string{"eth1 is no port of br1"}},
	}}
}

func TestTheMapFollowsTheScreen(t *testing.T) {
	t.Parallel()
	n := sample(t)
	for name, s := range map[string]Screen{
		"map-80-ascii.txt": {Width: 80}, "map-40-ascii.txt": {Width: 40},
		"map-120.txt": {Width: 120, Unicode: true}, "map-80-colour.txt": {Width: 80, Colour: true, Unicode: true},
	} {
		text := n.Map(s)
		golden.Compare(t, name, text)
		plain := regexp.MustCompile("\x1b\\[(1|31)?m").ReplaceAllString(text, "")
		expect.That(t, s.Colour || plain == text, "%s: it is coloured", name)
		for line := range strings.Lines(plain) {
			columns := utf8.RuneCountInString(strings.TrimSuffix(line, "\n"))
			expect.That(t, columns <= s.Width || s.Width <= 40, "%s: a line of %d columns: %s", name, columns, line)
		}
		for _, r := range plain {
			if r < ' ' && r != '\n' || r == 0x7f || !s.Unicode && r > '~' || r > '~' && !strings.ContainsRune("├─└│●✗○←", r) {
				t.Errorf("%s: %q gets to the terminal", name, r)
			}
		}
	}
}

// Red is what is wrong, and nothing else.
func TestWhatIsWrongIsRed(t *testing.T) {
	t.Parallel()
	text := sample(t).Map(Screen{Width: 120, Colour: true})
	var got []string
	for _, m := range regexp.MustCompile("\x1b\\[31m([^\x1b]*)\x1b\\[m").FindAllStringSubmatch(text, -1) {
		got = append(got, m[1])
	}
	golden.Compare(t, "red.txt", strings.Join(got, "\n")+"\n")
}

func TestNothingIsWrong(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		n    *Node
		want string
	}{
		{&Node{inspection: &network.Inspection{}}, "no network is on record\nnothing is wrong\n"},
		{&Node{networks: []Network{{Name: "pods", Bridge: "cbr0", MTU: 1500, Mode: "l2"}}, inspection: &network.Inspection{}}, "bridge cbr0 (MTU 1500)\n`- network pods: l2, 0 pods\n\nnothing is wrong\n"},
	} {
		expect.NoDiff(t, cmp.Diff(tt.want, tt.n.Map(Screen{Width: 80})))
	}
}

// wellFormed gives the texts of an SVG, and the names of its elements.
func wellFormed(t *testing.T, svg string) (texts, elements []string) {
	t.Helper()
	d := xml.NewDecoder(strings.NewReader(svg))
	for {
		token, err := d.Token()
		if err == io.EOF {
			return texts, elements
		}
		must.That(t, err == nil, "%v in\n%s", err, svg)
		switch token := token.(type) {
		case xml.StartElement:
			elements = append(elements, token.Name.Local)
			for _, a := range token.Attr {
				expect.That(t, !strings.Contains(a.Name.Local, "href") && !strings.HasPrefix(a.Name.Local, "on"),
					"attribute %s", a.Name.Local)
			}
		case xml.CharData:
			texts = append(texts, string(token))
		}
	}
}

func TestTheSVGIsWholeAndHarmless(t *testing.T) {
	t.Parallel()
	svg := sample(t).SVG()
	golden.Compare(t, "map.svg", svg)
	texts, elements := wellFormed(t, svg)
	for _, name := range elements {
		expect.Contains(t, " svg style rect line text g title ", " "+name+" ", "element %s", name)
	}
	all := strings.Join(texts, "\n")
	for _, want := range []string{"default/web-0", "10.61.0.10 fd61::2", "8080->80/tcp", "network home", "uplink", "eth0", `evil/\u001b[31m`,
		"set pods4 of table inet tombolo: element 10.61.0.12 is missing [repair]"} {
		expect.Contains(t, all, want)
	}
}

// All of it is within the picture, and pieces of a line do not overlap.
func TestTheSVGHasRoomForAll(t *testing.T) {
	t.Parallel()
	var svg struct {
		Width  float64 `xml:"width,attr"`
		Height float64 `xml:"height,attr"`
		Texts  []struct {
			X    float64 `xml:"x,attr"`
			Y    float64 `xml:"y,attr"`
			Text string  `xml:",chardata"`
		} `xml:"g>text"`
	}
	err := xml.Unmarshal([]byte(sample(t).SVG()), &svg)
	must.That(t, err == nil && len(svg.Texts) >= 30, "%d texts, %v", len(svg.Texts), err)
	end, line := 0.0, 0.0
	for _, one := range svg.Texts {
		if one.Y != line {
			end, line = 0, one.Y
		}
		expect.That(t, one.X >= end, "%q overlaps what is before it", one.Text)
		end = one.X + float64(utf8.RuneCountInString(one.Text))*7.2
		expect.That(t, end <= svg.Width && one.Y <= svg.Height, "%q is outside of the picture", one.Text)
	}
}

func TestTheScreenIsWhatTheEnvironmentSays(t *testing.T) {
	t.Parallel()
	file := must.Of(os.Create(t.TempDir() + "/out")).Get(t)
	defer file.Close()
	for _, tt := range []struct {
		env  map[string]string
		want Screen
	}{
		{nil, Screen{Width: 80}},
		{map[string]string{"COLUMNS": "132", "LANG": "de_DE.UTF-8"}, Screen{Width: 132, Unicode: true}},
		{map[string]string{"COLUMNS": "1", "LANG": "de_DE.UTF-8", "LC_ALL": "C"}, Screen{Width: 40}},
		{map[string]string{"COLUMNS": "many", "LC_CTYPE": "C.utf8"}, Screen{Width: 80, Unicode: true}},
	} {
		expect.Equal(t, ScreenOf(file, func(name string) string { return tt.env[name] }), tt.want, "%v", tt.env)
	}
}
