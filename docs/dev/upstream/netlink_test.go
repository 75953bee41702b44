package upstream

import (
	"encoding/binary"
	"errors"
	"fmt"
	"iter"
	"strings"
	"testing"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"
)

// datagrams is a socket that has these to receive, one after another.
type datagrams struct{ list [][]netlink.Message }

var errNothing = errors.New("nothing is left to receive: a socket would wait for ever")

func (d *datagrams) Close() error                         { return nil }
func (d *datagrams) Send(netlink.Message) error           { return nil }
func (d *datagrams) SendMessages([]netlink.Message) error { return nil }
func (d *datagrams) Receive() ([]netlink.Message, error)  { return nil, errNothing }

func (d *datagrams) ReceiveIter() iter.Seq2[netlink.Message, error] {
	return func(yield func(netlink.Message, error) bool) {
		if len(d.list) == 0 {
			yield(netlink.Message{}, errNothing)
			return
		}
		next := d.list[0]
		d.list = d.list[1:]
		for _, m := range next {
			if !yield(m, nil) {
				return
			}
		}
	}
}

func connOver(list ...[]netlink.Message) *netlink.Conn { return netlink.NewConn(&datagrams{list}, 7) }

// answer is a struct nlmsgerr: an errno, the header of a request of some length, and what
// is behind it.
func answer(sequence uint32, errno unix.Errno, flags netlink.HeaderFlags, requested int, rest ...byte) netlink.Message {
	b := binary.NativeEndian.AppendUint32(nil, uint32(-int32(errno)))
	b = binary.NativeEndian.AppendUint32(b, uint32(requested))
	b = append(b, make([]byte, unix.NLMSG_HDRLEN-4)...)
	b = append(b, rest...)
	h := netlink.Header{Length: uint32(unix.NLMSG_HDRLEN + len(b)), Type: netlink.Error, Flags: flags, Sequence: sequence, PID: 7}
	return netlink.Message{Header: h, Data: b}
}

func object(sequence uint32, flags netlink.HeaderFlags) netlink.Message {
	return netlink.Message{Header: netlink.Header{Length: 20, Type: unix.RTM_NEWLINK, Flags: flags, Sequence: sequence, PID: 7}, Data: make([]byte, 4)}
}

func attributes(t *testing.T, fn func(ae *netlink.AttributeEncoder)) []byte {
	t.Helper()
	ae := netlink.NewAttributeEncoder()
	fn(ae)
	b, err := ae.Encode()
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func TestReceiveKeepsMessagesBesideAnError(t *testing.T) {
	c := connOver([]netlink.Message{object(1, 0), answer(2, unix.EEXIST, 0, 20), object(3, 0)})
	first, err := c.Receive()
	if err == nil {
		t.Log("no error")
	}
	second, _ := c.Receive()
	if len(first)+len(second) != 2 {
		t.Errorf("of two messages beside an error, %d are given: the answers to requests 1 and 3 of a batch are lost", len(first)+len(second))
	}
}

func TestErrorBehindACappedRequestHasItsWords(t *testing.T) {
	words := attributes(t, func(ae *netlink.AttributeEncoder) { ae.String(unix.NLMSGERR_ATTR_MSG, "no such thing") })
	// With NETLINK_CAP_ACK the request's header stands there alone, and says how long
	// the request was.
	_, err := connOver([]netlink.Message{answer(1, unix.EINVAL, netlink.Capped|netlink.AcknowledgeTLVs, 120, words...)}).Receive()
	var opErr *netlink.OpError
	if !errors.As(err, &opErr) || !errors.Is(err, unix.EINVAL) || opErr.Message != "no such thing" {
		t.Errorf("error is %v, where the kernel said EINVAL, %q", err, "no such thing")
	}
}

func TestReceiveEndsWithAMultiMessageThatIsAlone(t *testing.T) {
	c := connOver([]netlink.Message{object(1, netlink.Multi)}) // as to IPCTNL_MSG_CT_GET_STATS
	list, err := c.Receive()
	if err != nil || len(list) != 1 {
		t.Errorf("%d messages, %v; the kernel sends one, and nothing more", len(list), err)
	}
}

func TestAnInterruptedListingIsToldByItsEnd(t *testing.T) {
	done := netlink.Message{Header: netlink.Header{Length: 20, Type: netlink.Done, Flags: netlink.Multi | netlink.DumpInterrupted, Sequence: 1, PID: 7}, Data: make([]byte, 4)}
	list, err := connOver([]netlink.Message{object(1, netlink.Multi), done}).Receive()
	told := err != nil
	for _, m := range list {
		told = told || m.Header.Flags&netlink.DumpInterrupted != 0
	}
	if !told {
		t.Error("nothing tells that the listing was interrupted")
	}
}

func TestExecutePassesOverAnswersToEarlierRequests(t *testing.T) {
	own := netlink.Message{Header: netlink.Header{Length: 16, Type: unix.RTM_GETLINK, Flags: netlink.Request, Sequence: 9, PID: 7}}
	// The answer to a request before, of which nobody waited for the end.
	list, err := connOver([]netlink.Message{object(8, 0), object(9, 0)}).Execute(own)
	if err != nil || len(list) != 1 {
		t.Errorf("%d messages, %v; want the one of sequence 9", len(list), err)
	}
}

func TestErrorNamesTheAttributeThatIsMissing(t *testing.T) {
	const nlmsgerrAttrMissType = 5 // Linux 6.1
	missing := attributes(t, func(ae *netlink.AttributeEncoder) { ae.Uint32(nlmsgerrAttrMissType, 4242) })
	_, err := connOver([]netlink.Message{answer(1, unix.EINVAL, netlink.AcknowledgeTLVs, 16, missing...)}).Receive()
	var opErr *netlink.OpError
	if !errors.As(err, &opErr) || !strings.Contains(fmt.Sprintf("%+v", *opErr), "4242") {
		t.Errorf("error is %v, which does not name attribute 4242", err)
	}
}
