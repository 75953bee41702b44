package cni

import (
	"strings"
	"testing"

	"github.com/containernetworking/cni/pkg/types"
	"github.com/google/go-cmp/cmp"

	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
)

func TestResolvConfIsUnderstood(t *testing.T) {
	t.Parallel()
	const text = "# comment\n; another\n\nnameserver 192.0.2.53\n  nameserver\tfd00::53 trailing\nnameserver\n" +
		"domain lan.example\r\nsearch a.example b.example\nsearch c.example\noptions ndots:5\noptions timeout:1 attempts:2\nsortlist x\nnameserver 192.0.2.54"
	want := types.DNS{
		Nameservers: []string{"192.0.2.53", "fd00::53", "192.0.2.54"},
		Domain:      "lan.example",
		Search:      []string{"a.example", "b.example", "c.example"},
		Options:     []string{"ndots:5", "timeout:1", "attempts:2"},
	}
	expect.NoDiff(t, cmp.Diff(want, parseResolvConf(text)))
}

// FuzzResolvConf: any text gives fields without white space in them.
func FuzzResolvConf(f *testing.F) {
	f.Add("nameserver 192.0.2.53\nsearch a b\noptions ndots:5\ndomain x\n")
	f.Add("# c\n;d\nnameserver")
	f.Fuzz(func(t *testing.T, text string) {
		dns := parseResolvConf(text)
		for _, list := range [][]string{dns.Nameservers, dns.Search, dns.Options} {
			for _, item := range list {
				must.That(t, item != "" && strings.TrimSpace(item) == item, "%q gave the item %q", text, item)
			}
		}
	})
}
