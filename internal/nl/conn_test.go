package nl_test

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo"
	"github.com/tombolo-cni/tombolo/internal/nl"
	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nltest"
)

// fake is a connection to a kernel that is made up.
func fake(answer func([]netlink.Message) [][]byte) *nl.Conn { return nl.New(nltest.NewFake(answer)) }

// request is one without attributes.
func request(typ netlink.HeaderType, head []byte) netlink.Message {
	return netlink.Message{Header: netlink.Header{Type: typ}, Data: head}
}

// change appends n acknowledged requests, named a, b, c and so on.
func change(b *nl.Batch, n int) {
	for i := range n {
		b.Add("change", nl.Name(string(rune('a'+i))), request(unix.RTM_NEWADDR, make([]byte, 8)), nil)
	}
}

func errs(b *nl.Batch) []string {
	list := make([]string, b.Len())
	for i := range list {
		if err := b.Err(i); err != nil {
			list[i] = err.Error()
		}
	}
	return list
}

func TestExecuteReportsEachRequest(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		name   string
		answer func([]netlink.Message) [][]byte
		want   []string
		err    string
	}{
		{name: "success", answer: nltest.AckAll, want: []string{"", "", ""}},
		{name: "acknowledgements in one datagram", answer: func(r []netlink.Message) [][]byte {
			return [][]byte{nltest.Join(nltest.Ack(r[0]), nltest.Ack(r[1]), nltest.Ack(r[2]))}
		}, want: []string{"", "", ""}},
		{name: "the second and the third fail", answer: func(r []netlink.Message) [][]byte {
			return [][]byte{nltest.Ack(r[0]), nltest.Error(r[1], unix.EEXIST, "in the way"), nltest.Error(r[2], unix.EBUSY, "")}
		}, want: []string{"", "change b: file exists (kernel: in the way)", "change c: device or resource busy"},
			err: "change b: file exists (kernel: in the way)"},
		{name: "answers in another order", answer: func(r []netlink.Message) [][]byte {
			return [][]byte{nltest.Error(r[2], unix.EBUSY, ""), nltest.Error(r[0], unix.EPERM, ""), nltest.Ack(r[1])}
		}, want: []string{"change a: operation not permitted", "", "change c: device or resource busy"},
			err: "change a: operation not permitted"},
		{name: "answers to something else are left out", answer: func(r []netlink.Message) [][]byte {
			before, behind := r[0], r[2]
			before.Header.Sequence--
			behind.Header.Sequence++
			return [][]byte{nltest.Error(before, unix.EIO, ""), nltest.Ack(r[0]), nltest.Error(behind, unix.EIO, ""), nltest.Ack(r[1]), nltest.Ack(r[2])}
		}, want: []string{"", "", ""}},
		{name: "no answer", answer: func(r []netlink.Message) [][]byte { return [][]byte{nltest.Ack(r[0]), nltest.Ack(r[2])} },
			want: []string{"", "change b: the kernel gave no answer", ""}, err: "change b: the kernel gave no answer"},
		{name: "a failed transaction answers for what failed", answer: func(r []netlink.Message) [][]byte {
			return [][]byte{nltest.Error(r[1], unix.EEXIST, "")}
		}, want: []string{"", "change b: file exists", ""}, err: "change b: file exists"},
		{name: "an acknowledgement cut short", answer: func(r []netlink.Message) [][]byte {
			return [][]byte{nltest.Reply(r[0], unix.NLMSG_ERROR, 0, []byte{0, 0, 0, 0}), nltest.Ack(r[1]), nltest.Ack(r[2])}
		}, want: []string{"change a: malformed netlink message: an acknowledgement of 4 bytes", "", ""},
			err: "change a: malformed netlink message: an acknowledgement of 4 bytes"},
		{name: "no messages at all", answer: func([]netlink.Message) [][]byte { return [][]byte{{1, 2, 3}} },
			want: slices.Repeat([]string{"change %: malformed netlink message: not enough data to create a netlink message"}, 3),
			err:  "change a: malformed netlink message: not enough data to create a netlink message"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			var b nl.Batch
			change(&b, 3)
			err := fake(tt.answer).Execute(&b)
			expect.That(t, fmt.Sprint(err) == tt.err || err == nil && tt.err == "", "Execute: %v, want %s", err, tt.err)
			for i := range tt.want {
				tt.want[i] = strings.ReplaceAll(tt.want[i], "%", string(rune('a'+i)))
			}
			expect.NoDiff(t, cmp.Diff(tt.want, errs(&b)), "errors of the requests")
			if err != nil {
				var opErr *tombolo.OpError
				expect.That(t, errors.As(err, &opErr) && opErr.Op == "change", "%T is not an OpError with its Op", err)
			}
		})
	}
}

func TestExecuteNumbersRequestsOnward(t *testing.T) {
	t.Parallel()
	rec := nltest.Record(nltest.NewFake(nltest.AckAll))
	c := nl.New(rec)
	var b nl.Batch
	change(&b, 3)
	for range 2 {
		must.Succeed(t, c.Execute(&b))
	}
	var seqs []uint32
	for _, d := range rec.Sent() {
		for _, m := range nltest.Split(d) {
			seqs = append(seqs, m.Header.Sequence)
		}
	}
	expect.NoDiff(t, cmp.Diff([]uint32{1, 2, 3, 4, 5, 6}, seqs), "sequence numbers")
}

func TestGetHandsItsObjectOver(t *testing.T) {
	t.Parallel()
	object := []byte{1, 2, 3, 4}
	refused := errors.New("refused")
	for _, tt := range []struct {
		name   string
		answer func(netlink.Message) [][]byte
		reply  error
		calls  int
		want   error
	}{
		{"found", func(m netlink.Message) [][]byte { return [][]byte{nltest.Reply(m, unix.RTM_NEWLINK, 0, object)} }, nil, 1, nil},
		{"only the first counts", func(m netlink.Message) [][]byte {
			r := nltest.Reply(m, unix.RTM_NEWLINK, 0, object)
			return [][]byte{r, r}
		}, nil, 1, nil},
		{"nothing to do comes first", func(m netlink.Message) [][]byte {
			return [][]byte{nltest.Reply(m, unix.NLMSG_NOOP, 0, nil), nltest.Reply(m, unix.RTM_NEWLINK, 0, object)}
		}, nil, 1, nil},
		{"the callback refuses", func(m netlink.Message) [][]byte { return [][]byte{nltest.Reply(m, unix.RTM_NEWLINK, 0, object)} }, refused, 1, refused},
		{"not found", func(m netlink.Message) [][]byte { return [][]byte{nltest.Error(m, unix.ENODEV, "")} }, nil, 0, fs.ErrNotExist},
		{"no answer", func(netlink.Message) [][]byte { return nil }, nil, 0, nl.ErrNoAnswer},
	} {
		t.Run(tt.name, func(t *testing.T) {
			calls := 0
			var b nl.Batch
			b.AddGet("get link", nl.Name("eth0"), request(unix.RTM_GETLINK, nil), nil, func(m netlink.Message) error {
				calls++
				if diff := cmp.Diff(object, m.Data); diff != "" || m.Header.Type != unix.RTM_NEWLINK {
					t.Errorf("message %d (-want +got):\n%s", m.Header.Type, diff)
				}
				return tt.reply
			})
			err := fake(func(r []netlink.Message) [][]byte { return tt.answer(r[0]) }).Execute(&b)
			expect.That(t, errors.Is(err, tt.want) && calls == tt.calls,
				"Execute: %v and %d calls, want %v and %d", err, calls, tt.want, tt.calls)
		})
	}
}

func TestSilentRequestIsHeardWhenItFails(t *testing.T) {
	t.Parallel()
	for _, fails := range []bool{false, true} {
		var b nl.Batch
		b.AddSilent("begin", nil, request(unix.NFNL_MSG_BATCH_BEGIN, nil), nil)
		change(&b, 1)
		err := fake(func(r []netlink.Message) [][]byte {
			if fails {
				return [][]byte{nltest.Error(r[0], unix.EPERM, ""), nltest.Ack(r[1])}
			}
			return [][]byte{nltest.Ack(r[1])}
		}).Execute(&b)
		expect.Equal(t, fails, errors.Is(err, unix.EPERM), "fails %t: %v", fails, err)
	}
}

func TestEmptyBatchSendsNothing(t *testing.T) {
	t.Parallel()
	rec := nltest.Record(nltest.NewFake(nltest.AckAll))
	err := nl.New(rec).Execute(new(nl.Batch))
	expect.That(t, err == nil && len(rec.Sent()) == 0, "Execute: %v", err)
}

func TestClosedConnectionSaysSo(t *testing.T) {
	t.Parallel()
	c := fake(nltest.AckAll)
	c.Close()
	var b nl.Batch
	change(&b, 1)
	expect.Is(t, c.Execute(&b), unix.EBADF, "Execute")
	expect.Is(t, c.List(context.Background(), "list", request(unix.RTM_GETADDR, nil), nil, nil), unix.EBADF, "List")
}

// part is one message of a dump.
func part(m netlink.Message, flags uint16, v byte) []byte {
	return nltest.Reply(m, unix.RTM_NEWADDR, unix.NLM_F_MULTI|flags, []byte{v, 0, 0, 0})
}

func TestDumpGivesTheWholeList(t *testing.T) {
	t.Parallel()
	const intr = unix.NLM_F_DUMP_INTR
	for _, tt := range []struct {
		name string
		// answer gives what comes back to the nth try, from 0.
		answer func(m netlink.Message, try int) [][]byte
		want   string
		tries  int
		err    error
	}{
		{"nothing", func(m netlink.Message, _ int) [][]byte { return [][]byte{nltest.Done(m, 0)} }, "", 1, nil},
		{"in one part", func(m netlink.Message, _ int) [][]byte {
			return [][]byte{nltest.Join(part(m, 0, 1), part(m, 0, 2), nltest.Done(m, 0))}
		}, "12", 1, nil},
		{"in several", func(m netlink.Message, _ int) [][]byte {
			return [][]byte{nltest.Join(part(m, 0, 1), part(m, 0, 2)), part(m, 0, 3), nltest.Done(m, 0)}
		}, "123", 2, nil},
		{"in several, which the kernel does not mark though they change", func(m netlink.Message, try int) [][]byte {
			if try == 0 {
				return [][]byte{part(m, 0, 9), part(m, 0, 8), nltest.Done(m, 0)}
			}
			return [][]byte{part(m, 0, 1), part(m, 0, 2), nltest.Done(m, 0)}
		}, "12", 4, nil},
		{"in several that change each time", func(m netlink.Message, try int) [][]byte {
			return [][]byte{part(m, 0, byte(try%10)), part(m, 0, 8), nltest.Done(m, 0)}
		}, "88", 40, tombolo.ErrInterrupted},
		{"with the end of another before it", func(m netlink.Message, _ int) [][]byte {
			old := m
			old.Header.Sequence--
			return [][]byte{part(old, 0, 9), nltest.Done(old, 0), part(m, 0, 1), nltest.Done(m, 0)}
		}, "1", 1, nil},
		{"interrupted once", func(m netlink.Message, try int) [][]byte {
			if try == 0 {
				return [][]byte{part(m, 0, 9), part(m, intr, 8), nltest.Done(m, 0)}
			}
			return [][]byte{part(m, 0, 1), nltest.Done(m, 0)}
		}, "1", 2, nil},
		{"interrupted at its end", func(m netlink.Message, try int) [][]byte {
			if try == 0 {
				done := nltest.Reply(m, unix.NLMSG_DONE, unix.NLM_F_MULTI|intr, make([]byte, 4))
				return [][]byte{part(m, 0, 9), done}
			}
			return [][]byte{part(m, 0, 1), nltest.Done(m, 0)}
		}, "1", 2, nil},
		{"interrupted each time", func(m netlink.Message, _ int) [][]byte { return [][]byte{part(m, intr, 9), nltest.Done(m, 0)} },
			"9", 20, tombolo.ErrInterrupted},
		{"refused", func(m netlink.Message, _ int) [][]byte { return [][]byte{nltest.Error(m, unix.EINVAL, "bad filter")} }, "", 1, unix.EINVAL},
		{"given up within", func(m netlink.Message, _ int) [][]byte { return [][]byte{part(m, 0, 1), nltest.Done(m, unix.ENODEV)} }, "", 1, fs.ErrNotExist},
		{"never ended", func(m netlink.Message, _ int) [][]byte { return [][]byte{part(m, 0, 1)} }, "", 1, nl.ErrNoAnswer},
		{"not even begun", func(netlink.Message, int) [][]byte { return nil }, "", 1, nl.ErrNoAnswer},
		{"malformed", func(netlink.Message, int) [][]byte { return [][]byte{{1}} }, "", 1, nl.ErrMalformed},
	} {
		t.Run(tt.name, func(t *testing.T) {
			tries := 0
			c := fake(func(r []netlink.Message) [][]byte {
				tries++
				expect.Equal(t, r[0].Header.Flags, unix.NLM_F_REQUEST|unix.NLM_F_DUMP, "flags %#x are not those of a dump", r[0].Header.Flags)
				return tt.answer(r[0], tries-1)
			})
			got := ""
			err := c.List(context.Background(), "list", request(unix.RTM_GETADDR, nil), nil, func(m netlink.Message) error {
				got += fmt.Sprint(m.Data[0])
				return nil
			})
			expect.That(t, errors.Is(err, tt.err) && got == tt.want && tries == tt.tries,
				"List: %v, objects %q after %d tries, want %v, %q after %d", err, got, tries, tt.err, tt.want, tt.tries)
			if tt.err != nil {
				var opErr *tombolo.OpError
				expect.That(t, errors.As(err, &opErr) && opErr.Op == "list", "%v is not an OpError with its Op", err)
			}
		})
	}
}

func TestDumpEndsWithTheCallbacksError(t *testing.T) {
	t.Parallel()
	refused := errors.New("refused")
	c := fake(func(r []netlink.Message) [][]byte {
		return [][]byte{part(r[0], 0, 1), part(r[0], 0, 2), nltest.Done(r[0], 0)}
	})
	calls := 0
	err := c.List(context.Background(), "list", request(unix.RTM_GETADDR, nil), nil, func(netlink.Message) error { calls++; return refused })
	expect.That(t, errors.Is(err, refused) && calls == 1,
		"List: %v after %d calls, want %v after 1", err, calls, refused)
}

func TestDumpThatCannotBeEncodedIsNotSent(t *testing.T) {
	t.Parallel()
	rec := nltest.Record(nltest.NewFake(nltest.AckAll))
	broken := errors.New("broken")
	err := nl.New(rec).List(context.Background(), "list", request(unix.RTM_GETADDR, nil), broken, nil)
	expect.That(t, errors.Is(err, broken) && len(rec.Sent()) == 0, "List: %v, want %v and nothing sent", err, broken)
}

// mute is a transport that sends nothing.
type mute struct{ nl.Transport }

func (mute) Send([]byte) error { return unix.ENOBUFS }

// A caller that passes over the errors of some requests, "not there" say, must not take
// the rest for carried out.
func TestBatchThatCouldNotBeSentIsAnErrorOfEachRequest(t *testing.T) {
	t.Parallel()
	var b nl.Batch
	change(&b, 2)
	b.AddGet("get", nl.Name("c"), request(unix.RTM_GETLINK, make([]byte, 16)), nil, func(netlink.Message) error { return nil })
	expect.Is(t, nl.New(mute{nltest.NewFake(nltest.AckAll)}).Execute(&b), unix.ENOBUFS)
	for i := range b.Len() {
		expect.Is(t, b.Err(i), unix.ENOBUFS, "request %d", i)
	}
}
