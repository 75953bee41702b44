package nstest

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"
)

// Files reads a directory, which may be missing: name and content of each file but for
// some.
func Files(tb testing.TB, dir string, without ...string) map[string]string {
	tb.Helper()
	entries, err := os.ReadDir(dir)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		tb.Fatal(err)
	}
	files := map[string]string{}
	for _, entry := range entries {
		if entry.IsDir() {
			files[entry.Name()] = "directory"
			continue
		}
		data, err := os.ReadFile(filepath.Join(dir, entry.Name()))
		if err != nil {
			tb.Fatal(err)
		}
		if !slices.Contains(without, entry.Name()) {
			files[entry.Name()] = string(data)
		}
	}
	return files
}

// PutFile writes a file into a directory, which it makes; as of long ago if old.
func PutFile(tb testing.TB, dir, name, content string, old ...time.Time) {
	tb.Helper()
	if err := os.MkdirAll(dir, 0o755); err != nil {
		tb.Fatal(err)
	}
	path := filepath.Join(dir, name)
	if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
		tb.Fatal(err)
	}
	for _, when := range old {
		if err := os.Chtimes(path, when, when); err != nil {
			tb.Fatal(err)
		}
	}
}

// Warnings gathers what is warned of.
type Warnings struct {
	mu   sync.Mutex
	list []string
}

// Warn adds one.
func (w *Warnings) Warn(message string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.list = append(w.list, message)
}

// Warned says whether one of them contains text, and forgets all.
func (w *Warnings) Warned(text string) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	found := strings.Contains(strings.Join(w.list, "\n"), text)
	w.list = nil
	return found
}

// All gives those since the last Warned.
func (w *Warnings) All() []string {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.list
}
