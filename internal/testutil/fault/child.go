package fault

import (
	"errors"
	"fmt"
	"os"
	"runtime"
	"slices"
	"strings"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Main is to be the first that TestMain calls. In a process of Start's it becomes the
// program and does not return; elsewhere it does nothing.
func Main() {
	path := os.Getenv(variable)
	if path == "" {
		return
	}
	err := become(path)
	fmt.Fprintln(os.Stderr, "fault:", err)
	os.Exit(125)
}

// aside is the number of the descriptor that the listener is sent by. The filter lets
// calls to it pass, since nobody listens yet; a program does not come so far.
const aside = 1000

// become installs the filter, sends its listener, and executes the program, in which the
// filter stays.
func become(path string) error {
	if !littleEndian() {
		return errors.New("the filter is for little-endian machines")
	}
	// A filter belongs to a thread, and to what that thread executes.
	runtime.LockOSThread()
	if err := unix.Dup3(3, aside, unix.O_CLOEXEC); err != nil {
		return fmt.Errorf("dup3: %w", err)
	}
	if err := unix.Close(3); err != nil {
		return fmt.Errorf("close: %w", err)
	}
	environ := slices.DeleteFunc(os.Environ(), func(s string) bool { return strings.HasPrefix(s, variable+"=") })
	code := filter()
	program := unix.SockFprog{Len: uint16(len(code)), Filter: &code[0]}
	// WAIT_KILLABLE_RECV: a signal, by which Go's runtime preempts, does not have a call
	// begin anew that has been counted.
	listener, _, errno := unix.Syscall(unix.SYS_SECCOMP, unix.SECCOMP_SET_MODE_FILTER,
		unix.SECCOMP_FILTER_FLAG_NEW_LISTENER|unix.SECCOMP_FILTER_FLAG_WAIT_KILLABLE_RECV, uintptr(unsafe.Pointer(&program)))
	if errno != 0 {
		return fmt.Errorf("seccomp: %w", errno)
	}
	if err := unix.Sendmsg(aside, []byte{0}, unix.UnixRights(int(listener)), nil, 0); err != nil {
		return fmt.Errorf("send the listener: %w", err)
	}
	return fmt.Errorf("exec %s: %w", path, unix.Exec(path, os.Args, environ))
}

// uncounted are the calls of Go's runtime, and those that start a program or wait for it.
func uncounted() []uint32 {
	list := []uint32{
		unix.SYS_FUTEX, unix.SYS_MMAP, unix.SYS_MUNMAP, unix.SYS_MPROTECT, unix.SYS_MADVISE, unix.SYS_BRK, unix.SYS_MINCORE, unix.SYS_MREMAP,
		unix.SYS_RT_SIGACTION, unix.SYS_RT_SIGPROCMASK, unix.SYS_RT_SIGRETURN, unix.SYS_SIGALTSTACK, unix.SYS_RESTART_SYSCALL,
		unix.SYS_GETTID, unix.SYS_GETPID, unix.SYS_GETPPID, unix.SYS_GETUID, unix.SYS_GETEUID, unix.SYS_GETGID, unix.SYS_GETEGID, unix.SYS_UNAME,
		unix.SYS_TGKILL, unix.SYS_KILL, unix.SYS_CLONE, unix.SYS_CLONE3, unix.SYS_NANOSLEEP, unix.SYS_CLOCK_NANOSLEEP, unix.SYS_CLOCK_GETTIME,
		unix.SYS_SCHED_YIELD, unix.SYS_SCHED_GETAFFINITY, unix.SYS_EPOLL_CREATE1, unix.SYS_EPOLL_CTL, unix.SYS_EPOLL_PWAIT, unix.SYS_EVENTFD2,
		unix.SYS_EXIT, unix.SYS_EXIT_GROUP, unix.SYS_EXECVE, unix.SYS_EXECVEAT, unix.SYS_WAIT4, unix.SYS_WAITID, unix.SYS_PIDFD_OPEN,
		unix.SYS_PIDFD_SEND_SIGNAL, unix.SYS_PRCTL, unix.SYS_PRLIMIT64, unix.SYS_SET_ROBUST_LIST, unix.SYS_SET_TID_ADDRESS, unix.SYS_RSEQ,
		unix.SYS_GETRANDOM, unix.SYS_SETITIMER, unix.SYS_TIMER_CREATE, unix.SYS_TIMER_SETTIME, unix.SYS_TIMER_DELETE, unix.SYS_SECCOMP,
	}
	if runtime.GOARCH == "amd64" {
		const archPrctl, epollWait = 158, 232
		list = append(list, archPrctl, epollWait)
	}
	return list
}

// The offsets in struct seccomp_data: of the number, and of the first argument.
const offsetNumber, offsetFirst = 0, 16

// filter has all other calls wait for the listener's leave.
func filter() []unix.SockFilter {
	load := func(offset uint32) unix.SockFilter {
		return unix.SockFilter{Code: unix.BPF_LD | unix.BPF_W | unix.BPF_ABS, K: offset}
	}
	// Over so many instructions unless what is loaded is a value.
	unless := func(value uint32, over uint8) unix.SockFilter {
		return unix.SockFilter{Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, K: value, Jf: over}
	}
	allow := unix.SockFilter{Code: unix.BPF_RET | unix.BPF_K, K: unix.SECCOMP_RET_ALLOW}
	code := []unix.SockFilter{load(offsetNumber)}
	for _, nr := range uncounted() {
		code = append(code, unless(nr, 1), allow)
	}
	return append(code, unless(unix.SYS_SENDMSG, 3), load(offsetFirst), unless(aside, 1), allow,
		unix.SockFilter{Code: unix.BPF_RET | unix.BPF_K, K: unix.SECCOMP_RET_USER_NOTIF})
}
