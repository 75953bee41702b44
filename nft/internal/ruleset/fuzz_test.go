package ruleset

import (
	"strings"
	"testing"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/nftnl"
	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
)

// The corpora in testdata hold what a kernel answered, without struct nfgenmsg.

func FuzzRule(f *testing.F) {
	seed, err := netlink.MarshalAttributes([]netlink.Attribute{
		nftnl.String(unix.NFTA_RULE_CHAIN, forwardChain), nftnl.Bytes(unix.NFTA_RULE_USERDATA, nftnl.Comment("clear the mark bit")),
	})
	must.Succeed(f, err)
	f.Add(seed)
	f.Fuzz(func(t *testing.T, b []byte) {
		chain, comment := decodeRule(b)
		expect.That(t, !strings.ContainsRune(chain+comment, 0), "a NUL in %q or %q", chain, comment)
	})
}

func FuzzChain(f *testing.F) {
	f.Fuzz(func(t *testing.T, b []byte) {
		ch := nftnl.DecodeChain(b)
		rs := New(podnet(), nftnl.DefaultTable, nftnl.DefaultMark)
		st := newState(rs)
		st.Tables[unix.NFPROTO_INET] = nftnl.Table{}
		st.Chains[InInet(ch.Name)] = ch
		changes := Plan(rs, st)
		expect.That(t, !changes.IsEmpty(), "one chain was taken for all")
		rs.Differences(st)
		Plan(rs, st)
	})
}

// What this one reads is numbers and names: there is nothing to hold it to but that it comes to an
// end.

func FuzzSet(f *testing.F) { f.Fuzz(func(_ *testing.T, b []byte) { decodeSet(b) }) }
