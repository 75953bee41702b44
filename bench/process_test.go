package main

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

func TestRunGivesOutputAndCosts(t *testing.T) {
	t.Parallel()
	o, err := run(command{
		argv:  []string{"/bin/sh", "-c", `read -r line; echo "$line, $GREETED"`},
		env:   []string{"GREETED=world"},
		stdin: []byte("hello\n"),
	})
	if err != nil {
		t.Fatal(err)
	}
	if got := string(o.stdout); got != "hello, world\n" {
		t.Errorf("standard output %q", got)
	}
	if o.wall <= 0 || o.cpu <= 0 {
		t.Errorf("it took %s, and %s of CPU", o.wall, o.cpu)
	}
}

func TestRunFailsWithWhatThePluginSaid(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		name, script string
		want         []string
	}{
		{"an exit status", `echo '{"code":7}'; echo why >&2; exit 3`, []string{"exit status 3", `{"code":7}`, "why"}},
		{"a signal", `kill -9 $$`, []string{"killed"}},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			_, err := run(command{argv: []string{"/bin/sh", "-c", test.script}})
			if err == nil {
				t.Fatal("no error")
			}
			for _, want := range test.want {
				if !strings.Contains(err.Error(), want) {
					t.Errorf("%q does not say %q", err, want)
				}
			}
		})
	}
	if _, err := run(command{argv: []string{"/no/such/plugin"}}); err == nil {
		t.Error("a program that is not there ran")
	}
}

// buildC compiles one of our C programs.
func buildC(tb testing.TB, dir, name string) {
	tb.Helper()
	out, err := exec.Command("cc", "-O2", "-Wall", "-Wextra", "-Werror", "-static",
		"-o", filepath.Join(dir, name), filepath.Join(name, name+".c")).CombinedOutput()
	if err != nil {
		tb.Fatalf("needs a C compiler, as cc, and a static C library: %v\n%s", err, out)
	}
}

func TestPeakMemoryIsTheProgramsOwn(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	buildC(t, dir, "peak")
	peak := filepath.Join(dir, "peak")
	// 64 MiB pass through a variable of the shell's; this process is smaller.
	big := command{argv: []string{"/bin/sh", "-c", `x=$(head -c 67108864 /dev/zero | tr '\0' x); echo done`}, env: os.Environ()}
	small := command{argv: []string{"/bin/true"}}
	bigOne, err := peakMemory(peak, big)
	if err != nil {
		t.Fatal(err)
	}
	smallOne, err := peakMemory(peak, small)
	if err != nil {
		t.Fatal(err)
	}
	if bigOne.peak < 64<<10 {
		t.Errorf("a shell with 64 MiB has %d KiB", bigOne.peak)
	}
	if got := string(bigOne.stdout); got != "done\n" {
		t.Errorf("standard output %q", got)
	}
	// A Go program such as this test has more than that before it starts.
	if smallOne.peak > 4<<10 {
		t.Errorf("/bin/true has %d KiB", smallOne.peak)
	}
	if _, err := peakMemory(peak, command{argv: []string{"/bin/false"}}); err == nil {
		t.Error("the program's failure was lost")
	}
}
