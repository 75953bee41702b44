package cni

import (
	"encoding/hex"
	"regexp"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
)

// said returns what the server's log has behind a label, once for each message.
func (l *lan) said(t *testing.T, label string) []string {
	t.Helper()
	var all []string
	for _, m := range regexp.MustCompile(`: \d+ `+label+`:? (.*)\n`).FindAllStringSubmatch(nstest.ReadIf(t, l.log), -1) {
		all = append(all, m[1])
	}
	return all
}

// The server's log shows what a pod asked for and told, with and without the field.
func TestDHCPRequestsAndProvidesWhatIsConfigured(t *testing.T) {
	t.Parallel()
	type list = []conf
	fromArg := conf{"provide": list{{"option": "host-name", "fromArg": "COLOUR"}, {"option": "60", "fromArg": "KIND", "value": "plain"}, {"option": 224, "fromArg": "COLOUR"}}}
	args := []option{arg("COLOUR", "blue"), arg("KIND", "printer"), arg("K8S_POD_NAME", "web-0"), arg("IgnoreUnknown", "1")}
	for name, tt := range map[string]struct {
		ipam          conf
		args          []option
		class, client string // what the server is told
		tagged        bool   // it got option 224
		asked, not    string // patterns of the options that are requested
	}{
		"nothing":     {nil, args, "", "web-0", false, `1:netmask.*3:router.*6:dns-server`, "42:ntp"},
		"fromArg":     {fromArg, args, "printer", "blue", true, "3:router", "42:ntp"},
		"value":       {conf{"provide": list{{"option": "60", "value": "plain"}}}, args, "plain", "web-0", false, "3:router", "42:ntp"},
		"request":     {conf{"request": list{{"option": "ntp-servers"}}}, args, "", "web-0", false, "3:router.*42:ntp", "78:"},
		"skipDefault": {conf{"request": list{{"option": "ntp-servers"}, {"skipDefault": true}}}, args, "", "web-0", false, "^42:ntp-server$", "3:router"},
	} {
		nstest.RunParallel(t, name, func(t *testing.T) {
			l := newLAN(t, "--dhcp-match=set:blue,224,blue", "--dhcp-option=option:ntp-server,192.168.50.7")
			ipam := conf{"type": "dhcp", "keeper": "optional"}
			for k, v := range tt.ipam {
				ipam[k] = v
			}
			w := l.network(conf{"ipam": ipam})
			p := l.pod("a")
			r := w.add(p, tt.args...)
			expect.Equal(t, strings.Join(l.said(t, "vendor class"), " "), strings.TrimSpace(tt.class+" "+tt.class), "vendor classes in DISCOVER and REQUEST")
			expect.Contains(t, l.leased(), " "+ip4(r).String()+" "+tt.client+" ")
			tags := strings.Join(l.said(t, "tags"), " ")
			expect.Equal(t, strings.Contains(tags, "blue"), tt.tagged, "tags %q", tags)
			asked := l.said(t, "requested options")
			must.That(t, len(asked) > 0, "nothing is requested:\n%s", nstest.ReadIf(t, l.log))
			all := strings.Join(asked, ", ")
			if name == "skipDefault" {
				all = asked[0]
			}
			expect.That(t, regexp.MustCompile(tt.asked).MatchString(all) && !strings.Contains(all, tt.not), "requested %q, want %s and not %s", all, tt.asked, tt.not)
			w.del(p)
		})
	}
	nstest.RunParallel(t, "without the argument", func(t *testing.T) {
		l := newLAN(t)
		fromArg := conf{"type": "dhcp", "keeper": "optional", "provide": list{{"option": "host-name", "fromArg": "COLOUR", "value": "red"}}}
		wantError(t, expect.Err(l.network(conf{"ipam": fromArg}).tryAdd(l.pod("a"))), 7, "CNI_ARGS has no COLOUR")
		expect.Equal(t, strings.Contains(nstest.ReadIf(t, l.log), "DHCPDISCOVER"), false, "the server was asked")
		l.wantNothing()
	})
}

// With both fields a server that knows rapid commit answers the first message with the lease.
func TestRapidCommitTakesTwoMessages(t *testing.T) {
	t.Parallel()
	for name, tt := range map[string]struct {
		field, server bool
		messages      string
	}{
		"both":     {true, true, "DISCOVER ACK"},
		"the pod":  {true, false, "DISCOVER OFFER REQUEST ACK"},
		"no field": {false, true, "DISCOVER OFFER REQUEST ACK"},
	} {
		nstest.RunParallel(t, name, func(t *testing.T) {
			var options []string
			if tt.server {
				options = []string{"--dhcp-rapid-commit"}
			}
			l := newLAN(t, options...)
			w := l.network(conf{"ipam": conf{"type": "dhcp", "keeper": "optional", "rapidCommit": tt.field}})
			p := l.pod("a")
			address := ip4(w.add(p)).String()
			var messages []string
			for _, m := range regexp.MustCompile(`DHCP(\w+)\(eth0\)`).FindAllStringSubmatch(nstest.ReadIf(t, l.log), -1) {
				if n := len(messages); n == 0 || messages[n-1] != m[1] { // one may have been sent again
					messages = append(messages, m[1])
				}
			}
			expect.Equal(t, strings.Join(messages, " "), tt.messages, "messages")
			wantPing(t, p.NS, router4)
			expect.Success(t, w.check(p))
			w.del(p)
			l.wantReleased(t, address)
		})
	}
}

// probes reads frames until the first DHCP message after which the pod has its lease was seen, and counts ARP probes.
func (c *tap) probes(address string) (count int) {
	c.t.Helper()
	target := hex.EncodeToString(nstest.Addr(address).AsSlice())
	buf := make([]byte, 1<<16)
	for {
		n, _, err := unix.Recvfrom(c.fd, buf, unix.MSG_DONTWAIT)
		if err == unix.EINTR {
			continue
		}
		if err != nil {
			return count
		}
		// RFC 826: type, operation 1, sender's IP 0.0.0.0 (a probe, RFC 5227), target's IP.
		text := hex.EncodeToString(buf[:n])
		if n >= 42 && text[24:28] == "0806" && text[40:44] == "0001" && text[56:64] == "00000000" && text[76:84] == target {
			count++
		}
	}
}

func TestDetectConflictsProbesBeforeItTakesAnAddress(t *testing.T) {
	t.Parallel()
	for name, field := range map[string]bool{"with": true, "without": false} {
		nstest.RunParallel(t, name, func(t *testing.T) {
			l := newLAN(t, "--dhcp-sequential-ip", "--dhcp-range=192.168.50.30,192.168.50.40,1h")
			other := nstest.New(t)
			nstest.Veth(t, l.ns, "lan1", other, "eth0")
			l.ip("link set lan1 master br0")
			nstest.Run(t, other, "ip", "address", "add", "192.168.50.30/24", "dev", "eth0")
			c := capture(t, l.router, "eth0")
			w := l.network(conf{"ipam": conf{"type": "dhcp", "keeper": "optional", "detectConflicts": field}})
			p := l.pod("a")
			got := ip4(w.add(p)).String()
			declined := strings.Contains(nstest.ReadIf(t, l.log), "DHCPDECLINE(eth0) 192.168.50.30 ")
			want, probes := "192.168.50.30", 0
			if field {
				want, probes = "192.168.50.31", 3
			}
			expect.Equal(t, got, want, "the pod has")
			expect.Equal(t, declined, field, "the other machine's address is declined")
			expect.Equal(t, c.probes(got), probes, "ARP probes for %s", got)
			w.del(p)
		})
	}
}
