package nstest

import (
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/tombolo-cni/tombolo/netns"
)

// Snapshot is all that a namespace has which a program may change, in lines: links with
// their addresses, routes, rules and permanent neighbours, what keeps a link within
// limits, the firewall's rules and elements, the parameters of the kernel; and the files
// of some directories.
type Snapshot []string

// shown has the commands that a snapshot is made of. What they say of time and of
// traffic is not in it.
const shown = `
ip -br link; ip -o address | sed 's/[0-9]*sec/some/g'; ip -4 route show table all; ip -6 route show table all | sed 's/expires [0-9]*sec//'
ip rule; ip -6 rule; ip neighbour show nud permanent; bridge fdb show | grep -w -e permanent -e static
tc qdisc show; bridge -d link | sed 's/state [a-z]*//'
nft --stateless list ruleset | tr ',{}' '\n\n\n'
cd /proc/sys/net && grep -sr . ipv4/conf ipv6/conf ipv4/ip_forward bridge 2>/dev/null | grep -v -e stable_secret
true`

// Snap takes one, with the files below a directory. Of those whose content may differ,
// it has only that they are there.
func Snap(tb testing.TB, ns *netns.NS, dir string, differs func(name string) bool) Snapshot {
	tb.Helper()
	var s Snapshot
	for line := range strings.Lines(Run(tb, ns, "sh", "-c", shown)) {
		if line = strings.Join(strings.Fields(line), " "); line != "" {
			s = append(s, line)
		}
	}
	err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		name, err := filepath.Rel(dir, path)
		if err != nil {
			return err
		}
		line := "file " + name
		if !differs(name) {
			content, err := os.ReadFile(path)
			if err != nil {
				return err
			}
			line += " " + string(content)
		}
		s = append(s, line)
		return nil
	})
	if err != nil && !os.IsNotExist(err) {
		tb.Fatal(err)
	}
	slices.Sort(s)
	return s
}

// Diff says what another snapshot has otherwise; nothing is "".
func (s Snapshot) Diff(other Snapshot) string {
	var list []string
	for _, side := range []struct {
		sign      string
		has, lack Snapshot
	}{{"- ", s, other}, {"+ ", other, s}} {
		lacks := map[string]int{}
		for _, line := range side.lack {
			lacks[line]++
		}
		for _, line := range side.has {
			if lacks[line]--; lacks[line] < 0 {
				list = append(list, side.sign+line)
			}
		}
	}
	return strings.Join(list, "\n")
}

// Plus is the snapshot with more lines.
func (s Snapshot) Plus(lines ...string) Snapshot { return append(s[:len(s):len(s)], lines...) }
