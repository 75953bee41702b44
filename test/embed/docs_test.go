package main

import (
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"testing"
)

// TestDocsGoCompiles builds each block of Go of README.md and docs, in a module of its
// own that requires Tombolo's.
func TestDocsGoCompiles(t *testing.T) {
	pages, err := filepath.Glob("../../docs/*.md")
	if err != nil {
		t.Fatal(err)
	}
	found := 0
	for _, page := range append(pages, "../../README.md") {
		text, err := os.ReadFile(page)
		if err != nil {
			t.Fatal(err)
		}
		for _, block := range regexp.MustCompile("(?ms)^```go\n(.*?)^```$").FindAllSubmatch(text, -1) {
			found++
			vet(t, page, block[1])
		}
	}
	if found == 0 {
		t.Error("there is no block of Go")
	}
}

// vet builds a program in a module of its own that requires Tombolo's.
func vet(t *testing.T, page string, program []byte) {
	t.Helper()
	root, err := filepath.Abs("../..")
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	for _, name := range []string{"go.mod", "go.sum"} {
		data, err := os.ReadFile(name)
		if err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(dir, name), data, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.WriteFile(filepath.Join(dir, "docs.go"), program, 0o644); err != nil {
		t.Fatal(err)
	}
	for _, args := range [][]string{
		{"mod", "edit", "-replace", "github.com/tombolo-cni/tombolo=" + root},
		{"vet", "-mod=mod", "."},
	} {
		cmd := exec.Command("go", args...)
		cmd.Dir = dir
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Errorf("%s: go %s: %v\n%s\n%s", page, args[0], err, out, program)
		}
	}
}
