package repotest

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
)

// TestEmbeddingPageNamesEveryPublicPackage has an embedder find them all.
func TestEmbeddingPageNamesEveryPublicPackage(t *testing.T) {
	t.Parallel()
	page := must.Of(os.ReadFile(filepath.Join(root(t), "docs", "embedding.md"))).Get(t)
	for _, name := range publicPackages() {
		expect.That(t, name == "." || strings.Contains(string(page), "`"+name+"`"),
			"docs/embedding.md lacks `%s`", name)
	}
}

// TestREADMEIsForTwoMinutes bounds its words, and has it lead to every page.
func TestREADMEIsForTwoMinutes(t *testing.T) {
	t.Parallel()
	data := must.Of(os.ReadFile(filepath.Join(root(t), "README.md"))).Get(t)
	text := string(data)
	n := len(strings.Fields(text))
	expect.That(t, n <= 900, "README.md has %d words, want 900 at most", n)
	pages, err := filepath.Glob(filepath.Join(root(t), "docs", "*.md"))
	must.That(t, err == nil && len(pages) >= 10, "%d pages, %v", len(pages), err)
	for _, page := range append(pages, "make demo", "make test") {
		want := page
		if strings.HasSuffix(page, ".md") {
			want = "(docs/" + filepath.Base(page) + ")"
		}
		expect.Contains(t, text, want, "README.md")
	}
}
