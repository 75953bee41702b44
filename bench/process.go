package main

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// deadline is how long one run of a plugin may take before it is killed.
const deadline = time.Minute

// command is one call of a plugin in the way a runtime makes it: the configuration
// on standard input, the verb and the pod in the environment.
type command struct {
	argv  []string // argv[0] is a path
	env   []string
	stdin []byte // less than a pipe holds, 64 KiB
}

// outcome is what one successful run gave and cost.
type outcome struct {
	stdout []byte
	wall   time.Duration // from before the fork to after the wait
	cpu    time.Duration // user and system, with the children it waited for
	peak   int           // of peakMemory alone: resident memory in KiB
}

// run executes a command in the calling thread's namespaces and measures it. It
// goes without os/exec, whose goroutines and pipes for the output would be measured
// too: the plugin reads from a pipe that is already filled and writes to memory.
func run(c command) (outcome, error) {
	s, err := newStreams(c.stdin)
	if err != nil {
		return outcome{}, err
	}
	defer s.close()
	attr := &syscall.ProcAttr{Env: c.env, Files: s.descriptors()}
	start := time.Now()
	status, usage, err := forkAndWait(c.argv, attr)
	wall := time.Since(start)
	if err != nil {
		return outcome{}, err
	}
	out, err := s.output(c.argv, status)
	cpu := time.Duration(usage.Utime.Nano() + usage.Stime.Nano())
	return outcome{stdout: out, wall: wall, cpu: cpu}, err
}

// streams are a program's standard input, which ends, and its output, which stays in
// memory.
type streams struct{ stdin, stdout, stderr *os.File }

func newStreams(content []byte) (*streams, error) {
	s := &streams{}
	var errs [3]error
	s.stdin, errs[0] = filledPipe(content)
	s.stdout, errs[1] = memoryFile("stdout")
	s.stderr, errs[2] = memoryFile("stderr")
	if err := errors.Join(errs[:]...); err != nil {
		s.close()
		return nil, err
	}
	return s, nil
}

// close closes what was opened: of a nil file, Close is an error and no more.
func (s *streams) close() {
	s.stdin.Close()
	s.stdout.Close()
	s.stderr.Close()
}

func (s *streams) descriptors() []uintptr {
	return []uintptr{s.stdin.Fd(), s.stdout.Fd(), s.stderr.Fd()}
}

// output is what a program wrote to its standard output. Where it failed, the error
// has that and what it wrote to the other.
func (s *streams) output(argv []string, status syscall.WaitStatus) ([]byte, error) {
	out, err := contents(s.stdout)
	if err != nil || status.Exited() && status.ExitStatus() == 0 {
		return out, err
	}
	said, _ := contents(s.stderr)
	return nil, fmt.Errorf("run %s: %s: %s", strings.Join(argv, " "), describe(status), bytes.TrimSpace(append(out, said...)))
}

// forkAndWait calls fork and wait directly: os.StartProcess adds a pidfd and a
// goroutine's hand-over to each.
func forkAndWait(argv []string, attr *syscall.ProcAttr) (syscall.WaitStatus, syscall.Rusage, error) {
	var status syscall.WaitStatus
	var usage syscall.Rusage
	pid, err := syscall.ForkExec(argv[0], argv, attr)
	if err != nil {
		return status, usage, fmt.Errorf("start %s: %w", argv[0], err)
	}
	kill := time.AfterFunc(deadline, func() { _ = syscall.Kill(pid, syscall.SIGKILL) })
	defer kill.Stop()
	for {
		_, err = syscall.Wait4(pid, &status, 0, &usage)
		if !errors.Is(err, syscall.EINTR) {
			break
		}
	}
	if err != nil {
		return status, usage, fmt.Errorf("wait for %s: %w", argv[0], err)
	}
	return status, usage, nil
}

// peakMemory runs a command under the peak program. The outcome has the command's
// standard output and its peak resident memory, and no costs.
func peakMemory(peak string, c command) (outcome, error) {
	s, err := newStreams(c.stdin)
	if err != nil {
		return outcome{}, err
	}
	defer s.close()
	report, err := memoryFile("report")
	if err != nil {
		return outcome{}, err
	}
	defer report.Close()
	status, _, err := forkAndWait(append([]string{peak}, c.argv...), &syscall.ProcAttr{
		Env: c.env, Files: append(s.descriptors(), report.Fd()),
	})
	if err != nil {
		return outcome{}, err
	}
	out, err := s.output(c.argv, status)
	if err != nil {
		return outcome{}, err
	}
	figure, err := contents(report)
	if err != nil {
		return outcome{}, err
	}
	kib, err := strconv.Atoi(strings.TrimSpace(string(figure)))
	return outcome{stdout: out, peak: kib}, err
}

func describe(status syscall.WaitStatus) string {
	if status.Signaled() {
		return "killed by " + status.Signal().String()
	}
	return "exit status " + strconv.Itoa(status.ExitStatus())
}

// filledPipe gives the reading end of a pipe that holds content and then ends. It is
// a blocking one, as a runtime's is, which os.Pipe would not make.
func filledPipe(content []byte) (*os.File, error) {
	var ends [2]int
	if err := unix.Pipe2(ends[:], unix.O_CLOEXEC); err != nil {
		return nil, fmt.Errorf("open pipe: %w", err)
	}
	reader := os.NewFile(uintptr(ends[0]), "stdin")
	_, err := unix.Write(ends[1], content)
	if err := errors.Join(err, unix.Close(ends[1])); err != nil {
		return nil, errors.Join(fmt.Errorf("fill pipe: %w", err), reader.Close())
	}
	return reader, nil
}

func memoryFile(name string) (*os.File, error) {
	fd, err := unix.MemfdCreate(name, unix.MFD_CLOEXEC)
	if err != nil {
		return nil, fmt.Errorf("create memory file: %w", err)
	}
	return os.NewFile(uintptr(fd), name), nil
}

func contents(f *os.File) ([]byte, error) {
	if _, err := f.Seek(0, io.SeekStart); err != nil {
		return nil, fmt.Errorf("read output: %w", err)
	}
	return io.ReadAll(f)
}
