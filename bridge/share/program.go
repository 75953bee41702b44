package share

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"runtime"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo"
)

// instruction is struct bpf_insn of include/uapi/linux/bpf.h.
type instruction struct {
	op        uint8
	registers uint8 // destination, and the source shifted by 4
	offset    int16
	immediate int32
}

// Opcodes that the program uses. They combine a class, a width and a source (include/uapi/linux/bpf_common.h and
// bpf.h).
const (
	loadByte   = unix.BPF_LDX | unix.BPF_MEM | unix.BPF_B
	loadHalf   = unix.BPF_LDX | unix.BPF_MEM | unix.BPF_H
	loadWord   = unix.BPF_LDX | unix.BPF_MEM | unix.BPF_W
	move       = bpfALU64 | bpfMov | unix.BPF_X
	set        = bpfALU64 | bpfMov | unix.BPF_K
	add        = bpfALU64 | unix.BPF_ADD | unix.BPF_K
	ifGreater  = unix.BPF_JMP | unix.BPF_JGT | unix.BPF_X
	ifAnyBit   = unix.BPF_JMP | unix.BPF_JSET | unix.BPF_K
	ifDiffers  = unix.BPF_JMP | bpfJNE | unix.BPF_K
	ifDiffers4 = bpfJMP32 | bpfJNE | unix.BPF_K
	call       = unix.BPF_JMP | bpfCall
	exit       = unix.BPF_JMP | bpfExit

	bpfALU64 = 0x07
	bpfMov   = 0xb0
	bpfJNE   = 0x50
	bpfJMP32 = 0x06
	bpfCall  = 0x80
	bpfExit  = 0x90

	helperCloneRedirect = 13 // BPF_FUNC_clone_redirect
	helperRedirect      = 23 // BPF_FUNC_redirect

	towardsHost = 1 // BPF_F_INGRESS: the frame enters as if the NIC had received it
	towardsWire = 0 // the NIC transmits it

	offsetData    = 76 // offset of data in struct __sk_buff
	offsetDataEnd = 80
	etherLen      = 14
)

// program returns the BPF program for frames that leave the bridge through the port. If the destination is the NIC's
// MAC, the program passes the frame to the host's stack as if the NIC had received it. It passes multicast and
// broadcast frames to the host's stack and also sends them out of the NIC. It sends all other frames out of the NIC.
// Unlike tc's action mirred, the BPF helpers also work while the NIC has no carrier.
func program(nic int, mac net.HardwareAddr) []instruction {
	high := int32(binary.NativeEndian.Uint32(mac))
	low := int32(binary.NativeEndian.Uint16(mac[4:]))

	const toWire, toPass = 20, 24
	to := func(target, at int) int16 { return int16(target - at - 1) }

	return []instruction{
		0:  {op: move, registers: 6 | 1<<4},
		1:  {op: loadWord, registers: 2 | 1<<4, offset: offsetData},
		2:  {op: loadWord, registers: 3 | 1<<4, offset: offsetDataEnd},
		3:  {op: move, registers: 4 | 2<<4},
		4:  {op: add, registers: 4, immediate: etherLen},
		5:  {op: ifGreater, registers: 4 | 3<<4, offset: to(toPass, 5)},
		6:  {op: loadByte, registers: 5 | 2<<4},
		7:  {op: ifAnyBit, registers: 5, offset: to(16, 7), immediate: 1},
		8:  {op: loadWord, registers: 5 | 2<<4},
		9:  {op: ifDiffers4, registers: 5, offset: to(toWire, 9), immediate: high},
		10: {op: loadHalf, registers: 5 | 2<<4, offset: 4},
		11: {op: ifDiffers, registers: 5, offset: to(toWire, 11), immediate: low},

		// A frame to the NIC's MAC: pass it to the host's stack, and end.
		12: {op: set, registers: 1, immediate: int32(nic)},
		13: {op: set, registers: 2, immediate: towardsHost},
		14: {op: call, immediate: helperRedirect},
		15: {op: exit},

		// A multicast or broadcast frame: pass a copy to the host's stack, and continue below with the original.
		16: {op: move, registers: 1 | 6<<4},
		17: {op: set, registers: 2, immediate: int32(nic)},
		18: {op: set, registers: 3, immediate: towardsHost},
		19: {op: call, immediate: helperCloneRedirect},

		// Every frame that is not for the host alone: send it out of the NIC.
		20: {op: set, registers: 1, immediate: int32(nic)},
		21: {op: set, registers: 2, immediate: towardsWire},
		22: {op: call, immediate: helperRedirect},
		23: {op: exit},

		// The frame is shorter than an Ethernet header: pass it on. The kernel drops it.
		24: {op: set, registers: 0, immediate: 0},
		25: {op: exit},
	}
}

// loadRequest holds the first fields of union bpf_attr for BPF_PROG_LOAD (include/uapi/linux/bpf.h).
type loadRequest struct {
	kind, count         uint32
	instructions        uint64
	license             uint64
	logLevel, logSize   uint32
	log                 uint64
	kernelVersion, bits uint32
	name                [16]byte
}

const (
	commandLoad    = 5 // BPF_PROG_LOAD
	kindClassifier = 3 // BPF_PROG_TYPE_SCHED_CLS

	loadTries = 100
)

// load loads a program into the kernel and returns a file descriptor, which the caller must close. It needs CAP_BPF
// and CAP_NET_ADMIN, or CAP_SYS_ADMIN.
func load(instructions []instruction) (fd int, _ error) {
	license := []byte("GPL\x00")
	request := loadRequest{
		kind: kindClassifier, count: uint32(len(instructions)),
		instructions: uint64(uintptr(unsafe.Pointer(unsafe.SliceData(instructions)))),
		license:      uint64(uintptr(unsafe.Pointer(unsafe.SliceData(license)))),
	}
	copy(request.name[:], "tombolo_share")

	var got uintptr
	errno := unix.EAGAIN // the kernel's verifier gives up on a signal, and Go's scheduler sends some
	for tries := 0; errno == unix.EAGAIN && tries < loadTries; tries++ {
		got, _, errno = unix.Syscall(unix.SYS_BPF, commandLoad, uintptr(unsafe.Pointer(&request)),
			unsafe.Sizeof(request))
	}

	runtime.KeepAlive(instructions)
	runtime.KeepAlive(license)
	if errno == 0 {
		return int(got), nil
	}

	err := error(errno)
	if errors.Is(err, unix.ENOSYS) || errors.Is(err, unix.EPERM) {
		err = fmt.Errorf(
			"%w: a NIC is shared by a small BPF program, which needs CAP_BPF and CAP_NET_ADMIN (or root), and a "+
				"kernel with CONFIG_BPF_SYSCALL", err)
	}

	return -1, &tombolo.OpError{Op: "load BPF program", Err: err}
}
