package repotest

import (
	"debug/elf"
	"path/filepath"
	"testing"

	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
)

func TestBinaryIsStatic(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		arch    string
		machine elf.Machine
	}{{"amd64", elf.EM_X86_64}, {"arm64", elf.EM_AARCH64}} {
		t.Run(tt.arch, func(t *testing.T) {
			dir := t.TempDir()
			mustMake(t, root(t), "-s", "build", "BIN="+dir, "GOARCH="+tt.arch)
			for _, name := range []string{"tombolo-cni", "tombolo", "tombolod"} {
				mustBeStatic(t, filepath.Join(dir, name), tt.machine)
			}
		})
	}
}

func mustBeStatic(t *testing.T, path string, machine elf.Machine) {
	t.Helper()
	f := must.Of(elf.Open(path)).Get(t)
	defer f.Close()
	expect.Equal(t, f.Machine, machine, "machine is")
	for _, p := range f.Progs {
		expect.That(t, p.Type != elf.PT_INTERP, "it needs a dynamic loader")
	}
	libs, err := f.ImportedLibraries()
	expect.That(t, err != nil || len(libs) == 0, "it needs %v", libs)
	expect.That(t, f.Section(".symtab") == nil && f.Section(".debug_info") == nil, "it has symbols or debugging data")
}
