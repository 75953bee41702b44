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
	page, err := os.ReadFile(filepath.Join(root(t), "docs", "embedding.md"))
	must.Succeed(t, err)
	for _, name := range publicPackages() {
		if name != "." && !strings.Contains(string(page), "`"+name+"`") {
			t.Errorf("docs/embedding.md lacks `%s`", name)
		}
	}
}

// TestREADMEIsForTwoMinutes bounds its words, and has it lead to every page.
func TestREADMEIsForTwoMinutes(t *testing.T) {
	t.Parallel()
	data, err := os.ReadFile(filepath.Join(root(t), "README.md"))
	must.Succeed(t, err)
	text := string(data)
	if n := len(strings.Fields(text)); n > 900 {
		t.Errorf("README.md has %d words, want 900 at most", n)
	}
	pages, err := filepath.Glob(filepath.Join(root(t), "docs", "*.md"))
	if err != nil || len(pages) < 10 {
		t.Fatalf("%d pages, %v", len(pages), err)
	}
	for _, page := range append(pages, "make demo", "make test") {
		want := page
		if strings.HasSuffix(page, ".md") {
			want = "(docs/" + filepath.Base(page) + ")"
		}
		expect.Contains(t, text, want, "README.md")
	}
}
