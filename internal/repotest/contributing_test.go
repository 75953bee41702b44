package repotest

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// TestContributingHasTheLayers compares the list that contributors read with the layers.
func TestContributingHasTheLayers(t *testing.T) {
	t.Parallel()
	data, err := os.ReadFile(filepath.Join(root(t), "CONTRIBUTING.md"))
	if err != nil {
		t.Fatal(err)
	}
	_, text, _ := strings.Cut(string(data), "## Layers\n")
	_, text, _ = strings.Cut(text, "```text\n")
	text, _, found := strings.Cut(text, "```\n")
	if !found {
		t.Fatal("CONTRIBUTING.md has no list of layers")
	}
	line := map[string]int{}
	for i, l := range strings.Split(strings.TrimSpace(text), "\n") {
		for name := range strings.SplitSeq(l, ", ") {
			switch name {
			case "tombolo": // the root
				name = "."
			case "network (with network/internal)":
				name = "network"
			}
			line[name] = i
		}
	}
	there := map[string]bool{}
	for _, p := range packages(t) {
		there[p.rel()] = true
		from, listed := line[p.rel()]
		if !listed && slices.Contains(publicPackages(), p.rel()) {
			t.Errorf("CONTRIBUTING.md lacks %s among the layers", p.rel())
		}
		for _, imported := range p.Imports {
			if to, ok := line[relative(imported)]; ok && listed && to <= from {
				t.Errorf("CONTRIBUTING.md has %s above %s, which it imports", relative(imported), p.rel())
			}
		}
	}
	for name := range line {
		if !there[name] {
			t.Errorf("CONTRIBUTING.md has %s among the layers, which is no package", name)
		}
	}
}
