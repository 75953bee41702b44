package nft

import (
	"bytes"
	"net/netip"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/nftnl"
	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/nltest"
	"github.com/tombolo-cni/tombolo/nft/internal/ruleset"
)

// The corpora in testdata hold what a kernel answered, without struct nfgenmsg.

func FuzzElements(f *testing.F) {
	f.Add(nltest.Attributes(ruleset.TableName(nftnl.DefaultTable).ElementAttributes(elementsOf(pod("00000000001", "10.22.0.5"))[0])...))
	ep := pod("00000000001", "10.22.0.5", "fd00:22::5")
	ep.Ports = []Port{tcpPort("", 8080), tcpPort("192.0.2.1", 8081), tcpPort("2001:db8::1", 8081)}
	for _, el := range elementsOf(ep) {
		f.Add(nltest.Attributes(ruleset.TableName(nftnl.DefaultTable).ElementAttributes(el)...))
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		list := ruleset.DecodeElements(unix.NFPROTO_INET, b)
		for _, el := range list {
			expect.That(t, el.String() != "", "an element without a name")
			expect.That(t, el.DataText() != "", "data without a text")
			// What was understood is what would be sent for it.
			bridge, addr, mac, ok := el.Parse()
			switch {
			case !ok:
			case mac != nil:
				ep := Endpoint{Bridge: bridge, MAC: mac}
				if key := ep.elements()[0].Key; !bytes.HasPrefix(el.Key, []byte(bridge)) || !bytes.Equal(key[ruleset.IfnameLen:ruleset.IfnameLen+ruleset.EtherLen], mac) {
					t.Errorf("key %x was understood as %s, %s", el.Key, bridge, mac)
				}
			case !ruleset.IsMasqueradeSet(el.Set.Name):
				ep := Endpoint{Bridge: bridge, Addrs: []netip.Addr{addr}}
				expect.That(t, bytes.HasSuffix(el.Key, ep.elements()[0].Key[ruleset.IfnameLen:]),
					"key %x was understood as %s, %s", el.Key, bridge, addr)
			}
		}
		for _, ep := range collect(list, "") {
			expect.Success(t, ep.Owner.check())
		}
	})
}

func FuzzOwnerComment(f *testing.F) {
	f.Add("tombolo:1:0123456789a:podnet")
	f.Add("tombolo:1:a:b:c")
	f.Add("tombolo:2:a:b")
	f.Add("")
	f.Fuzz(func(t *testing.T, comment string) {
		owner, network, ok := ownerOf(&ruleset.Element{Comment: comment})
		expect.That(t, !ok || ownerComment(owner, network) == comment,
			"%q was understood as %s, %s", comment, owner, network)
		expect.That(t, !ok || owner.check() == nil, "%q has owner %q", comment, owner)
	})
}

func FuzzNetworkKey(f *testing.F) {
	f.Add("podnet")
	f.Add(longName)
	f.Fuzz(func(t *testing.T, name string) {
		if checkName(name) != nil {
			return
		}
		key := ruleset.NetworkKey(name)
		comment := ownerComment("0123456789abcdef", key)
		if len(comment) > ruleset.MaxComment || len(ruleset.MasqueradeSet(true, key)) >= unix.NFT_SET_MAXNAMELEN {
			t.Errorf("comment of %d bytes, set name of %d", len(comment), len(ruleset.MasqueradeSet(true, key)))
		}
		owner, got, ok := ownerOf(&ruleset.Element{Comment: comment})
		expect.That(t, ok && owner == "0123456789abcdef" && got == key, "%q was understood as %s, %s", comment, owner, got)
		n := Network{Name: name, Bridge: "cbr0", Policy: SameBridge, NFCall: true}
		own := ruleset.Element{Comment: n.spec().BridgeComment()}
		if _, _, ok := ownerOf(&own); ok || !own.IsNetwork(key) || len(own.Comment) > ruleset.MaxComment {
			t.Errorf("%q of %d bytes is an endpoint's comment, or not the network's", own.Comment, len(own.Comment))
		}
		expect.That(t, key == name || checkName(key) != nil,
			"%q stands for %q, and could be another network's name", key, name)
	})
}
