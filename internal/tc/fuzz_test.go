package tc

import (
	"testing"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/nl"
	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/golden"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nltest"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
)

func TestMain(m *testing.M) { nstest.Main(m) }

// FuzzQdisc holds that no reply of the kernel, or of what takes itself for it,
// makes the decoder or what works on its result panic. The corpora have replies of
// a real kernel.
func FuzzQdisc(f *testing.F) {
	f.Add([]byte{})
	f.Add(make([]byte, sizeofTCMsg))
	f.Fuzz(func(t *testing.T, b []byte) {
		var q Qdisc
		if q.Decode(b) != nil {
			return
		}
		q.Burst()
		q.Is(Bucket{Rate: 1250000, Burst: 6250, Limit: 18750})
		q.Is(Bucket{})
	})
}

func FuzzFilter(f *testing.F) {
	f.Add([]byte{})
	f.Add(make([]byte, sizeofTCMsg))
	f.Fuzz(func(t *testing.T, b []byte) {
		var flt Filter
		if flt.Decode(b) != nil {
			return
		}
		expect.That(t, flt.Redirect == 0 || flt.Kind == "u32", "a redirect of another kind: %+v", flt)
	})
}

// The seeds of the fuzz targets come from here: -update writes them.
func TestDecodersReadTheKernelsReplies(t *testing.T) {
	t.Parallel()
	ns, pod := nstest.New(t), nstest.New(t)
	index, _ := nstest.Veth(t, ns, "port", pod, "eth0")
	tr := must.Of(nl.Open(unix.NETLINK_ROUTE, ns)).Get(t)
	rec := nltest.Record(tr)
	conn := nl.New(rec)
	defer conn.Close()
	l, lo := Device{Name: "port", Index: index}, nstest.Index(t, ns, "lo")
	for _, w := range []Bucket{{Rate: 1250000, Burst: 6250, Limit: 18750}, {Rate: 5e9, Burst: 25e6, Limit: 75e6}} {
		var b nl.Batch
		l.SetTBF(&b, w)
		if w.Rate < 5e9 {
			l.AddClsact(&b)
			l.AddRedirect(&b, lo)
		}
		must.Succeed(t, conn.Execute(&b))
		b.Reset()
		rec.Received()
		var root, clsact Qdisc
		l.GetQdisc(&b, Root, &root)
		l.GetQdisc(&b, Clsact, &clsact)
		must.Succeed(t, Look(t.Context(), conn, &b))
		expect.That(t, root.Is(w) && root.Link == index && clsact.Kind == "clsact",
			"of %+v the kernel has made %+v and %+v", w, root, clsact)
	}
	own, others, err := l.Filters(t.Context(), conn, Ingress, Egress)
	expect.That(t, err == nil && others == 0, "%d other filters, %v", others, err)
	if last := own[len(own)-1]; last.Kind != "u32" || !last.MatchAll || last.Redirect != lo || last.Protocol != unix.ETH_P_ALL {
		t.Errorf("the filter is read as %+v", last)
	}
	seen := map[netlink.HeaderType]int{}
	for _, d := range rec.Received() {
		for _, m := range nltest.Split(d) {
			name := map[netlink.HeaderType]string{unix.RTM_NEWQDISC: "FuzzQdisc", unix.RTM_NEWTFILTER: "FuzzFilter"}[m.Header.Type]
			if name == "" {
				continue
			}
			if seen[m.Header.Type]++; golden.Updates() {
				nstest.SaveCorpus(t, name, "kernel"+string(rune('0'+seen[m.Header.Type])), m.Data)
			}
		}
	}
	expect.Equal(t, len(seen), 2, "replies by type: %v, want two types", seen)
}

// reply is a message's body as the kernel would write it.
func reply(t *testing.T, options func(*netlink.AttributeEncoder)) []byte {
	t.Helper()
	m := must.Of(nl.Encode(unix.RTM_NEWQDISC, 0, Device{Index: 7}.header(Handle, Root, 0), options)).Get(t)
	return m.Data
}

// Every cut of a real reply is refused or read, and never read beyond its end.
func TestCutRepliesAreErrors(t *testing.T) {
	t.Parallel()
	body := reply(t, Bucket{Rate: 5e9, Burst: 25e6, Limit: 75e6}.encode)
	var q Qdisc
	err := q.Decode(body)
	must.That(t, err == nil && q.Rate == 5e9 && q.Limit == 75e6 && q.Ours(), "the whole is read as %+v, %v", q, err)
	for n := range body {
		// A cut between attributes leaves a message that is whole.
		expect.That(t, q.Decode(body[:n]) != nil || n == sizeofTCMsg || n == sizeofTCMsg+8,
			"%d of %d bytes are read as %+v", n, len(body), q)
	}
	for name, attr := range map[string]uint16{"short parameters": tbfParms, "short rate": tbfRate64} {
		body := reply(t, func(ae *netlink.AttributeEncoder) {
			options(ae, "tbf", func(ae *netlink.AttributeEncoder) { ae.Uint32(attr, 1) })
		})
		expect.Failure(t, q.Decode(body), "%s: read as %+v", name, q)
	}
}
