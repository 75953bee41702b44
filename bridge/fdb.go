package bridge

import (
	"encoding/binary"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/nl"
)

const nudNoARP = 0x40 // NUD_NOARP, include/uapi/linux/neighbour.h: static, in an FDB

// fdbEntry appends struct ndmsg (include/uapi/linux/neighbour.h) of a static
// entry that the port's bridge is to hold (NTF_MASTER).
func fdbEntry(e *nl.Encoder, port int) {
	var b [unix.SizeofNdMsg]byte
	b[0] = unix.AF_BRIDGE
	binary.NativeEndian.PutUint32(b[4:], uint32(port))
	binary.NativeEndian.PutUint16(b[8:], nudNoARP)
	b[10] = unix.NTF_MASTER
	e.Raw(b[:])
}
