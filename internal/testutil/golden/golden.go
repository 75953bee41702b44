// Package golden compares what tests get with files in testdata, and writes those anew
// where the test binary is given -update. It is for tests.
package golden

import (
	"flag"
	"os"
	"path/filepath"
	"testing"

	"github.com/google/go-cmp/cmp"
)

var update = flag.Bool("update", false, "write golden files, recordings and seeds of fuzz targets anew")

// Updates says whether the test binary was given -update.
func Updates() bool { return *update }

// Compare fails the test unless testdata has a file of this name with this text. With
// -update it writes the file first.
func Compare[T string | []byte](tb testing.TB, name string, got T) {
	tb.Helper()
	path := filepath.Join("testdata", name)
	if *update {
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			tb.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(got), 0o644); err != nil {
			tb.Fatal(err)
		}
	}
	want, err := os.ReadFile(path)
	if err != nil {
		tb.Fatalf("%v (go test -update writes it)", err)
	}
	if diff := cmp.Diff(string(want), string(got)); diff != "" {
		tb.Errorf("%s (-want +got; go test -update writes it anew):\n%s", path, diff)
	}
}
