package foreign

import (
	"fmt"
	"testing"

	"github.com/google/nftables/expr"
	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/nftnl"
	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/golden"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nltest"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
)

// wantSane checks what holds for whatever was read.
func wantSane(t *testing.T, r rule) {
	t.Helper()
	for _, policy := range []verdict{drops, accepts} {
		b := base{rules: []rule{r}, policy: policy, chain: func(string) []rule { return []rule{r} }}
		p := b.decide("")
		if p.index < -1 || p.index > len(b.rules) || len(p.kept) > 0 && (p.index < 0 || p.index == len(b.rules)) {
			t.Errorf("decided on %+v", p)
		}
		b.obstacle("")
	}
}

func FuzzForeignRule(f *testing.F) {
	expressions, err := nftnl.Marshal(unix.NFPROTO_IPV4, nftnl.Collect(func(x *nftnl.Expressions) {
		x.Meta(expr.MetaKeyMARK, nftnl.First)
		x.Mask([]byte{0, 0x10, 0, 0}, nil)
		x.Compare(expr.CmpOpEq, []byte{0, 0x10, 0, 0})
		x.Add(&expr.Verdict{Kind: expr.VerdictAccept})
	}))
	must.That(f, err == nil, "%v", err)
	f.Add(uint8(unix.NFPROTO_IPV4), nltest.Attributes(nftnl.String(unix.NFTA_RULE_CHAIN, iptablesForward),
		nftnl.Bytes(netlink.Nested|unix.NFTA_RULE_EXPRESSIONS, expressions), nftnl.Bytes(unix.NFTA_RULE_USERDATA, nftnl.Comment(admissionComment))))
	f.Fuzz(func(t *testing.T, _ uint8, b []byte) {
		r := decodeRule(b, &packet{mark: nftnl.DefaultMark, known: nftnl.DefaultMark, link: "cbr0"})
		r.ours = r.comment == admissionComment
		expect.That(t, !r.isAdmission() || r.ours && !r.conditional && !r.unmet, "taken for ours: %+v", r)
		wantSane(t, r)
	})
}

func FuzzLegacyTable(f *testing.F) {
	f.Fuzz(func(t *testing.T, is6 bool, forward, policy uint32, entries []byte) {
		family := legacyFamilies()[0]
		if is6 {
			family = legacyFamilies()[1]
		}
		b, err := family.forwardChain(&legacyTable{entries, int(forward), int(policy)}, &packet{mark: nftnl.DefaultMark, known: nftnl.DefaultMark})
		if err == nil {
			b.obstacle("")
		}
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
	nftables(t, ns, `table inet x { chain f {
		iifname { "eth0", "cbr*" } ip saddr 10.0.0.0/9 accept; iif "lo" drop; meta mark & 0x10 != 0 accept
		ct state established,related accept; ip6 saddr fe80::/10 accept; limit rate 1/second return
	}; }`)
	nstest.Script(t, ns, "iptables -A FORWARD ! -i eth0 -p tcp -m conntrack --ctstate NEW -j REJECT", "iptables -A FORWARD "+ourRule)
	for _, family := range []uint8{unix.NFPROTO_INET, unix.NFPROTO_IPV4} {
		n := 0
		err := nftnl.List(c.nl, "list", family, unix.NFT_MSG_GETRULE, func(data []byte) error {
			n++
			r := decodeRule(data, &packet{})
			save("FuzzForeignRule", fmt.Sprintf("%d-%02d", family, n), family, data)
			expect.That(t, r.handle != 0 && r.verdict != goesOn && !r.opaque, "rule %+v", r)
			return nil
		})
		must.That(t, err == nil && n != 0, "%d messages, %v", n, err)
	}
	legacy(t, ns, "iptables -P FORWARD DROP", "iptables -N a", "iptables -A a -j REJECT",
		"iptables -A FORWARD -i cb+ ! -o eth0 -p tcp -g a", "iptables -A FORWARD -m comment --comment x -j a")
	for _, f := range legacyFamilies() {
		var table *legacyTable
		err := ns.Do(func() (err error) { table, err = f.read(); return err })
		must.That(t, err == nil && len(table.entries) > 0, "%v %v", table, err)
		save("FuzzLegacyTable", f.program, f.proto == unix.NFPROTO_IPV6, uint32(table.forward), uint32(table.policy), table.entries)
		b, err := f.forwardChain(table, &packet{mark: nftnl.DefaultMark, known: nftnl.DefaultMark})
		must.That(t, err == nil && len(b.rules) == 2, "%s: %+v, %v", f.program, b, err)
		o, number := b.obstacle("")
		expect.That(t, o != nil && number == 0 && o.Maybe, "%s: %v, %d", f.program, o, number)
		table.entries = table.entries[:table.policy+1]
		expect.Failure(t, expect.Err(f.forwardChain(table, &packet{})),
			"%s: no error with a policy of one byte", f.program)
	}
}
