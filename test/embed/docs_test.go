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

// TestNetworksProgramCompiles builds the program of package network's doc comment.
func TestNetworksProgramCompiles(t *testing.T) {
	text, err := os.ReadFile("../../network/doc.go")
	if err != nil {
		t.Fatal(err)
	}
	program := `package main

import (
	"context"

	"github.com/tombolo-cni/tombolo/ipam"
	"github.com/tombolo-cni/tombolo/network"
)

func program(ctx context.Context, pod network.Pod, keep []network.Key, ranges []ipam.RangeSet) (any, any, error) {
`
	lines := regexp.MustCompile(`(?m)^//\t(.*)$`).FindAllSubmatch(text, -1)
	for _, line := range lines {
		program += string(line[1]) + "\n"
	}
	if len(lines) == 0 {
		t.Fatal("there is no program")
	}
	vet(t, "network/doc.go", []byte(program+"return diffs, gone, err\n}\n\nfunc main() { _ = program }\n"))
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
