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
	// stdoutLimit bounds what a plugin may print. A result with a hundred
	// routes takes some 10 KB.
	stdoutLimit = 1 << 20
	// stderrKept is how much of stderr an error quotes, of its end.
	stderrKept = 2 << 10
	// pipeGrace is how long a process that has ended may leave its stdout to a
	// child of its own. What it printed itself is read within that time, too, on
	// a machine that is busy.
	pipeGrace = 3 * time.Second
	// busyTries and busyPause bound the wait for a binary that is open for
	// writing.
	busyTries = 20
	busyPause = 25 * time.Millisecond
)

// ErrOutputTooLong means that a plugin printed more than 1 MiB, and was cut
// off.
var ErrOutputTooLong = errors.New("plugin printed more than 1 MiB")

// Exec runs the CNI plugin at path with exactly this environment ("KEY=value")
// and stdin, and returns what it printed.
//
// Where the plugin exits with an error object, that is the error: a
// *[types.Error] with its code, message and details. Any other failure names
// the plugin, how it ended, and the end of its stderr. When ctx ends, the
// plugin and all processes of its group are killed, and the error is ctx's.
func Exec(ctx context.Context, path string, env []string, stdin []byte) ([]byte, error) {
	return run(ctx, path, env, stdin, io.Discard)
}

// run is Exec with a place for the plugin's stderr, which the specification
// leaves to logs.
func run(ctx context.Context, path string, env []string, stdin []byte, stderr io.Writer) ([]byte, error) {
	name := filepath.Base(path)
	if err := ctx.Err(); err != nil {
		return nil, fmt.Errorf("run plugin %s: %w", name, err)
	}
	stdout := &limited{limit: stdoutLimit}
	ending := &tail{limit: stderrKept}
	err := start(ctx, func() *exec.Cmd {
		cmd := exec.CommandContext(ctx, path)
		cmd.Env = env
		cmd.Stdin = bytes.NewReader(stdin)
		cmd.Stdout = stdout
		cmd.Stderr = io.MultiWriter(ending, stderr)
		cmd.WaitDelay = pipeGrace
		// A group of its own, so that a shell script's children die with it.
		cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
		cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) }
		return cmd
	})
	switch {
	case stdout.exceeded:
		return nil, fmt.Errorf("run plugin %s: %w", name, ErrOutputTooLong)
	case err == nil, errors.Is(err, exec.ErrWaitDelay):
		return stdout.buf.Bytes(), nil
	case ctx.Err() != nil:
		return nil, fmt.Errorf("run plugin %s: killed: %w%s", name, ctx.Err(), ending)
	}
	if own := errorObject(stdout.buf.Bytes()); own != nil {
		return nil, own
	}
	return nil, fmt.Errorf("run plugin %s: %w%s%s", name, err, quoted("; stdout", stdout.buf.Bytes()), ending)
}

// start runs the command to its end. While the binary is being written it is
// tried again for half a second, with a new command each time, since one can be
// started only once.
func start(ctx context.Context, command func() *exec.Cmd) error {
	for try := 0; ; try++ {
		err := command().Run()
		if !errors.Is(err, syscall.ETXTBSY) || try == busyTries || ctx.Err() != nil {
			return err
		}
		pause := time.NewTimer(busyPause)
		select {
		case <-ctx.Done():
			pause.Stop()
			return err
		case <-pause.C:
		}
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

// quoted prints output for an error message, or nothing if there is none.
func quoted(label string, output []byte) string {
	output = bytes.TrimSpace(output)
	if len(output) == 0 {
		return ""
	}
	return fmt.Sprintf("%s: %.512q", label, output)
}

// limited is a buffer that refuses to grow over its limit.
type limited struct {
	buf      bytes.Buffer
	limit    int
	exceeded bool
}

// Write fails from the first write that does not fit; os/exec then closes the
// pipe.
func (l *limited) Write(p []byte) (int, error) {
	if l.exceeded || l.buf.Len()+len(p) > l.limit {
		l.exceeded = true
		return 0, ErrOutputTooLong
	}
	return l.buf.Write(p)
}

// tail keeps the end of what is written to it.
type tail struct {
	kept  []byte
	limit int
}

func (t *tail) Write(p []byte) (int, error) {
	t.kept = append(t.kept, p...)
	if over := len(t.kept) - t.limit; over > 0 {
		t.kept = append(t.kept[:0], t.kept[over:]...)
	}
	return len(p), nil
}

// String is the end of stderr, worded to follow an error message.
func (t *tail) String() string { return quoted("; stderr", t.kept) }
