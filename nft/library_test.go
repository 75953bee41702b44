package nft

import (
	"fmt"
	"io"
	"maps"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	"github.com/google/nftables/userdata"
	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/nftnl"
	"github.com/tombolo-cni/tombolo/internal/nl/nltest"
	"github.com/tombolo-cni/tombolo/internal/nstest"
	"github.com/tombolo-cni/tombolo/netns"
	"github.com/tombolo-cni/tombolo/nft/internal/ruleset"
)

// A reading is what a reader sees of our tables, or should see: a line for each chain, rule,
// set and element.
type reading map[string][]string

func (r reading) add(p ruleset.Place, format string, args ...any) {
	at := fmt.Sprintf("%d %s", p.Family, p.Name)
	r[at] = append(r[at], fmt.Sprintf(format, args...))
}

// byLibrary reads by google/nftables' Conn, which shares nothing with us.
func byLibrary(t *testing.T, ns *netns.NS) reading {
	t.Helper()
	c, err := nftables.New(nftables.WithNetNSFd(ns.FD()))
	if err != nil {
		t.Fatal(err)
	}
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	r := reading{}
	tables, err := c.ListTables()
	must(err)
	for _, table := range tables {
		if table.Name != DefaultTable {
			t.Errorf("table %s", table.Name)
		}
		family := byte(table.Family)
		chains, err := c.ListChainsOfTableFamily(table.Family)
		must(err)
		for _, ch := range chains {
			at := ruleset.Place{Family: family, Name: ch.Name}
			r.add(at, "%s %d %d %d", ch.Type, *ch.Hooknum, *ch.Priority, *ch.Policy)
			rules, err := c.GetRules(table, ch)
			must(err)
			for _, rule := range rules {
				comment, _ := userdata.GetString(rule.UserData, userdata.TypeComment)
				r.add(at, "%q %x", comment, stepsOf(t, family, rule.Exprs))
			}
		}
		sets, err := c.GetSets(table)
		must(err)
		for _, s := range sets {
			at := ruleset.Place{Family: family, Name: s.Name}
			r.add(at, "%#x/%d %#x/%d %v", s.KeyType.GetNFTMagic(), s.KeyType.Bytes, s.DataType.GetNFTMagic(), s.DataType.Bytes, s.IsMap)
			elements, err := c.GetSetElements(s)
			must(err)
			lines := make([]string, len(elements))
			for i, el := range elements {
				lines[i] = fmt.Sprintf("%x%x %x %q", el.Key, el.KeyEnd, el.Val, el.Comment)
			}
			slices.Sort(lines)
			for _, line := range lines {
				r.add(at, "%s", line)
			}
		}
	}
	return r
}

// stepsOf writes expressions once more, as the kernel gives them: a register of 16 bytes by
// its own number, the upper end of a range that has none, and that there is a port.
func stepsOf(t *testing.T, family byte, steps []expr.Any) []byte {
	t.Helper()
	whole := func(register *uint32) {
		if behind := *register - unix.NFT_REG32_00; *register >= unix.NFT_REG32_00 && behind%4 == 0 {
			*register = unix.NFT_REG_1 + behind/4
		}
	}
	var list []netlink.Attribute
	for _, step := range steps {
		switch e := step.(type) {
		case *expr.Meta:
			whole(&e.Register)
		case *expr.Payload:
			whole(&e.DestRegister)
		case *expr.NAT:
			whole(&e.RegProtoMin)
			e.RegAddrMax, e.RegProtoMax, e.Specified = e.RegAddrMin, e.RegProtoMin, true
		}
		b, err := expr.Marshal(family, step)
		if err != nil {
			t.Fatal(err)
		}
		list = append(list, nftnl.Bytes(netlink.Nested|unix.NFTA_LIST_ELEM, b))
	}
	return nltest.Canonical(nltest.Attributes(list...))
}

// meantSteps has the library read what we would send.
func meantSteps(t *testing.T, family byte, write func(*nftnl.Expressions)) []byte {
	t.Helper()
	steps, err := nftnl.Marshal(family, write)
	if err != nil {
		t.Fatal(err)
	}
	c, err := nftables.New(nftables.WithTestDial(func(req []netlink.Message) ([]netlink.Message, error) {
		if req == nil {
			return nil, io.EOF
		}
		return nltest.Split(answerOf(req[0], unix.NFT_MSG_NEWRULE, 0, nftnl.String(unix.NFTA_RULE_TABLE, DefaultTable),
			nftnl.String(unix.NFTA_RULE_CHAIN, "x"), nftnl.Bytes(netlink.Nested|unix.NFTA_RULE_EXPRESSIONS, steps))), nil
	}))
	if err != nil {
		t.Fatal(err)
	}
	table := &nftables.Table{Name: DefaultTable, Family: nftables.TableFamily(family)}
	rules, err := c.GetRules(table, &nftables.Chain{Name: "x", Table: table})
	if err != nil || len(rules) != 1 {
		t.Fatal(rules, err)
	}
	return stepsOf(t, family, rules[0].Exprs)
}

// meant is what should be there, once networks and endpoints are.
func meant(t *testing.T, c *Conn, networks []Network, eps []Endpoint) reading {
	t.Helper()
	r := reading{}
	chains, sets := map[ruleset.Place]ruleset.Chain{}, map[ruleset.Place]ruleset.Set{}
	elements := map[ruleset.Place][]string{}
	note := func(el ruleset.Element, comment string) {
		line := fmt.Sprintf("%x %x %q", el.Key, el.Data, comment)
		if !slices.Contains(elements[el.Set], line) {
			elements[el.Set] = append(elements[el.Set], line)
		}
	}
	for i := range networks {
		rs, err := c.ruleset(&networks[i])
		if err != nil {
			t.Fatal(err)
		}
		for _, ch := range rs.Chains {
			chains[ch.Place] = ch
		}
		for _, s := range rs.Sets() {
			sets[s.Place] = s
			note(s.Sentinel(), ruleset.SentinelComment)
		}
		for _, el := range rs.Bridge {
			note(el, rs.BridgeComment)
		}
	}
	for i := range eps {
		for _, el := range eps[i].commented() {
			if claim, ok := claimOf(el.Element); ok {
				note(claim, ruleset.ClaimComment)
			}
			note(el.Element, el.comment)
		}
	}
	for at, ch := range chains {
		r.add(at, "%s %d %d %d", ch.Kind, ch.Hook, ch.Priority, ruleset.PolicyAccept)
		for _, rule := range ch.Rules() {
			r.add(at, "%q %x", rule.Comment, meantSteps(t, ch.Family, rule.Steps))
		}
	}
	for at, s := range sets {
		r.add(at, "%#x/%d %#x/%d %v", s.KeyType, s.KeyLen, s.DataType, s.DataLen, s.DataLen > 0)
		for _, line := range slices.Sorted(slices.Values(elements[at])) {
			r.add(at, "%s", line)
		}
		delete(elements, at)
	}
	for at := range maps.Keys(elements) {
		t.Errorf("elements of %v, which is no set", at)
	}
	return r
}

// What google/nftables reads is what we meant, whether we have made it or nft has, of what
// it prints of ours.
func TestLibraryReadsWhatWasMeant(t *testing.T) {
	t.Parallel()
	for _, tc := range rulesets {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			ours, theirs := nstest.New(t), nstest.New(t)
			c := dialMark(t, ours, tc.mark)
			for _, n := range tc.networks {
				mustEnsure(t, c, n)
			}
			mustAdd(t, c, tc.eps...)
			nft(t, theirs, "-f", filepath.Join("testdata", "rulesets", strings.ReplaceAll(tc.name, " ", "-")+".nft"))
			want := meant(t, c, tc.networks, tc.eps)
			for maker, ns := range map[string]*netns.NS{"our": ours, "nft's": theirs} {
				if diff := cmp.Diff(want, byLibrary(t, ns)); diff != "" {
					t.Errorf("the library's reading of %s ruleset (-meant +read):\n%s", maker, diff)
				}
			}
		})
	}
}

func TestTypesHaveTheLibrarysNumbers(t *testing.T) {
	t.Parallel()
	for theirs, ours := range map[nftables.SetDatatype]uint32{
		nftables.TypeNFProto: nftnl.TypeFamily, nftables.TypeInteger: nftnl.TypeInteger, nftables.TypeIPAddr: nftnl.TypeIPv4, nftables.TypeIP6Addr: nftnl.TypeIPv6,
		nftables.TypeEtherAddr: nftnl.TypeEther, nftables.TypeInetProto: nftnl.TypeProtocol, nftables.TypeInetService: nftnl.TypePort, nftables.TypeIFName: nftnl.TypeIfname,
	} {
		if theirs.GetNFTMagic() != ours {
			t.Errorf("%s: %d, and the library has %d", theirs.Name, ours, theirs.GetNFTMagic())
		}
	}
	if nftnl.TypeBits != nftables.SetConcatTypeBits {
		t.Errorf("%d bits for a part of a concatenation", nftnl.TypeBits)
	}
}
