package main

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

const (
	startLimit = time.Minute          // for a daemon to be ready, on a busy machine
	startPause = 5 * time.Millisecond // between two looks at it
	lastWords  = 2 << 10              // bytes of a daemon's output that an error shows
)

// daemon is a program that runs beside the measurement: a DHCP server, or who keeps
// leases. It ends with the scenario, or with this process.
type daemon struct {
	cmd    *exec.Cmd
	output string // the file that has what it wrote
	ended  chan struct{}
	err    error // of its end; to be read after ended
}

// startDaemon runs a program in a namespace and waits until it is ready.
func startDaemon(ns namedNS, output string, ready func() bool, argv ...string) (*daemon, error) {
	file, err := os.Create(output)
	if err != nil {
		return nil, err
	}
	defer file.Close()
	d := &daemon{cmd: exec.Command(argv[0], argv[1:]...), output: output, ended: make(chan struct{})}
	d.cmd.Stdout, d.cmd.Stderr = file, file
	d.cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: unix.SIGKILL}
	started := make(chan error, 1)
	go func() {
		defer close(d.ended)
		d.err = ns.Do(func() error {
			err := d.cmd.Start()
			started <- err
			if err != nil {
				return err
			}
			// Here, since the daemon gets its signal when the thread ends that started it.
			return d.cmd.Wait()
		})
	}()
	select {
	case err = <-started:
	case <-d.ended:
		err = d.err
	}
	if err != nil {
		return nil, fmt.Errorf("start %s: %w", argv[0], err)
	}
	if err := d.await(ready); err != nil {
		d.stop()
		return nil, err
	}
	return d, nil
}

func (d *daemon) await(ready func() bool) error {
	limit := time.After(startLimit)
	for !ready() {
		select {
		case <-d.ended:
			return fmt.Errorf("%s ended: %w: %s", d.cmd.Path, errors.Join(errors.New("too early"), d.err), d.said())
		case <-limit:
			return fmt.Errorf("%s is not ready after %s: %s", d.cmd.Path, startLimit, d.said())
		case <-time.After(startPause):
		}
	}
	return nil
}

// stop kills the daemon: nothing that it would tidy up is ever seen again.
func (d *daemon) stop() {
	_ = d.cmd.Process.Kill()
	<-d.ended
}

// said is the end of the daemon's output.
func (d *daemon) said() string {
	text, err := os.ReadFile(d.output)
	if err != nil {
		return err.Error()
	}
	return string(bytes.TrimSpace(text[max(0, len(text)-lastWords):]))
}

// cpu is the user and system time of the daemon's threads, those that ended included.
// It is /proc/PID/stat's to the nanosecond rather than to the tick: the clock of
// clock_getcpuclockid(3).
func (d *daemon) cpu() (time.Duration, error) {
	const scheduled = 2 // CPUCLOCK_SCHED of linux/posix-timers.h, of a whole process
	var used unix.Timespec
	if err := unix.ClockGettime(int32(^d.cmd.Process.Pid<<3|scheduled), &used); err != nil {
		return 0, fmt.Errorf("read CPU time of %s: %w", d.cmd.Path, err)
	}
	return time.Duration(used.Nano()), nil
}

// holding is what a daemon takes up while it does nothing.
type holding struct {
	resident    int // KiB
	threads     int
	descriptors int
}

func (d *daemon) holding() (holding, error) {
	dir := "/proc/" + strconv.Itoa(d.cmd.Process.Pid)
	status, err := os.ReadFile(filepath.Join(dir, "status"))
	if err != nil {
		return holding{}, err
	}
	var h holding
	var errs [2]error
	h.resident, errs[0] = statusField(string(status), "VmRSS")
	h.threads, errs[1] = statusField(string(status), "Threads")
	open, err := os.ReadDir(filepath.Join(dir, "fd"))
	h.descriptors = len(open)
	return h, errors.Join(errs[0], errs[1], err)
}

// statusField is a number of proc_pid_status(5), without its unit.
func statusField(status, name string) (int, error) {
	for line := range strings.Lines(status) {
		key, value, _ := strings.Cut(line, ":")
		if fields := strings.Fields(value); key == name && len(fields) > 0 {
			return strconv.Atoi(fields[0])
		}
	}
	return 0, fmt.Errorf("the process's status has no %s", name)
}
