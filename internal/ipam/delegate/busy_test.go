package delegate

import (
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"

	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
)

// busyScript is a script that cannot be started until release is called, and the file that keeps it so.
func busyScript(t *testing.T) (path string, release func()) {
	t.Helper()
	path = filepath.Join(t.TempDir(), "script")
	must.Succeed(t, os.WriteFile(path, []byte("#!/bin/sh\nexit 0\n"), 0o755))
	writer := must.Of(os.OpenFile(path, os.O_WRONLY, 0)).Get(t)
	t.Cleanup(func() { writer.Close() })
	return path, func() { writer.Close() }
}

func TestABinaryThatIsBeingWrittenIsTriedAgain(t *testing.T) {
	t.Parallel()
	path, release := busyScript(t)
	if err := exec.Command(path).Run(); !errors.Is(err, syscall.ETXTBSY) {
		t.Fatalf("the script is not busy (%v): this test would prove nothing", err)
	}
	tries := 0
	err := start(context.Background(), func() *exec.Cmd {
		if tries++; tries == 3 {
			release()
		}
		return exec.Command(path)
	})
	// Another test's child may inherit the writer for a moment, so more tries than three are no failure.
	expect.That(t, err == nil && tries >= 3, "after %d tries: %v", tries, err)
}

func TestTheWaitForABusyBinaryEndsWithTheContext(t *testing.T) {
	t.Parallel()
	path, _ := busyScript(t)
	ctx, cancel := context.WithCancel(context.Background())
	tries := 0
	err := start(ctx, func() *exec.Cmd {
		tries++
		cancel()
		return exec.Command(path)
	})
	expect.That(t, errors.Is(err, syscall.ETXTBSY) && tries == 1, "after %d tries: %v", tries, err)
}
