package tc

import (
	"testing"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/nl"
	"github.com/tombolo-cni/tombolo/internal/nl/nltest"
	"github.com/tombolo-cni/tombolo/internal/nstest"
)

// FuzzQdisc holds that no reply of the kernel, or of what takes itself for it,
// makes the decoder or what works on its result panic. The corpora have replies of
// a real kernel.
func FuzzQdisc(f *testing.F) {
	f.Add([]byte{})
	f.Add(make([]byte, sizeofTCMsg))
	f.Fuzz(func(t *testing.T, b []byte) {
		var q qdisc
		if q.decode(b) != nil {
			return
		}
		_ = q.String()
		s := q.shapes()
		if s.Rate != 0 && !q.ours() {
			t.Errorf("it shapes %+v and is not ours: %+v", s, q)
		}
		q.is(bucket{rate: 1250000, burst: 6250, limit: 18750})
		q.is(bucket{})
	})
}

func FuzzFilter(f *testing.F) {
	f.Add([]byte{})
	f.Add(make([]byte, sizeofTCMsg))
	f.Fuzz(func(t *testing.T, b []byte) {
		var flt filter
		if flt.decode(b) != nil {
			return
		}
		if flt.redirect != 0 && flt.kind != "u32" {
			t.Errorf("a redirect of another kind: %+v", flt)
		}
	})
}

func FuzzLink(f *testing.F) {
	f.Add([]byte{})
	f.Add(make([]byte, unix.SizeofIfInfomsg))
	f.Fuzz(func(t *testing.T, b []byte) {
		var l link
		if l.decode(b) != nil {
			return
		}
		if len(l.name)+len(l.kind)+len(l.alias) > len(b) {
			t.Errorf("more came out than went in: %+v", l)
		}
	})
}

// The seeds of the fuzz targets come from here: -update writes them.
func TestDecodersReadTheKernelsReplies(t *testing.T) {
	t.Parallel()
	ns, pod := nstest.New(t), nstest.New(t)
	nstest.Veth(t, ns, "port", pod, "eth0")
	tr, err := nl.Open(unix.NETLINK_ROUTE, &nl.Config{NetNS: ns})
	if err != nil {
		t.Fatal(err)
	}
	rec := nltest.Record(tr)
	raw := nl.New(rec)
	defer raw.Close()
	conn := On(raw)
	target := Target{Port: "port", IFB: "ifbx", Alias: "mine"}
	for _, rate := range []uint64{10e6, 40e9} {
		s := Shape{Ingress: Limit{Rate: rate}, Egress: Limit{Rate: rate}}
		if _, err := conn.Ensure(t.Context(), target, s); err != nil {
			t.Fatal(err)
		}
		rec.Received()
		if diffs, err := conn.Check(t.Context(), target, s); len(diffs) > 0 || err != nil {
			t.Fatalf("Check finds %v, %v", diffs, err)
		}
	}
	seen := map[uint16]int{}
	for _, d := range rec.Received() {
		for _, m := range nltest.Split(d) {
			if err := decodes(m); err != nil {
				t.Errorf("message of type %d: %v", m.Header.Type, err)
			}
			name := map[uint16]string{unix.RTM_NEWQDISC: "FuzzQdisc", unix.RTM_NEWTFILTER: "FuzzFilter", unix.RTM_NEWLINK: "FuzzLink"}[uint16(m.Header.Type)]
			if name == "" {
				continue
			}
			seen[uint16(m.Header.Type)]++
			if *update {
				nstest.SaveCorpus(t, name, "kernel"+string(rune('0'+seen[uint16(m.Header.Type)])), m.Data)
			}
		}
	}
	if len(seen) != 3 {
		t.Errorf("replies by type: %v, want three types", seen)
	}
}

func decodes(m nl.Message) error {
	switch m.Header.Type {
	case unix.RTM_NEWQDISC:
		return new(qdisc).decode(m.Data)
	case unix.RTM_NEWTFILTER:
		return new(filter).decode(m.Data)
	case unix.RTM_NEWLINK:
		return new(link).decode(m.Data)
	}
	return nil
}

// Every cut of a real reply is refused or read, and never read beyond its end.
func TestCutRepliesAreErrors(t *testing.T) {
	t.Parallel()
	body := nltest.Encode(func(e *nl.Encoder) {
		tcMsg(e, 7, ownHandle, parentRoot, 0)
		e.String(tcaKind, "tbf")
		e.Nest(tcaOptions, bucket{rate: 5e9, burst: 25e6, limit: 75e6}.encode)
	})
	var q qdisc
	if err := q.decode(body); err != nil || q.rate != 5e9 || q.limit != 75e6 || !q.ours() {
		t.Fatalf("the whole is read as %+v, %v", q, err)
	}
	for n := range body {
		// A cut between attributes leaves a message that is whole.
		if err := q.decode(body[:n]); err == nil && n != sizeofTCMsg && n != sizeofTCMsg+8 {
			t.Errorf("%d of %d bytes are read as %+v", n, len(body), q)
		}
	}
	for name, options := range map[string]func(*nl.Encoder){
		"short parameters": func(e *nl.Encoder) { e.Uint32(tbfParms, 1) },
		"short rate":       func(e *nl.Encoder) { e.Uint32(tbfRate64, 1) },
	} {
		body := nltest.Encode(func(e *nl.Encoder) {
			tcMsg(e, 7, ownHandle, parentRoot, 0)
			e.String(tcaKind, "tbf")
			e.Nest(tcaOptions, options)
		})
		if err := q.decode(body); err == nil {
			t.Errorf("%s: read as %+v", name, q)
		}
	}
}
