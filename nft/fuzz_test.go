package nft

import (
	"bytes"
	"net/netip"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/nftnl"
)

// The corpora in testdata hold what a kernel answered, without struct nfgenmsg.

func FuzzElements(f *testing.F) {
	f.Add(marshal(tableName(DefaultTable).elementAttributes(elementsOf(pod("00000000001", "10.22.0.5"))[0].element, "x")...))
	ep := pod("00000000001", "10.22.0.5", "fd00:22::5")
	ep.Ports = []Port{tcpPort("", 8080), tcpPort("192.0.2.1", 8081), tcpPort("2001:db8::1", 8081)}
	for _, el := range elementsOf(ep) {
		f.Add(marshal(tableName(DefaultTable).elementAttributes(el.element, el.comment)...))
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		list, err := decodeElements(unix.NFPROTO_INET, b)
		if err != nil {
			return
		}
		for _, el := range list {
			if el.String() == "" {
				t.Error("an element without a name")
			}
			if el.dataText() == "" {
				t.Error("data without a text")
			}
			if p, ok := el.port(); ok {
				pod, _ := netip.AddrFromSlice(el.data[:len(el.data)-slot])
				if pub, ok := p.on(pod); ok && p.check() == nil && !paddedWith(el.element, pub.element()) {
					t.Errorf("%s was understood as %s to %s", el, p, pod)
				}
			}
			// What was understood is what would be sent for it.
			bridge, addr, mac, ok := el.parse()
			switch {
			case !ok:
			case mac != nil:
				ep := Endpoint{Bridge: bridge, MAC: mac}
				if key := ep.elements()[0].key; !bytes.HasPrefix(el.key, []byte(bridge)) || !bytes.Equal(key[ifnameLen:ifnameLen+etherLen], mac) {
					t.Errorf("key %x was understood as %s, %s", el.key, bridge, mac)
				}
			case !isMasqueradeSet(el.set.name):
				ep := Endpoint{Bridge: bridge, Addrs: []netip.Addr{addr}}
				if key := ep.elements()[0].key; !bytes.HasSuffix(el.key, key[ifnameLen:]) {
					t.Errorf("key %x was understood as %s, %s", el.key, bridge, addr)
				}
			}
		}
		for _, ep := range collect(list, "") {
			if err := ep.Owner.check(); err != nil {
				t.Error(err)
			}
			for _, p := range ep.Ports {
				if p.String() == "" {
					t.Error("a port without a name")
				}
			}
		}
	})
}

// paddedWith says that two are the same but for what fills up the parts.
func paddedWith(a, b element) bool {
	return a.set == b.set && a.keyText() == b.keyText() && a.dataText() == b.dataText()
}

func FuzzRule(f *testing.F) {
	f.Add(marshal(nftnl.String(unix.NFTA_RULE_CHAIN, forwardChain), nftnl.Bytes(unix.NFTA_RULE_USERDATA, nftnl.Comment("clear the mark bit"))))
	f.Fuzz(func(t *testing.T, b []byte) {
		if chain, comment, err := decodeRule(b); err == nil && strings.ContainsRune(chain+comment, 0) {
			t.Errorf("a NUL in %q or %q", chain, comment)
		}
	})
}

func FuzzChain(f *testing.F) {
	f.Fuzz(func(t *testing.T, b []byte) {
		ch, err := nftnl.DecodeChain(b)
		if err != nil {
			return
		}
		n := podnet()
		rs, err := on(nil, nil).ruleset(&n)
		if err != nil {
			t.Fatal(err)
		}
		st := newState(rs)
		st.tables[unix.NFPROTO_INET] = nftnl.Table{}
		st.chains[inInet(ch.Name)] = ch
		if st.looksRight(rs) {
			t.Error("one chain was taken for all")
		}
		rs.differences(st)
		plan(rs, st)
	})
}

// What the next three read is numbers and names: there is nothing to hold them to
// but that they come to an end.

func FuzzSet(f *testing.F) {
	f.Fuzz(func(_ *testing.T, b []byte) { decodeSet(b) })
}

func FuzzTable(f *testing.F) {
	f.Fuzz(func(_ *testing.T, b []byte) { nftnl.DecodeTable(b) })
}

func FuzzOwnerComment(f *testing.F) {
	f.Add("tombolo:1:0123456789a:podnet")
	f.Add("tombolo:1:a:b:c")
	f.Add("tombolo:2:a:b")
	f.Add("")
	f.Fuzz(func(t *testing.T, comment string) {
		owner, network, ok := parseOwner(comment)
		if ok && ownerComment(owner, network) != comment {
			t.Errorf("%q was understood as %s, %s", comment, owner, network)
		}
		if ok && owner.check() != nil {
			t.Errorf("%q has owner %q", comment, owner)
		}
	})
}

func FuzzNetworkKey(f *testing.F) {
	f.Add("podnet")
	f.Add(longName)
	f.Fuzz(func(t *testing.T, name string) {
		if checkName(name) != nil {
			return
		}
		key := networkKey(name)
		comment := ownerComment("0123456789abcdef", key)
		if len(comment) > maxComment || len(masqueradeSet(true, key)) >= unix.NFT_SET_MAXNAMELEN {
			t.Errorf("comment of %d bytes, set name of %d", len(comment), len(masqueradeSet(true, key)))
		}
		if owner, got, ok := parseOwner(comment); !ok || owner != "0123456789abcdef" || got != key {
			t.Errorf("%q was understood as %s, %s", comment, owner, got)
		}
		n := Network{Name: name, Bridge: "cbr0", Policy: SameBridge, NFCall: true}
		own := elementState{comment: n.bridgeComment()}
		if _, _, ok := own.owner(); ok || !own.isNetwork(key) || len(own.comment) > maxComment {
			t.Errorf("%q of %d bytes is an endpoint's comment, or not the network's", own.comment, len(own.comment))
		}
		if key != name && checkName(key) == nil {
			t.Errorf("%q stands for %q, and could be another network's name", key, name)
		}
	})
}
