package delegate

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os/exec"
	"path/filepath"
	"syscall"
	"time"

	"github.com/containernetworking/cni/pkg/types"
)

const (
	// quotedBytes is how much of the end of an output an error quotes.
	quotedBytes = 512
	// pipeGrace is how long a process that has ended may leave its stdout to a child of its own. Its own output is
	// read within that time, too, on a machine that is busy.
	pipeGrace = 3 * time.Second
	// busyTries and busyPause bound the wait for a binary that an installer is writing.
	busyTries = 20
	busyPause = 25 * time.Millisecond
)

// run runs the CNI plugin at path with exactly this environment ("KEY=value")
// and stdin, and returns what it printed; its stderr goes to a writer.
//
// Where the plugin exits with an error object, that is the error: a
// *[types.Error] with its code, message and details. Any other failure names
// the plugin, how it ended, and the end of its stderr. When ctx ends, the
// plugin and all processes of its group are killed, and the error is ctx's.
func run(ctx context.Context, path string, env []string, stdin []byte, stderr io.Writer) ([]byte, error) {
	name := filepath.Base(path)
	var stdout, said bytes.Buffer
	err := start(ctx, func() *exec.Cmd {
		cmd := exec.CommandContext(ctx, path)
		cmd.Env = env
		cmd.Stdin = bytes.NewReader(stdin)
		cmd.Stdout = &stdout
		cmd.Stderr = io.MultiWriter(&said, stderr)
		cmd.WaitDelay = pipeGrace
		// A group of its own, so that a shell script's children die with it.
		cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
		cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) }
		return cmd
	})
	switch {
	case err == nil, errors.Is(err, exec.ErrWaitDelay):
		return stdout.Bytes(), nil
	case ctx.Err() != nil:
		return nil, fmt.Errorf("run plugin %s: killed: %w%s", name, ctx.Err(), quoted("; stderr", said.Bytes()))
	}
	if own := errorObject(stdout.Bytes()); own != nil {
		return nil, own
	}
	return nil, fmt.Errorf("run plugin %s: %w%s%s", name, err, quoted("; stdout", stdout.Bytes()), quoted("; stderr", said.Bytes()))
}

// start runs the command to its end, a new one for each try, since one can be started only once.
func start(ctx context.Context, command func() *exec.Cmd) error {
	for try := 0; ; try++ {
		err := command().Run()
		if !errors.Is(err, syscall.ETXTBSY) || try == busyTries || ctx.Err() != nil {
			return err
		}
		time.Sleep(busyPause)
	}
}

// errorObject decodes the error that a plugin printed (CNI specification 1.1.0,
// "Error"), or returns nil if it printed none.
func errorObject(stdout []byte) *types.Error {
	var own types.Error
	if err := json.Unmarshal(stdout, &own); err != nil || own.Code == 0 && own.Msg == "" {
		return nil
	}
	if own.Code == 0 {
		own.Code = types.ErrInternal
	}
	return &own
}

// quoted prints the end of output for an error message, or nothing if there is none.
func quoted(label string, output []byte) string {
	output = bytes.TrimSpace(output)
	if len(output) == 0 {
		return ""
	}
	return fmt.Sprintf("%s: %q", label, output[max(0, len(output)-quotedBytes):])
}
