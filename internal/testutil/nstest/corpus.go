package nstest

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"testing"
)

// SaveCorpus writes a seed of a fuzz target, FuzzXxx, of the package under test
// into its testdata. Values are the target's arguments: byte slices and integers.
func SaveCorpus(tb testing.TB, target, name string, values ...any) {
	tb.Helper()
	dir := filepath.Join("testdata", "fuzz", target)
	if err := os.MkdirAll(dir, 0o755); err != nil {
		tb.Fatal(err)
	}
	text := "go test fuzz v1\n"
	for _, v := range values {
		switch v := v.(type) {
		case []byte:
			text += "[]byte(" + strconv.Quote(string(v)) + ")\n"
		default:
			text += fmt.Sprintf("%T(%v)\n", v, v)
		}
	}
	if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o644); err != nil {
		tb.Fatal(err)
	}
}
