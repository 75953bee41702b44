package conntrack

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/golden"
	"github.com/tombolo-cni/tombolo/internal/nl"
	"github.com/tombolo-cni/tombolo/internal/nl/nltest"
	"github.com/tombolo-cni/tombolo/internal/nstest"
)

// TestRequests compares what goes to the kernel with testdata. An IPv6 address must
// never be in a filter: kernels list all flows but those with it.
func TestRequests(t *testing.T) {
	t.Parallel()
	udp4 := Publication{unix.IPPROTO_UDP, mustPort("192.0.2.1:5300"), mustPort("10.22.0.6:53")}
	udp6 := Publication{unix.IPPROTO_UDP, mustPort("[2001:db8:1::1]:5300"), mustPort("[fd00:22::6]:53")}
	text := ""
	for _, ask := range []struct {
		flows   uint32
		filters []Filter
	}{
		{0, []Filter{udp4.Stale(nil)}},
		{1, []Filter{udp4.Stale(nil)}},
		{1, []Filter{udp4.Flows()}},
		{1, []Filter{udp6.Stale(nil)}},
		{1, []Filter{udp6.Flows()}},
		{1, []Filter{{Proto: unix.IPPROTO_TCP, Reply: Match{Src: nstest.Addr("fd00:22::6")}}}},
		{1, []Filter{{Proto: unix.IPPROTO_TCP, Reply: Match{Dst: nstest.Addr("10.22.0.6")}}}},
		{1, []Filter{{Proto: unix.IPPROTO_UDP, Reply: Match{DstPort: 1}, Family: unix.AF_INET6}}},
		{1, Of(nstest.Addr("10.22.0.6"))},
		{1, Of(nstest.Addr("fd00:22::6"))},
		{1, []Filter{{Proto: unix.IPPROTO_SCTP, Orig: Match{SrcPort: 1}}}},
		{1, []Filter{udp4.Flows(), otherPort(udp4).Flows()}},
		{1, []Filter{udp6.Flows(), otherPort(udp6).Flows()}},
		{1, []Filter{udp4.Stale(nil), otherPort(udp4).Stale(nil)}},
		{1, []Filter{udp6.Flows(), udp4.Flows(), udp6.Stale(nil), udp4.Stale(nil)}},
	} {
		rec := nltest.Record(fakeKernel(ask.flows))
		if _, err := On(nl.New(rec)).List(context.Background(), ask.filters...); err != nil {
			t.Error(err)
		}
		sent := rec.Sent()[1:] // without the question for the number of flows
		text += fmt.Sprintf("# of %d flows: %s\n%s", ask.flows, &question{filters: ask.filters}, nltest.Text(headerLen, sent...))
	}
	for _, tuple := range []Tuple{{mustPort("10.0.0.1:1"), mustPort("10.0.0.2:2")}, {mustPort("[fd00::1]:1"), mustPort("[fd00::2]:2")}} {
		flow := Flow{ID: 0x12345678, Zone: 7, Proto: unix.IPPROTO_UDP, Orig: tuple, tuple: []byte("\x0c\x00\x01\x80it is nested")}
		rec := nltest.Record(nltest.NewFake(nltest.AckAll))
		if _, err := On(nl.New(rec)).delete(context.Background(), []Flow{flow}); err != nil {
			t.Error(err)
		}
		text += "# delete " + tuple.String() + "\n" + nltest.Text(headerLen, rec.Sent()...)
	}
	golden.Compare(t, "requests.golden", text)
}

// otherPort is another port of the same pod.
func otherPort(p Publication) Publication {
	p.Host = netip.AddrPortFrom(p.Host.Addr(), p.Host.Port()+1)
	p.Pod = netip.AddrPortFrom(p.Pod.Addr(), p.Pod.Port()+1)
	return p
}

func TestFiltersThatMakeNoSenseAreRefused(t *testing.T) {
	t.Parallel()
	a4, a6 := nstest.Addr("10.0.0.1"), nstest.Addr("fd00::1")
	for _, tc := range []struct {
		name   string
		filter Filter
		want   string
	}{
		{"empty", Filter{}, "every flow of the node"},
		{"protocol alone", Filter{Proto: unix.IPPROTO_UDP, Family: unix.AF_INET}, "every flow of the node"},
		{"condition alone", Filter{Where: func(Flow) bool { return true }}, "every flow of the node"},
		{"port 0", Publication{unix.IPPROTO_UDP, netip.AddrPort{}, mustPort("10.0.0.1:53")}.Stale(nil), "every flow of the node"},
		{"port without a protocol", Filter{Orig: Match{DstPort: 53}}, "protocol 0 has none"},
		{"port of a protocol without", Filter{Proto: unix.IPPROTO_ICMP, Reply: Match{SrcPort: 53}}, "protocol icmp has none"},
		{"two families", Filter{Orig: Match{Src: a4}, Reply: Match{Dst: a6}}, "the other family"},
		{"not the family that it says", Filter{Family: unix.AF_INET6, Orig: Match{Dst: a4}}, "the other family"},
		{"a family that is none", Filter{Family: unix.AF_BRIDGE, Proto: unix.IPPROTO_UDP, Orig: Match{SrcPort: 1}}, "address family 7"},
		{"mapped address", Filter{Reply: Match{Src: nstest.Addr("::ffff:10.0.0.1")}}, "::ffff:10.0.0.1"},
		{"address with a zone", Filter{Orig: Match{Src: nstest.Addr("fe80::1%eth0")}}, "fe80::1%eth0"},
		{"host and pod of two families", Publication{unix.IPPROTO_UDP, mustPort("192.0.2.1:53"), mustPort("[fd00::1]:53")}.Stale(nil), "the other family"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			rec := nltest.Record(fakeKernel(1))
			c := On(nl.New(rec))
			n, err := c.Flush(context.Background(), tc.filter)
			if n != 0 || err == nil || !strings.Contains(err.Error(), tc.want) || !strings.HasPrefix(err.Error(), "list flows") {
				t.Errorf("flushed %d, %v; want an error with %q", n, err, tc.want)
			}
			if len(rec.Sent()) != 0 {
				t.Error("the kernel was asked nevertheless")
			}
		})
	}
}

func TestFilterSaysWhatItMatches(t *testing.T) {
	t.Parallel()
	f := Filter{Proto: unix.IPPROTO_SCTP,
		Orig:  Match{nstest.Addr("10.0.0.1"), nstest.Addr("10.0.0.2"), 1, 2},
		Reply: Match{nstest.Addr("10.0.0.3"), nstest.Addr("10.0.0.4"), 3, 4}}
	want := "sctp orig src=10.0.0.1 dst=10.0.0.2 sport=1 dport=2 reply src=10.0.0.3 dst=10.0.0.4 sport=3 dport=4"
	if got := f.String(); got != want {
		t.Errorf("got  %q\nwant %q", got, want)
	}
}

func TestFlowsOfEveryProtocolAreRead(t *testing.T) {
	t.Parallel()
	ns := nstest.New(t)
	insert(t, ns, slices.Collect(maps.Values(node()))...)
	c, rec := dialRecorded(t, ns)
	list, err := c.List(context.Background(), slices.Concat(Of(nstest.Addr("10.22.0.6")), Of(nstest.Addr("fd00:22::6")))...)
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, flow := range list {
		if flow.ID == 0 || flow.Zone != 0 || flow.Status == 0 || len(flow.tuple) == 0 {
			t.Errorf("%s lacks its number, status or tuple: %+v", flow, flow)
		}
		got = append(got, flow.String())
	}
	for _, want := range []string{
		"icmp 10.22.0.6:0 > 8.8.8.8:0, answered 8.8.8.8:0 > 10.22.0.6:0",
		"udp 10.22.0.6:4001 > 8.8.8.8:53, answered 8.8.8.8:53 > 192.0.2.1:4444",
		"tcp 198.51.100.1:4002 > 192.0.2.1:53, answered 10.22.0.6:5353 > 198.51.100.1:4002",
		"udp [2001:db8::1]:4002 > [2001:db8:1::1]:53, answered [fd00:22::6]:5353 > [2001:db8::1]:4002",
	} {
		if !strings.Contains(strings.Join(got, "\n"), want) {
			t.Errorf("%q is not in the list:\n%s", want, strings.Join(got, "\n"))
		}
	}
	if golden.Updates() {
		saveSeeds(t, rec.Received())
	}
}

// saveSeeds writes one flow of each protocol and family as a seed of FuzzFlow, and
// the number of flows as one of FuzzStats.
func saveSeeds(t *testing.T, received [][]byte) {
	saved := map[string]bool{}
	for _, datagram := range received {
		for _, m := range nltest.Split(datagram) {
			if m.Header.Type == messageStats {
				nstest.SaveCorpus(t, "FuzzStats", "kernel", m.Data)
			}
			if m.Header.Type != messageNew {
				continue
			}
			flow, err := decode(m.Data)
			if err != nil {
				t.Fatal(err)
			}
			name := "kernel-" + protoName(flow.Proto) + "-6"
			if flow.Orig.Src.Addr().Is4() {
				name = strings.TrimSuffix(name, "6") + "4"
			}
			if !saved[name] {
				nstest.SaveCorpus(t, "FuzzFlow", name, m.Data)
				saved[name] = true
			}
		}
	}
}

// FuzzFlow reads what might be a flow. If it is one, the request that deletes it must
// have the tuple in it, without which the kernel would delete all flows.
func FuzzFlow(f *testing.F) {
	f.Add([]byte{unix.AF_INET, 0, 0, 0})
	f.Add([]byte{unix.AF_INET, 0, 0, 0, 4, 0, attrTupleOrig, 0, 4, 0, attrTupleReply, 0, 8, 0, attrID, 0, 1, 2, 3, 4})
	f.Fuzz(func(t *testing.T, data []byte) {
		flow, err := decode(data)
		if err != nil {
			if !errors.Is(err, nl.ErrMalformed) {
				t.Fatalf("%v is not %v", err, nl.ErrMalformed)
			}
			return
		}
		_ = flow.String()
		exact := Filter{Family: familyOf(flow.Orig.Src.Addr()), Proto: flow.Proto, Orig: matchOf(flow.Orig), Reply: matchOf(flow.Reply)}
		if !exact.matches(&flow) {
			t.Errorf("%s does not match itself", flow)
		}
		rec := nltest.Record(nltest.NewFake(nltest.AckAll))
		if n, err := On(nl.New(rec)).delete(context.Background(), []Flow{flow}); n != 1 || err != nil {
			t.Fatalf("deleted %d, %v", n, err)
		}
		sent := nltest.Split(rec.Sent()[0])[0].Data
		attrs, err := netlink.NewAttributeDecoder(sent[headerLen:])
		if err != nil || !attrs.Next() || attrs.Type() != attrTupleOrig {
			t.Fatalf("the request to delete it begins with %x, %v", sent[headerLen:], err)
		}
		var tuple Tuple
		var proto uint8
		if attrs.Do(decodeTuple(&tuple, &proto)); attrs.Err() != nil || tuple != flow.Orig || proto != flow.Proto {
			t.Errorf("%s is deleted as %s of protocol %d, %v", flow, tuple, proto, attrs.Err())
		}
	})
}

func matchOf(t Tuple) Match {
	return Match{Src: t.Src.Addr(), Dst: t.Dst.Addr(), SrcPort: t.Src.Port(), DstPort: t.Dst.Port()}
}

// FuzzStats has a number to read: there is nothing to hold it to but that it says so
// where there is none.
func FuzzStats(f *testing.F) {
	f.Add([]byte{0, 0, 0, 0, 8, 0, statsEntries, 0, 0, 0, 1, 0})
	f.Fuzz(func(t *testing.T, data []byte) {
		if _, err := decodeStats(data); err != nil && !errors.Is(err, nl.ErrMalformed) {
			t.Fatalf("%v is not %v", err, nl.ErrMalformed)
		} else if err == nil && len(data) < headerLen+8 {
			t.Errorf("read a number out of %d bytes", len(data))
		}
	})
}
