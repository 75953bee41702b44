package repotest

import (
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
)

// TestSecurityPageNamesTestsThatExist holds docs/security.md to the tree: what shows a
// promise there is a test that is run.
func TestSecurityPageNamesTestsThatExist(t *testing.T) {
	t.Parallel()
	root := filepath.Join("..", "..")
	page, err := os.ReadFile(filepath.Join(root, "docs", "security.md"))
	must.Succeed(t, err)
	have := map[string]bool{}
	function := regexp.MustCompile(`(?m)^func (Test\w+)\(`)
	must.Succeed(t, filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		switch {
		case err != nil:
			return err
		case d.IsDir() && strings.HasPrefix(d.Name(), ".") && path != root:
			return filepath.SkipDir
		case !strings.HasSuffix(path, "_test.go"):
			return nil
		}
		text, err := os.ReadFile(path)
		for _, found := range function.FindAllSubmatch(text, -1) {
			have[string(found[1])] = true
		}
		return err
	}))
	named := regexp.MustCompile("`(Test[A-Z]\\w+)`").FindAllSubmatch(page, -1)
	expect.That(t, len(named) >= 40, "docs/security.md names %d tests, which is too few to be read right", len(named))
	for _, name := range named {
		if !have[string(name[1])] {
			t.Errorf("docs/security.md names %s, which is no test", name[1])
		}
	}
}
