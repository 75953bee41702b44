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

// userHZ is the unit of times in /proc/<pid>/stat, in ticks a second: fixed for user space on amd64 and arm64, also
// where the kernel's own HZ is another.
const userHZ = 100

// sources are what tells one epoch from another.
type sources struct {
	bootIDPath string
	initPath   string                          // stat of pid 1
	now        func() time.Time                // CLOCK_REALTIME
	uptime     func() time.Duration            // CLOCK_BOOTTIME
	netns      func() (cookie uint64, _ error) // of the calling thread's network namespace
}

func hostSources() sources {
	return sources{
		bootIDPath: "/proc/sys/kernel/random/boot_id",
		initPath:   "/proc/1/stat",
		now:        time.Now,
		uptime:     uptime,
		netns:      NetNSCookie,
	}
}

// BootID returns the id that the kernel draws at each boot.
func BootID() (string, error) {
	s := hostSources()
	return s.bootID()
}

// bootID returns the id that the kernel draws at each boot. A container that
// restarts keeps it.
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

// initStart returns when pid 1 started, since boot, rounded down to 10 ms. Where
// /proc does not show pid 1 that is zero, as on a node that is its own machine.
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

// parseStart finds starttime, field 22 of proc_pid_stat(5), on the clock of
// CLOCK_BOOTTIME. Field 2 is a command in parentheses that may hold anything.
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

// uptime is CLOCK_BOOTTIME, which counts suspended time too, as starttime does.
func uptime() time.Duration { return Since(unix.CLOCK_BOOTTIME) }

// Since is how long ago the zero of a clock of the kernel's was.
func Since(clock int32) time.Duration {
	var ts unix.Timespec
	_ = unix.ClockGettime(clock, &ts) // the clocks that we ask for are always there
	return time.Duration(ts.Nano())
}

// NetNSCookie is SO_NETNS_COOKIE (Linux 5.14) of the calling thread's network namespace, which any socket tells.
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
