package foreign

import (
	"fmt"
	"net/netip"
	"testing"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/golden"
	"github.com/tombolo-cni/tombolo/internal/nftnl"
	"github.com/tombolo-cni/tombolo/internal/nl/nltest"
	"github.com/tombolo-cni/tombolo/internal/nstest"
)

// wantSane checks what holds for whatever was read.
func wantSane(t *testing.T, chains map[string][]rule, start string) {
	t.Helper()
	for _, prefix := range [][]netip.Prefix{nil, nstest.Prefixes("10.22.0.0/16")} {
		p := &podPacket{mark: nftnl.DefaultMark, bridge: "cbr0", index: 3, prefixes: prefix, family: unix.NFPROTO_IPV4}
		w := newWalk(p, chains)
		f := w.chain(start)
		if (f.how == comesBack) != (f.by == nil) || (f.by == nil) != (f.via == nil) {
			t.Errorf("fate %+v", f)
		}
		all := content{chains: chains}
		if policy, first := all.policyOf(f.by); first && policy == "" {
			t.Errorf("a policy of %+v without a name", f)
		}
	}
	for _, policy := range []uint32{0, policyAccept} {
		p := familyAdmission{family: unix.NFPROTO_IPV4, own: own{nftnl.DefaultMark, admissionComment}, policy: policy, placer: newPlacer(unix.NFPROTO_IPV4, nftnl.DefaultMark)}
		p.placer.chains = chains
		p.placer.load = func(string) ([]rule, error) { return nil, nil }
		p.placer.references = func(string) (int, error) { return 1, nil }
		p.decide()
		if p.keep != nil && p.insert != nil || (p.to.path == nil || p.to.blocked != "") != (p.keep == nil && p.insert == nil) {
			t.Errorf("decided on %+v", p)
		}
		p.obstacle(&content{p.placer.chains, nil}, &podPacket{mark: nftnl.DefaultMark, bridge: "cbr0"})
	}
}

func FuzzForeignRule(f *testing.F) {
	expressions, err := nftnl.Marshal(unix.NFPROTO_IPV4, func(x *nftnl.Expressions) { admission(x, nftnl.DefaultMark) })
	if err != nil {
		f.Fatal(err)
	}
	f.Add(uint8(unix.NFPROTO_IPV4), nltest.Attributes(nftnl.String(unix.NFTA_RULE_CHAIN, iptablesForward),
		nftnl.Bytes(netlink.Nested|unix.NFTA_RULE_EXPRESSIONS, expressions), nftnl.Bytes(unix.NFTA_RULE_USERDATA, nftnl.Comment(admissionComment))))
	f.Fuzz(func(t *testing.T, family uint8, b []byte) {
		r, err := decodeRule(family, b)
		if err != nil {
			return
		}
		r.ours = r.comment == admissionComment
		for i := range r.conditions {
			c := &r.conditions[i]
			if c.on == onSource && !c.prefix.IsValid() {
				t.Errorf("condition %+v", c)
			}
		}
		if r.isAdmission(nftnl.DefaultMark) && (!r.ours || r.isAdmission(nftnl.DefaultMark<<1)) {
			t.Errorf("taken for ours: %+v", r)
		}
		wantSane(t, map[string][]rule{r.chain: {r}}, r.chain)
	})
}

func FuzzLegacyTable(f *testing.F) {
	f.Fuzz(func(t *testing.T, is6 bool, info, entries []byte) {
		family := byte(unix.NFPROTO_IPV4)
		if is6 {
			family = unix.NFPROTO_IPV6
		}
		pods := &podPacket{mark: nftnl.DefaultMark, bridge: "cbr0", prefixes: nstest.Prefixes("10.22.0.0/16")}
		effect, place, err := legacyStops(family, info, entries, pods)
		if (effect == "" || err != nil) && place != "" || effect != "" && place == "" {
			t.Errorf("%q at %q, %v", effect, place, err)
		}
	})
}

func FuzzSetKeys(f *testing.F) {
	f.Fuzz(func(_ *testing.T, b, link []byte) {
		_ = eachElement(b, func(key []byte, _ bool) { keyNames(key, string(link)) })
	})
}

// What kernels answer is read to the end; go test -update makes the corpora of it.
func TestWhatIsForeignIsRead(t *testing.T) {
	t.Parallel()
	save := func(target, name string, values ...any) {
		if golden.Updates() {
			nstest.SaveCorpus(t, target, "kernel-"+name, values...)
		}
	}
	c, ns := dialNew(t)
	nftables(t, ns, firewalldFixture(t))
	nftables(t, ns, `table inet x { chain f {
		iifname { "eth0", "cbr*" } ip saddr 10.0.0.0/9 accept; iif "lo" drop; meta mark & 0x1000 != 0 accept
		ct state vmap { established : accept, invalid : drop }; ip6 saddr fe80::/10 accept; limit rate 1/second return
	}; }`)
	nstest.Script(t, ns, docker()...)
	nstest.Script(t, ns, "iptables -A FORWARD ! -i eth0 -p tcp -m conntrack --ctstate NEW -j REJECT", "iptables -A FORWARD "+ourRule)
	mustPlace(t, c, false)
	dump := func(family uint8, msg uint16, each func([]byte) error, attrs ...netlink.Attribute) {
		t.Helper()
		n := 0
		err := c.dump("list", family, msg, func(data []byte) error { n++; return each(data) }, attrs...)
		if err != nil || n == 0 {
			t.Fatalf("%d messages, %v", n, err)
		}
	}
	n := 0
	for _, family := range []uint8{unix.NFPROTO_INET, unix.NFPROTO_IPV4} {
		dump(family, unix.NFT_MSG_GETRULE, func(data []byte) error {
			n++
			r, err := decodeRule(family, data)
			if len(r.conditions) > 0 && r.chain != "filter_INPUT" {
				save("FuzzForeignRule", fmt.Sprintf("%02d", n), family, data)
			}
			if r.chain == "" || r.handle == 0 || r.verdict == goesOn {
				t.Errorf("rule %+v", r)
			}
			return err
		})
	}
	for _, set := range []string{"__set0", "__map0"} {
		dump(unix.NFPROTO_INET, unix.NFT_MSG_GETSETELEM, func(data []byte) error {
			save("FuzzSetKeys", set, data, []byte("cbr0"))
			return eachElement(data, func(key []byte, _ bool) {
				if len(key) == 0 {
					t.Errorf("a key of set %s is empty", set)
				}
			})
		}, nftnl.String(unix.NFTA_SET_ELEM_LIST_TABLE, "x"), nftnl.String(unix.NFTA_SET_ELEM_LIST_SET, set))
	}
	legacy(t, ns, "iptables -P FORWARD DROP", "iptables -N a", "iptables -A a -m mark --mark 1/1 -j ACCEPT", "iptables -A a -j REJECT",
		"iptables -A FORWARD -i cb+ ! -o eth0 -p tcp -g a", "iptables -A FORWARD -m comment --comment x -j a")
	for _, f := range legacyFamilies() {
		info, entries, found, err := readLegacyFilter(ns, f)
		if err != nil || !found {
			t.Fatal(found, err)
		}
		save("FuzzLegacyTable", f.program, f.proto == unix.NFPROTO_IPV6, info, entries)
		pods := &podPacket{mark: nftnl.DefaultMark, bridge: "br0"}
		if effect, place, err := legacyStops(f.proto, info, entries, pods); err != nil || effect != effectOfPolicy || place != "-A FORWARD" {
			t.Errorf("%s: %q at %q, %v", f.program, effect, place, err)
		}
		// What is cut within an entry is an error.
		for n := 1; n < layoutOf(f.proto).length; n++ {
			if _, _, err := legacyStops(f.proto, info, entries[:len(entries)-n], pods); err == nil {
				t.Errorf("%s: no error without the last %d bytes", f.program, n)
			}
		}
	}
}
