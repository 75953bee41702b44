package main

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

func TestProgramAnswersByTheNamesItInstalled(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	got := tombolo(t, nil, nil, "", "install", "--names", "loopback", dir)
	if got.status != 0 || !strings.Contains(got.stdout, filepath.Join(dir, "loopback")+": Tombolo\n") {
		t.Fatalf("install: %+v", got)
	}
	call := func(env ...string) (stdout, stderr string) {
		t.Helper()
		var out, errOut bytes.Buffer
		cmd := exec.Command(filepath.Join(dir, "loopback"))
		cmd.Env = append([]string{runMain + "=1"}, env...)
		cmd.Stdin = strings.NewReader(`{"cniVersion": "1.0.0", "name": "lo", "type": "loopback"}`)
		cmd.Stdout, cmd.Stderr = &out, &errOut
		if err := cmd.Run(); err != nil && env == nil {
			t.Error(err)
		}
		return out.String(), errOut.String()
	}
	if out, errOut := call(); out != "" || !strings.HasPrefix(errOut, "CNI loopback plugin v1.9.1\n") || !strings.Contains(errOut, "Tombolo") {
		t.Errorf("by hand: %q, %q", out, errOut)
	}
	if out, _ := call("CNI_COMMAND=VERSION"); !strings.HasPrefix(out, `{"cniVersion":"1.1.0","supportedVersions":[`) {
		t.Errorf("VERSION: %q", out)
	}
	// The plugin of that name wants another namespace, and the network's plugin another thing.
	if out, _ := call("CNI_COMMAND=ADD", "CNI_CONTAINERID=c", "CNI_IFNAME=lo", "CNI_NETNS=/nonexistent"); !strings.Contains(out, "/nonexistent") {
		t.Errorf("ADD: %q", out)
	}
	if got := tombolo(t, nil, nil, "", "install", "--undo", dir); got.status != 0 || got.stdout != filepath.Join(dir, "loopback")+": gone\n" {
		t.Errorf("undo: %+v", got)
	}
	if got := tombolo(t, nil, nil, "", "install", "--names", "brigde", dir); got.status != exitUsage || !strings.Contains(got.stderr, `"brigde" is not a name that Tombolo has`) {
		t.Errorf("a name that it has not: %+v", got)
	}
}

// The reader of a command's output may go, as head does, and the work goes on.
func TestInstallIsNotCutShortByItsReader(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	for _, args := range [][]string{{"install", "--names", "all", dir}, {"install", "--undo", dir}} {
		reader, out, err := os.Pipe()
		if err != nil {
			t.Fatal(err)
		}
		reader.Close()
		cmd := exec.Command(os.Args[0], args...)
		cmd.Env, cmd.Stdout = append(os.Environ(), runMain+"=1"), out
		if err := cmd.Run(); err != nil {
			t.Errorf("%q: %v", args, err)
		}
		out.Close()
	}
	got := tombolo(t, nil, nil, "", "install", "--names", "all", dir)
	if strings.Contains(got.stdout, "as before") || strings.Count(got.stdout, ": Tombolo\n") < 2 {
		t.Errorf("names were left by the undo: %+v", got)
	}
}
