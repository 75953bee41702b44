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
	// quotedBytes limits the number of bytes that an error quotes from the end of an output.
	quotedBytes = 512
	// maxOutput is the most bytes that a plugin may print on stdout, and on stderr.
	maxOutput = 4 << 20
	// pipeGrace is the time that stdout may stay open after the plugin's end, since a child of the plugin may have it
	// open too. It also covers the time to read the plugin's last output on a busy machine.
	pipeGrace = 3 * time.Second
	// busyTries and busyPause limit the wait for a binary that an installer is writing.
	busyTries = 20
	busyPause = 25 * time.Millisecond
)

// run runs the CNI plugin at path with exactly this environment ("KEY=value") and stdin, and returns its stdout. It
// copies the plugin's stderr to stderr.
//
// If the plugin fails and prints an error object, run returns the object as a *[types.Error] with its code, message and
// details. Any other error contains the plugin's name and the reason. It may quote the ends of stdout and stderr. When
// ctx ends, run kills the plugin and all processes of its group, and returns the error of ctx.
func run(ctx context.Context, path string, env []string, stdin []byte, stderr io.Writer) ([]byte, error) {
	name := filepath.Base(path)
	var stdout, complaint buffer
	err := start(ctx, func() *exec.Cmd {
		cmd := exec.CommandContext(ctx, path)
		cmd.Env = env
		cmd.Stdin = bytes.NewReader(stdin)
		cmd.Stdout = &stdout
		cmd.Stderr = io.MultiWriter(&complaint, stderr)
		cmd.WaitDelay = pipeGrace

		// Use a new process group, so that a shell script's children are killed with it.
		cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
		cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) }
		return cmd
	})

	switch {
	case stdout.full, complaint.full:
		return nil, fmt.Errorf("run plugin %s: it printed more than %d bytes", name, maxOutput)
	case err == nil, errors.Is(err, exec.ErrWaitDelay):
		return stdout.text, nil
	case ctx.Err() != nil:
		return nil, fmt.Errorf("run plugin %s: killed: %w%s", name, ctx.Err(), quoted("; stderr", complaint.text))
	}

	if own := errorObject(stdout.text); own != nil {
		return nil, own
	}

	return nil, fmt.Errorf("run plugin %s: %w%s%s", name, err, quoted("; stdout", stdout.text),
		quoted("; stderr", complaint.text))
}

// buffer is a buffer for output of a plugin. It takes at most maxOutput bytes.
type buffer struct {
	text []byte
	full bool // the plugin printed more
}

func (b *buffer) Write(p []byte) (int, error) {
	if b.full = b.full || len(b.text)+len(p) > maxOutput; b.full {
		return 0, io.ErrShortWrite
	}
	b.text = append(b.text, p...)
	return len(p), nil
}

// start runs a command and waits for its end. If its binary is being written (ETXTBSY), start tries again, at most
// busyTries times. Each attempt needs a new exec.Cmd.
func start(ctx context.Context, command func() *exec.Cmd) error {
	for try := 0; ; try++ {
		err := command().Run()
		if !errors.Is(err, syscall.ETXTBSY) || try == busyTries || ctx.Err() != nil {
			return err
		}
		time.Sleep(busyPause)
	}
}

// errorObject decodes the error object that a plugin has printed (CNI specification 1.1.0, "Error"). It returns nil
// if there is none.
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

// quoted returns the end of an output for an error message, or "" if the output is empty.
func quoted(label string, output []byte) string {
	output = bytes.TrimSpace(output)
	if len(output) == 0 {
		return ""
	}
	return fmt.Sprintf("%s: %q", label, output[max(0, len(output)-quotedBytes):])
}
