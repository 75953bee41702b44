package fault

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/netns"
)

// Kind is what goes wrong.
type Kind string

const (
	// Kill ends the process with SIGKILL before the call is carried out.
	Kill Kind = "kill"
	// Error has the call fail, with what such a call fails with: see Errno.
	Error Kind = "error"
)

// Kinds are all.
func Kinds() []Kind { return []Kind{Kill, Error} }

// Fault is what is to go wrong, and where. The zero value is no fault: the calls are
// counted.
type Fault struct {
	At   int // the number of the call, from 1
	Kind Kind

	// Before is told each call that counts, in words, before it is carried out: it waits
	// until this returns, and so do all others. So a test sees each state between two calls.
	// nil: nobody is told.
	Before func(call string)
}

// Outcome is what came of it.
type Outcome struct {
	Calls int    // how many calls that count were begun
	Fired bool   // whether the fault happened. With At greater than Calls it does not
	Call  string // the call that it happened to
	Err   error  // of the process, as of exec.Cmd.Wait; or of the listener
}

// Run is a program that runs.
type Run struct {
	cmd   *exec.Cmd
	fault Fault
	done  chan error // of the listener

	mu      sync.Mutex
	outcome Outcome
}

// variable has the path of the program that this process is to become: see Main.
const variable = "TOMBOLO_FAULT_PROGRAM"

// Start starts a command in a namespace; nil is the caller's own. The command's process
// begins as this test program once more, which Main turns into the command.
func Start(ns *netns.NS, cmd *exec.Cmd, f Fault) (*Run, error) {
	if os.Getenv(variable) != "" {
		return nil, errors.New("TestMain has to call fault.Main first")
	}
	if cmd.Err != nil {
		return nil, cmd.Err
	}
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("socketpair: %w", err)
	}
	ours, theirs := os.NewFile(uintptr(pair[0]), "listener"), os.NewFile(uintptr(pair[1]), "listener")
	defer ours.Close()
	if cmd.Env == nil {
		cmd.Env = os.Environ()
	}
	cmd.Env = append(cmd.Env[:len(cmd.Env):len(cmd.Env)], variable+"="+cmd.Path)
	cmd.Path, cmd.ExtraFiles = self, []*os.File{theirs}
	start := cmd.Start
	if ns != nil {
		// A child belongs to the namespace of the thread that forks it.
		start = func() error { return ns.Do(cmd.Start) }
	}
	err = start()
	theirs.Close()
	if err != nil {
		return nil, err
	}
	listener, err := receive(ours)
	if err != nil {
		_ = cmd.Process.Kill()
		return nil, errors.Join(fmt.Errorf("the listener of %s: %w", cmd, err), cmd.Wait())
	}
	r := &Run{cmd: cmd, fault: f, done: make(chan error, 1)}
	go func() { r.done <- errors.Join(r.serve(listener), unix.Close(listener)) }()
	return r, nil
}

// receive waits for the descriptor that Main sends.
func receive(from *os.File) (int, error) {
	oob := make([]byte, unix.CmsgSpace(4))
	n, oobn, _, _, err := unix.Recvmsg(int(from.Fd()), make([]byte, 1), oob, unix.MSG_CMSG_CLOEXEC)
	if err != nil {
		return -1, err
	}
	if n == 0 {
		return -1, errors.New("the process ended, or TestMain does not call fault.Main")
	}
	messages, err := unix.ParseSocketControlMessage(oob[:oobn])
	if err != nil {
		return -1, err
	}
	if len(messages) != 1 {
		return -1, fmt.Errorf("%d control messages, want one", len(messages))
	}
	fds, err := unix.ParseUnixRights(&messages[0])
	if err != nil {
		return -1, err
	}
	return fds[0], nil
}

// Wait waits for the end of the program, and of all that it has started.
func (r *Run) Wait() Outcome {
	err := r.cmd.Wait()
	if listenErr := <-r.done; err == nil {
		err = listenErr
	}
	o := r.Outcome()
	o.Err = err
	return o
}

// Kill ends the program at once, if it has not ended by then.
func (r *Run) Kill() { _ = r.cmd.Process.Kill() }

// Outcome is what has happened so far. Err is that of a program that has ended: of Wait.
func (r *Run) Outcome() Outcome {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.outcome
}
