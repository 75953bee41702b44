package sockdiag

import (
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo"
	"github.com/tombolo-cni/tombolo/internal/nl"
)

// readProc answers a question from /proc/net, with all sockets that there are.
func (c *Conn) readProc(q *question) ([]Socket, error) {
	if q.proto == unix.IPPROTO_SCTP {
		return nil, nil
	}
	name := protoName(q.proto)
	if q.family == unix.AF_INET6 {
		name += "6"
	}
	var text []byte
	within := c.nl.Within
	if c.ns != nil {
		within = c.ns.Do
	}
	err := within(func() error {
		var err error
		text, err = os.ReadFile("/proc/thread-self/net/" + name) // /proc/net is the main thread's
		return err
	})
	if errors.Is(err, fs.ErrNotExist) && q.family == unix.AF_INET6 {
		return nil, nil // IPv6 is off
	}
	var list []Socket
	if err == nil {
		list, err = parseProc(q.proto, string(text))
	}
	if err != nil {
		return nil, &tombolo.OpError{Op: "list " + q.String(), Object: "in /proc/net/" + name, Err: err}
	}
	return list, nil
}

// parseProc reads the table of /proc/net/tcp, tcp6, udp or udp6: one headline, then
// for each socket
//
//	sl local_address rem_address st tx_queue:rx_queue tr:tm->when retrnsmt uid timeout inode …
func parseProc(proto uint8, text string) ([]Socket, error) {
	const local, st, uid, inode = 1, 3, 7, 9
	var list []Socket
	first := true
	for line := range strings.Lines(text) {
		if first {
			first = false
			continue
		}
		f := strings.Fields(line)
		if len(f) <= inode {
			return nil, malformed(line)
		}
		inState, err := strconv.ParseUint(f[st], 16, 8)
		if err != nil {
			return nil, malformed(line)
		}
		if uint8(inState) != state(proto) {
			continue
		}
		at, ok := parseProcAddr(f[local])
		user, err1 := strconv.ParseUint(f[uid], 10, 32)
		number, err2 := strconv.ParseUint(f[inode], 10, 32)
		if !ok || err1 != nil || err2 != nil {
			return nil, malformed(line)
		}
		list = append(list, Socket{Proto: proto, Local: at, UID: uint32(user), Inode: uint32(number)})
	}
	return list, nil
}

func malformed(line string) error { return fmt.Errorf("%w: line %q", nl.ErrMalformed, line) }

// parseProcAddr reads "0100007F:1F90": words of four bytes as numbers of the machine,
// and the port.
func parseProcAddr(s string) (netip.AddrPort, bool) {
	text, portText, _ := strings.Cut(s, ":")
	port, err := strconv.ParseUint(portText, 16, 16)
	if err != nil {
		return netip.AddrPort{}, false
	}
	words, err := hex.DecodeString(text)
	if err != nil || len(words) != 4 && len(words) != 16 {
		return netip.AddrPort{}, false
	}
	for i := 0; i < len(words); i += 4 {
		binary.NativeEndian.PutUint32(words[i:], binary.BigEndian.Uint32(words[i:]))
	}
	a, _ := netip.AddrFromSlice(words)
	return netip.AddrPortFrom(a.Unmap(), uint16(port)), true
}
