package repotest

import (
	"fmt"
	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"go/ast"
	"go/token"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// handmade is something that a library does, by what gives away that it is done by hand.
type handmade struct {
	what, by string
	// uses matches what is taken out of packages ("unix.NLA_HDRLEN"), functions what is
	// declared; nil is none.
	uses, functions *regexp.Regexp
	// may are the files or folders that docs/dev/dependencies.md gives a reason for.
	may []string
}

func handmades() []handmade {
	const expressions = `PAYLOAD|META|CMP|BITWISE|IMMEDIATE|LOOKUP|NAT|MASQ|REDIR|CT|COUNTER|LIMIT|RANGE|DYNSET|NUMGEN|FIB|LOG|REJECT|QUEUE|OBJREF|EXTHDR|BYTEORDER|HASH|RT|MATCH|TARGET|DUP`
	return []handmade{
		{
			what: "headers of messages and attributes", by: "github.com/mdlayher/netlink",
			uses: regexp.MustCompile(`^(unix\.(NLMSG_HDRLEN|NLMSG_ALIGNTO|NLA_.*|RTA_ALIGNTO|NlMsghdr|NlAttr|RtAttr|SizeofNlMsghdr|SizeofNlAttr|SizeofRtAttr)|nlenc\..*)$`),
			may:  []string{"internal/nl/decode.go", "internal/nftnl"},
		},
		{
			what: "an encoder of ours", by: "netlink.AttributeEncoder and AttributeDecoder",
			uses: regexp.MustCompile(`^nl\.(Encoder|ParseAttrs|Attrs|Message)$`),
		},
		{
			what: "expressions of nf_tables", by: "github.com/google/nftables/expr",
			uses: regexp.MustCompile(`^unix\.NFTA_(` + expressions + `)_`),
			// Reading others' rules.
			may: []string{"nft/foreign"},
		},
		{
			what: "programs of socket filters", by: "golang.org/x/net/bpf",
			uses: regexp.MustCompile(`^unix\.(SockFilter|BPF_(LD|ALU|JMP|RET))$`),
			may:  []string{"internal/nl/socket.go", "bridge/share/program.go"},
		},
		{
			what: "checksums", by: "the kernel, or golang.org/x/net/icmp",
			functions: regexp.MustCompile(`(?i)^(.*checksum.*|csum.*|pseudo)$`),
		},
	}
}

func (h *handmade) find(fset *token.FileSet, f *ast.File) []string {
	var found []string
	ast.Inspect(f, func(n ast.Node) bool {
		switch n := n.(type) {
		case *ast.SelectorExpr:
			if x, ok := n.X.(*ast.Ident); ok && h.uses != nil && h.uses.MatchString(x.Name+"."+n.Sel.Name) {
				found = append(found, fmt.Sprintf("%s: %s.%s: %s by hand, for which there is %s", position(fset, n), x.Name, n.Sel.Name, h.what, h.by))
			}
		case *ast.FuncDecl:
			if h.functions != nil && h.functions.MatchString(n.Name.Name) {
				found = append(found, fmt.Sprintf("%s: func %s: %s by hand, for which there is %s", position(fset, n), n.Name.Name, h.what, h.by))
			}
		}
		return true
	})
	return found
}

func TestWhatLibrariesDoIsNotDoneByHand(t *testing.T) {
	t.Parallel()
	var listed []string
	for _, row := range tables(t, "docs/dev/dependencies.md")[2] {
		listed = append(listed, strings.Split(row[1], ", ")...)
	}
	within := func(path string, places []string) int {
		return slices.IndexFunc(places, func(place string) bool { return path == place || strings.HasPrefix(path, place+"/") })
	}
	list := handmades()
	needed := map[string]bool{}
	for _, p := range shippedPackages(t) {
		fset, files := p.files(t)
		for _, f := range files {
			path := short(t, fset.Position(f.Package).Filename)
			for i := range list {
				found := list[i].find(fset, f)
				if len(found) == 0 {
					continue
				}
				place := within(path, list[i].may)
				if place < 0 {
					t.Errorf("%s. Where it has to be, docs/dev/dependencies.md says why", short(t, found[0]))
					continue
				}
				needed[list[i].what+list[i].may[place]] = true
				if within(path, listed) < 0 {
					t.Errorf("docs/dev/dependencies.md gives no reason for %s of %s", list[i].what, path)
				}
			}
		}
	}
	for _, h := range list {
		for _, place := range h.may {
			_, err := os.Stat(filepath.Join(root(t), place))
			expect.That(t, err != nil || needed[h.what+place], "%s has an exception for %s that it does not need", place, h.what)
		}
	}
}

func TestWhatIsDoneByHandIsFound(t *testing.T) {
	t.Parallel()
	fset, files := parse(t, `package p

var n = unix.NLA_HDRLEN + unix.NLA_F_NESTED
var m = unix.NFTA_CMP_SREG + unix.NFTA_RULE_TABLE

func f(e *nl.Encoder) { nlenc.Uint32(nil); nl.Decode() }

func checksum(b []byte) uint16 { return 0 }
`)
	var found []string
	for _, h := range handmades() {
		found = append(found, h.find(fset, files[0])...)
	}
	mustFind(t, []string{
		"made-up.go:3: unix.NLA_HDRLEN: headers of messages and attributes by hand, for which there is github.com/mdlayher/netlink",
		"made-up.go:3: unix.NLA_F_NESTED: headers of messages and attributes by hand, for which there is github.com/mdlayher/netlink",
		"made-up.go:6: nlenc.Uint32: headers of messages and attributes by hand, for which there is github.com/mdlayher/netlink",
		"made-up.go:6: nl.Encoder: an encoder of ours by hand, for which there is netlink.AttributeEncoder and AttributeDecoder",
		"made-up.go:4: unix.NFTA_CMP_SREG: expressions of nf_tables by hand, for which there is github.com/google/nftables/expr",
		"made-up.go:8: func checksum: checksums by hand, for which there is the kernel, or golang.org/x/net/icmp",
	}, found)
}
