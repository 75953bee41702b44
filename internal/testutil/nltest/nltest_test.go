package nltest_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo"
	"github.com/tombolo-cni/tombolo/internal/nl"
	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nltest"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
)

func TestMain(m *testing.M) { nstest.Main(m) }

// kernel opens a socket in a namespace of its own.
func kernel(t *testing.T) nl.Transport {
	t.Helper()
	tr, err := nl.Open(unix.NETLINK_ROUTE, nstest.New(t))
	must.Succeed(t, err)
	t.Cleanup(func() { tr.Close() })
	return tr
}

// request is one without attributes.
func request(typ netlink.HeaderType, head []byte) netlink.Message {
	return netlink.Message{Header: netlink.Header{Type: typ}, Data: head}
}

func addBridges(b *nl.Batch, names ...string) {
	for _, name := range names {
		m, err := nl.Encode(unix.RTM_NEWLINK, netlink.Create|netlink.Excl, make([]byte, unix.SizeofIfInfomsg), func(ae *netlink.AttributeEncoder) {
			ae.String(unix.IFLA_IFNAME, name)
			ae.Nested(unix.IFLA_LINKINFO, func(ae *netlink.AttributeEncoder) error {
				ae.String(unix.IFLA_INFO_KIND, "bridge")
				return nil
			})
		})
		b.Add("add link", nl.Name(name), m, err)
	}
}

func bridges(t *testing.T, c *nl.Conn) []string {
	t.Helper()
	var names []string
	err := c.List(context.Background(), "list links", request(unix.RTM_GETLINK, make([]byte, unix.SizeofIfInfomsg)), nil, func(m netlink.Message) error {
		return nl.Decode(m.Data[unix.SizeofIfInfomsg:], func(ad *netlink.AttributeDecoder) {
			if name := ad.String(); ad.Type() == unix.IFLA_IFNAME && name[0] == 'b' {
				names = append(names, name)
			}
		})
	})
	must.Succeed(t, err)
	slices.Sort(names)
	return names
}

func TestFaultTakesOneRequestOfABatch(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		name  string
		fault *nltest.Fault
		want  []string // the errors of the three requests
		made  []string
	}{
		{"the first", &nltest.Fault{Type: unix.RTM_NEWLINK, Nth: 1, Errno: unix.EBUSY, Text: "made up"},
			[]string{"add link b0: device or resource busy (kernel: made up)", "<nil>", "<nil>"}, []string{"b1", "b2"}},
		{"the second", &nltest.Fault{Nth: 2, Errno: unix.ENOMEM},
			[]string{"<nil>", "add link b1: cannot allocate memory", "<nil>"}, []string{"b0", "b2"}},
		{"the last", &nltest.Fault{Type: unix.RTM_NEWLINK, Nth: 3, Errno: unix.EBUSY},
			[]string{"<nil>", "<nil>", "add link b2: device or resource busy"}, []string{"b0", "b1"}},
		{"each of them", &nltest.Fault{Type: unix.RTM_NEWLINK, Errno: unix.EBUSY},
			[]string{"add link b0: device or resource busy", "add link b1: device or resource busy", "add link b2: device or resource busy"}, nil},
		{"two of them", &nltest.Fault{Errno: unix.EBUSY, Times: 2},
			[]string{"add link b0: device or resource busy", "add link b1: device or resource busy", "<nil>"}, []string{"b2"}},
		{"by what it says", &nltest.Fault{Match: func(m netlink.Message) bool { return slices.Contains(m.Data, '1') }, Errno: unix.EBUSY},
			[]string{"<nil>", "add link b1: device or resource busy", "<nil>"}, []string{"b0", "b2"}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			nltest.MustHaveFired(t, tt.fault)
			c := nl.New(nltest.NewFaulty(kernel(t), tt.fault))
			var b nl.Batch
			addBridges(&b, "b0", "b1", "b2")
			c.Execute(&b)
			var got []string
			for i := range 3 {
				got = append(got, fmt.Sprint(b.Err(i)))
			}
			expect.NoDiff(t, cmp.Diff(tt.want, got), "errors")
			expect.NoDiff(t, cmp.Diff(tt.made, bridges(t, c)), "links")
		})
	}
}

func TestFaultLeavesOthersAlone(t *testing.T) {
	t.Parallel()
	fault := &nltest.Fault{Type: unix.RTM_DELLINK, Errno: unix.EBUSY}
	c := nl.New(nltest.NewFaulty(kernel(t), fault))
	var b nl.Batch
	addBridges(&b, "b0")
	if err := c.Execute(&b); err != nil || fault.Fired() != 0 {
		t.Errorf("Execute: %v; fired %d times", err, fault.Fired())
	}
	expect.NoDiff(t, cmp.Diff([]string{"b0"}, bridges(t, c)), "links")
	// It is one that strikes what it is meant for.
	b.Reset()
	m, err := nl.Encode(unix.RTM_DELLINK, 0, make([]byte, unix.SizeofIfInfomsg), func(ae *netlink.AttributeEncoder) {
		ae.String(unix.IFLA_IFNAME, "b0")
	})
	b.Add("delete link", nl.Name("b0"), m, err)
	if err := c.Execute(&b); !errors.Is(err, unix.EBUSY) || fault.Fired() != 1 {
		t.Errorf("deletion: %v; fired %d times", err, fault.Fired())
	}
	expect.NoDiff(t, cmp.Diff([]string{"b0"}, bridges(t, c)), "links after the deletion that failed")
}

func TestAnswersComeInTheOrderOfTheRequests(t *testing.T) {
	t.Parallel()
	fault := &nltest.Fault{Nth: 2, Errno: unix.EBUSY}
	rec := nltest.Record(nltest.NewFaulty(kernel(t), fault))
	c := nl.New(rec)
	var b nl.Batch
	addBridges(&b, "b0", "b1", "b2")
	c.Execute(&b)
	var seqs []uint32
	for _, d := range rec.Received() {
		for _, m := range nltest.Split(d) {
			seqs = append(seqs, m.Header.Sequence)
		}
	}
	expect.NoDiff(t, cmp.Diff([]uint32{1, 2, 3}, seqs), "sequence numbers")
}

func TestInterruptedDumpIsTriedAgain(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		times int // 0: always
		want  error
	}{{1, nil}, {3, nil}, {0, tombolo.ErrInterrupted}} {
		fault := &nltest.Fault{Type: unix.RTM_GETLINK, Interrupt: true, Times: tt.times}
		c := nl.New(nltest.NewFaulty(kernel(t), fault))
		links := 0
		err := c.List(context.Background(), "list links", request(unix.RTM_GETLINK, make([]byte, unix.SizeofIfInfomsg)), nil, func(netlink.Message) error { links++; return nil })
		if !errors.Is(err, tt.want) || fault.Fired() < tt.times || links == 0 {
			t.Errorf("interrupted %d times: %v and %d links, want %v; fired %d times", tt.times, err, links, tt.want, fault.Fired())
		}
	}
}

func TestTransactionIsHeldBackWhole(t *testing.T) {
	t.Parallel()
	var reached []netlink.Message
	fake := nltest.NewFake(func(r []netlink.Message) [][]byte { reached = append(reached, r...); return nltest.AckAll(r) })
	fault := &nltest.Fault{Type: unix.NFNL_SUBSYS_NFTABLES<<8 | unix.NFT_MSG_NEWRULE, Errno: unix.ENOENT}
	c := nl.New(nltest.NewFaulty(fake, fault))
	var b nl.Batch
	b.AddSilent("begin", nil, request(unix.NFNL_MSG_BATCH_BEGIN, []byte{0, 0, 0, 10}), nil)
	for _, typ := range []netlink.HeaderType{unix.NFT_MSG_NEWTABLE, unix.NFT_MSG_NEWRULE, unix.NFT_MSG_NEWSET} {
		b.Add("change", nil, request(unix.NFNL_SUBSYS_NFTABLES<<8|typ, []byte{1, 0, 0, 0}), nil)
	}
	b.AddSilent("end", nil, request(unix.NFNL_MSG_BATCH_END, []byte{0, 0, 0, 10}), nil)
	if err := c.Execute(&b); !errors.Is(err, unix.ENOENT) || fault.Fired() != 1 {
		t.Errorf("Execute: %v after %d faults, want %v", err, fault.Fired(), unix.ENOENT)
	}
	if len(reached) != 0 {
		t.Errorf("%d messages reached the kernel", len(reached))
	}
}

func TestFakeRefusesEverythingOnceClosed(t *testing.T) {
	t.Parallel()
	f := nltest.NewFake(nltest.AckAll)
	f.Close()
	expect.Is(t, f.Send(nil), unix.EBADF, "Send")
	expect.Is(t, expect.Err(f.Receive(nil)), unix.EBADF, "Receive")
}

func TestSplitIsTheInverseOfBytes(t *testing.T) {
	t.Parallel()
	want := []netlink.Message{
		{Header: netlink.Header{Length: 19, Type: 1, Flags: 2, Sequence: 3}, Data: []byte{1, 2, 3}},
		{Header: netlink.Header{Length: 16, Type: 4, Flags: 5, Sequence: 6}, Data: []byte{}},
		{Header: netlink.Header{Length: 20, Type: 7, Flags: 8, Sequence: 9}, Data: []byte{1, 2, 3, 4}},
	}
	var b []byte
	for _, m := range want {
		b = append(b, nltest.Bytes(m)...)
	}
	expect.NoDiff(t, cmp.Diff(want, nltest.Split(b)), "messages")
}
