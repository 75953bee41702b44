package state

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"strconv"
	"time"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/file"
)

// userHZ is the number of clock ticks a second in /proc/<pid>/stat. For user space on amd64 and arm64 it is always
// 100, also if the kernel's own HZ differs.
const userHZ = 100

// sources are the files and functions that distinguish one epoch from another. Tests replace them.
type sources struct {
	bootIDPath string
	initPath   string                          // stat of pid 1
	now        func() time.Time                // CLOCK_REALTIME
	uptime     func() time.Duration            // CLOCK_BOOTTIME
	netns      func() (cookie uint64, _ error) // of the calling thread's network namespace
}

// hostSources returns the sources of the running host.
func hostSources() sources {
	return sources{
		bootIDPath: "/proc/sys/kernel/random/boot_id",
		initPath:   "/proc/1/stat",
		now:        time.Now,
		uptime:     uptime,
		netns:      NetNSCookie,
	}
}

// BootID returns the kernel's boot id, which is random and new at each boot.
func BootID() (string, error) {
	s := hostSources()
	return s.bootID()
}

// bootID returns the kernel's boot id. A restart of a container does not change it.
func (s *sources) bootID() (string, error) {
	data, err := file.ReadKernel(s.bootIDPath)
	if err != nil {
		return "", fmt.Errorf("%w: is /proc mounted?", err)
	}
	id := string(bytes.TrimSpace(data))
	if id == "" {
		return "", fmt.Errorf("read %s: it is empty", s.bootIDPath)
	}
	return id, nil
}

// initStart returns when pid 1 started, as a time since boot, rounded down to 10 ms. If /proc does not show pid 1, it
// returns 0, as if pid 1 had started at boot.
func (s *sources) initStart() (time.Duration, error) {
	data, err := file.ReadKernel(s.initPath)
	if errors.Is(err, os.ErrNotExist) || errors.Is(err, os.ErrPermission) {
		return 0, nil
	}

	if err != nil {
		return 0, err
	}

	start, err := parseStart(data)
	if err != nil {
		return 0, fmt.Errorf("read %s: %w", s.initPath, err)
	}
	return start, nil
}

// parseStart returns starttime, field 22 of proc_pid_stat(5), which counts by CLOCK_BOOTTIME. It searches from the
// last ')', since field 2 is a command in parentheses that may contain anything.
func parseStart(stat []byte) (time.Duration, error) {
	const afterCommand = 22 - 3
	fields := bytes.Fields(stat[bytes.LastIndexByte(stat, ')')+1:])
	if len(fields) <= afterCommand {
		return 0, fmt.Errorf("want 22 fields, not %.60q", stat)
	}

	// 39 bits are 174 years, and do not overflow a Duration.
	ticks, err := strconv.ParseUint(string(fields[afterCommand]), 10, 39)
	if err != nil {
		return 0, fmt.Errorf("start time: %w", err)
	}
	return time.Duration(ticks) * (time.Second / userHZ), nil
}

// uptime returns CLOCK_BOOTTIME. Like starttime, it includes suspended time.
func uptime() time.Duration { return Since(unix.CLOCK_BOOTTIME) }

// Since returns the time since the zero of one of the kernel's clocks, such as CLOCK_BOOTTIME.
func Since(clock int32) time.Duration {
	var ts unix.Timespec
	_ = unix.ClockGettime(clock, &ts) // cannot fail for the clocks that we use
	return time.Duration(ts.Nano())
}

// NetNSCookie returns the SO_NETNS_COOKIE (Linux 5.14) of the calling thread's network namespace. It reads the cookie
// from a new socket.
func NetNSCookie() (uint64, error) {
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return 0, fmt.Errorf("open a socket: %w", err)
	}
	defer unix.Close(fd)
	cookie, err := unix.GetsockoptUint64(fd, unix.SOL_SOCKET, unix.SO_NETNS_COOKIE)
	if err != nil {
		return 0, fmt.Errorf("read SO_NETNS_COOKIE: %w", err)
	}
	return cookie, nil
}
