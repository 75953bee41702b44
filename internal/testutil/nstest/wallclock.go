package nstest

import (
	"bufio"
	"bytes"
	"debug/elf"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/tombolo-cni/tombolo/netns"
)

// WallClock is the clock on the wall as one process sees it. The machine's stays as it is: tests have no
// other, and time namespaces know none.
type WallClock struct {
	tb     testing.TB
	memory *os.File
	offset int64 // where the process has what is added, in seconds
}

// vdsoClock is what clock_gettime becomes in the process's copy of the vDSO, where Go asks for the time. The system call
// does the same, and CLOCK_REALTIME gets the seconds behind the code added.
func vdsoClock() []byte {
	return []byte{
		0xb8, 228, 0, 0, 0, // mov $SYS_clock_gettime, %eax
		0x0f, 0x05, // syscall
		0x85, 0xff, // test %edi, %edi
		0x75, 0x0a, // jne to ret
		0x48, 0x8b, 0x0d, 0x04, 0, 0, 0, // mov 4(%rip), %rcx
		0x48, 0x01, 0x0e, // add %rcx, (%rsi)
		0xc3,       // ret
		0, 0, 0, 0, // the seconds have 8 bytes from 22 on
		0, 0, 0, 0,
	}
}

// StartWithClock starts a static program for amd64 in a namespace, with a clock of its own that goes like the machine's
// until it is set.
func StartWithClock(tb testing.TB, ns *netns.NS, cmd *exec.Cmd) *WallClock {
	tb.Helper()
	if runtime.GOARCH != "amd64" {
		tb.Skip("the code for the vDSO is amd64's")
	}
	w := &WallClock{tb: tb}
	// The process stops when its program is loaded, and belongs to the thread that started it.
	cmd.SysProcAttr = &syscall.SysProcAttr{Ptrace: true}
	err := ns.Do(func() error {
		if err := cmd.Start(); err != nil {
			return err
		}
		var status syscall.WaitStatus
		_, err := syscall.Wait4(cmd.Process.Pid, &status, 0, nil)
		return errors.Join(err, w.patch(cmd.Process.Pid), syscall.PtraceDetach(cmd.Process.Pid))
	})
	if err != nil {
		tb.Fatalf("give %s a clock: %v", cmd, err)
	}
	tb.Cleanup(func() { w.memory.Close() })
	return w
}

// Set has the clock be ahead of the machine's by so many seconds.
func (w *WallClock) Set(ahead time.Duration) {
	w.tb.Helper()
	seconds := binary.LittleEndian.AppendUint64(nil, uint64(ahead/time.Second))
	if _, err := w.memory.WriteAt(seconds, w.offset); err != nil {
		w.tb.Fatalf("set a process's clock: %v", err)
	}
}

func (w *WallClock) patch(pid int) error {
	var err error
	if w.memory, err = os.OpenFile(fmt.Sprintf("/proc/%d/mem", pid), os.O_RDWR, 0); err != nil {
		return err
	}
	start, end, err := vdso(pid)
	if err != nil {
		return err
	}
	image := make([]byte, end-start)
	if _, err := w.memory.ReadAt(image, start); err != nil {
		return err
	}
	file, err := elf.NewFile(bytes.NewReader(image))
	if err != nil {
		return err
	}
	symbols, err := file.DynamicSymbols()
	for _, s := range symbols {
		if s.Name == "__vdso_clock_gettime" && s.Size >= uint64(len(vdsoClock())) {
			w.offset = start + int64(s.Value) + int64(len(vdsoClock())) - 8
			_, err := w.memory.WriteAt(vdsoClock(), start+int64(s.Value))
			return err
		}
	}
	return errors.Join(err, errors.New("the vDSO has no clock_gettime with room for another"))
}

// vdso gives where a process has the kernel's own library.
func vdso(pid int) (start, end int64, _ error) {
	maps, err := os.Open(fmt.Sprintf("/proc/%d/maps", pid))
	if err != nil {
		return 0, 0, err
	}
	defer maps.Close()
	for lines := bufio.NewScanner(maps); lines.Scan(); {
		if strings.HasSuffix(lines.Text(), "[vdso]") {
			_, err := fmt.Sscanf(lines.Text(), "%x-%x", &start, &end)
			return start, end, err
		}
	}
	return 0, 0, errors.New("no vDSO is mapped")
}
