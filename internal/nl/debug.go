package nl

import (
	"cmp"
	"encoding/hex"
	"fmt"
	"os"
	"strings"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"
)

// debugger prints the messages of a socket to standard error. A nil debugger prints nothing.
type debugger struct{ protocol, fd int }

// newDebugger returns a debugger if the environment variable NLDEBUG is set, as for mdlayher/netlink, or nil.
func newDebugger(protocol, fd int) *debugger {
	if os.Getenv("NLDEBUG") == "" {
		return nil
	}
	return &debugger{protocol, fd}
}

// print prints one line for each message in b: direction, sequence number, type, flags and content.
func (d *debugger) print(direction string, b []byte) {
	for d != nil && len(b) > 0 {
		m, rest, err := next(b)
		if err != nil {
			fmt.Fprintf(os.Stderr, "nl: fd %d %s %v\n", d.fd, direction, err)
			return
		}
		name, content := d.describe(m)
		fmt.Fprintf(os.Stderr, "nl: fd %d %s seq %d %s flags %#x:%s\n",
			d.fd, direction, m.Header.Sequence, name, uint16(m.Header.Flags), content)
		b = rest
	}
}

// describe returns the name of a message's type and its content. The content is an error, or the fixed header in
// hexadecimal digits and the attributes.
func (d *debugger) describe(m netlink.Message) (name, content string) {
	header, t := len(m.Data), int(m.Header.Type)
	switch {
	case m.Header.Type == netlink.Error:
		errno, text, err := ackError(m)
		if errno == 0 && err == nil {
			return "ACK", ""
		}
		return "ERROR", strings.TrimRight(fmt.Sprintf(" %v %s", cmp.Or(err, error(errno)), text), " ")
	case t < unix.NLMSG_MIN_TYPE:
		name = strings.ToUpper(m.Header.Type.String())
	case d.protocol == unix.NETLINK_ROUTE:
		name, header = routeName(t)
	case d.protocol == unix.NETLINK_NETFILTER:
		name, header = netfilterName(t), 4 // struct nfgenmsg
	default:
		name = fmt.Sprint("type ", t)
	}

	header = min(header, len(m.Data))
	return name, string(appendAttributes(fmt.Appendf(nil, " %x", m.Data[:header]), m.Data[header:]))
}

// routeName returns the name of a message type of rtnetlink, and the length of such a message's fixed header.
func routeName(t int) (name string, header int) {
	verbs := []string{"NEW", "DEL", "GET", "SET"}
	objects := []string{"LINK", "ADDR", "ROUTE", "NEIGH", "RULE", "QDISC", "TCLASS", "TFILTER"}
	headers := []int{unix.SizeofIfInfomsg, unix.SizeofIfAddrmsg, unix.SizeofRtMsg, unix.SizeofNdMsg, unix.SizeofRtMsg,
		sizeofTcmsg, sizeofTcmsg, sizeofTcmsg}
	i := (t - unix.RTM_BASE) / len(verbs)
	if i < 0 || i >= len(objects) {
		return fmt.Sprint("RTM_", t), 0
	}
	return "RTM_" + verbs[t%len(verbs)] + objects[i], headers[i]
}

// netfilterName returns the name of a message type of nfnetlink. If it is none of nf_tables, it returns the subsystem
// and the number.
func netfilterName(t int) string {
	names := []string{"NEWTABLE", "GETTABLE", "DELTABLE", "NEWCHAIN", "GETCHAIN", "DELCHAIN", "NEWRULE", "GETRULE",
		"DELRULE", "NEWSET", "GETSET", "DELSET", "NEWSETELEM", "GETSETELEM", "DELSETELEM", "NEWGEN", "GETGEN", "TRACE"}
	switch subsystem, i := t>>8, t&0xff; {
	case t == unix.NFNL_MSG_BATCH_BEGIN:
		return "NFNL_MSG_BATCH_BEGIN"
	case t == unix.NFNL_MSG_BATCH_END:
		return "NFNL_MSG_BATCH_END"
	case subsystem == unix.NFNL_SUBSYS_NFTABLES && i < len(names):
		return "NFT_MSG_" + names[i]
	default:
		return fmt.Sprintf("NFNL_%d_%d", subsystem, i)
	}
}

// appendAttributes appends attributes to text as type:length:hex. If an attribute has the flag for nested attributes,
// it appends these in braces. If b has no valid attributes, it appends hexadecimal digits.
func appendAttributes(text, b []byte) []byte {
	start := len(text)
	err := Decode(b, func(ad *netlink.AttributeDecoder) {
		value := ad.Bytes()
		text = fmt.Appendf(text, " %d:%d:", ad.Type(), len(value))
		if ad.TypeFlags()&netlink.Nested != 0 {
			text = append(appendAttributes(append(text, '{'), value), " }"...)
		} else {
			text = hex.AppendEncode(text, value)
		}
	})
	if err != nil {
		return fmt.Appendf(text[:start], " %x", b)
	}
	return text
}
