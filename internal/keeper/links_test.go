package keeper

import (
	"context"
	"encoding/binary"
	"maps"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/lease"
	"github.com/tombolo-cni/tombolo/internal/nl"
	"github.com/tombolo-cni/tombolo/internal/nl/nltest"
	"github.com/tombolo-cni/tombolo/internal/state"
)

// Indexes of links.
const (
	pods  = 7 // a bridge of pods
	pods2 = 6 // that of other pods
	other = 8 // a bridge that is no network's
	port  = 9 // of a pod that comes
	// seenPort was there before the keeper.
	seenPort = 10
)

// bench is a node's links, which a test changes. Everything happens in a bubble of its own time.
type bench struct {
	t         *testing.T
	keep      *Keeper
	turn      sync.Mutex // has it: the test, or the keeper
	announced chan any   // []netlink.Message or error
	ports     []int
	lacking   map[string][]string // by network
	lasting   []string            // what repairing does not help against
	looks     []time.Duration
	repairs   map[string][]time.Duration // of each network
	start     time.Time
}

func (b *bench) Look(context.Context) (*Seen, error) {
	b.turn.Lock()
	defer b.turn.Unlock()
	b.looks = append(b.looks, time.Since(b.start))
	lacking := maps.Clone(b.lacking)
	if all := append(slices.Clone(b.lasting), b.lacking["pods"]...); len(all) > 0 {
		lacking["pods"] = all
	}
	return &Seen{Bridges: []int{pods, pods2}, Ports: b.ports, Lacking: lacking}, nil
}

func (b *bench) Repair(_ context.Context, networks []string) error {
	b.turn.Lock()
	defer b.turn.Unlock()
	for _, name := range networks {
		b.repairs[name] = append(b.repairs[name], time.Since(b.start))
		delete(b.lacking, name)
	}
	return nil
}

func (b *bench) Next() ([]netlink.Message, error) {
	switch x := (<-b.announced).(type) {
	case []netlink.Message:
		return x, nil
	case error:
		return nil, x
	}
	return nil, os.ErrClosed
}

func (b *bench) Close() error { close(b.announced); return nil }

func (b *bench) after(d time.Duration) { pass(d, &b.turn) }

// pass lets time pass in a bubble. That its clock has an order for what the test and the keeper do
// is unknown to the race detector, which knows the lock.
func pass(d time.Duration, l sync.Locker) {
	func() {
		l.Lock()
		defer l.Unlock()
	}()
	time.Sleep(d)
	synctest.Wait()
}

func (b *bench) tell(m ...netlink.Message) { b.announced <- m }

func (b *bench) wantLooks(want ...time.Duration) {
	b.t.Helper()
	if !slices.Equal(b.looks, want) {
		b.t.Errorf("looked at %v, want %v", b.looks, want)
	}
	b.looks = nil
}

// onBench runs a test whose keeper has looked once, and found all right.
func onBench(t *testing.T, test func(t *testing.T, b *bench)) {
	t.Helper()
	t.Parallel()
	leases, err := lease.Open(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	dir, err := state.Open(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	synctest.Test(t, func(t *testing.T) {
		b := &bench{t: t, announced: make(chan any), ports: []int{seenPort}, start: time.Now(), lacking: map[string][]string{}, repairs: map[string][]time.Duration{}}
		b.keep, err = New(&Config{Leases: leases, State: dir, Links: b})
		if err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan struct{})
		go func() {
			defer close(ended)
			b.keep.newLinkage(ctx, b, func() (source, error) { return b, nil }).run()
		}()
		synctest.Wait()
		b.wantLooks(0)
		test(t, b)
		cancel()
		<-ended
	})
}

// linkIs is struct ifinfomsg and what follows of a link.
func linkIs(typ uint16, family byte, index int, up bool, master int, kind, alias string) netlink.Message {
	head := make([]byte, unix.SizeofIfInfomsg)
	head[0] = family
	binary.NativeEndian.PutUint32(head[4:], uint32(index))
	if up {
		binary.NativeEndian.PutUint32(head[8:], unix.IFF_UP)
	}
	return nltest.Message(typ, nltest.Body(head, func(ae *netlink.AttributeEncoder) {
		ae.String(unix.IFLA_IFNAME, "some")
		if master != 0 {
			ae.Uint32(unix.IFLA_MASTER, uint32(master))
		}
		if alias != "" {
			ae.String(unix.IFLA_IFALIAS, alias)
		}
		if kind != "" {
			ae.Nested(unix.IFLA_LINKINFO, func(nae *netlink.AttributeEncoder) error {
				nae.String(unix.IFLA_INFO_KIND, kind)
				return nil
			})
		}
	}))
}

func bridgeIs(index int, up bool) netlink.Message {
	return linkIs(unix.RTM_NEWLINK, 0, index, up, 0, "bridge", "")
}

func portIs(typ uint16, master int) netlink.Message {
	return linkIs(typ, 0, port, true, master, "veth", "tombolo:1:0123456789a:pods")
}

func lostAddress(index int) netlink.Message {
	body := make([]byte, unix.SizeofIfAddrmsg)
	binary.NativeEndian.PutUint32(body[4:], uint32(index))
	return nltest.Message(unix.RTM_DELADDR, body)
}

func lostRoute(index uint32) netlink.Message {
	return nltest.Message(unix.RTM_DELROUTE, nltest.Body(make([]byte, unix.SizeofRtMsg), func(ae *netlink.AttributeEncoder) {
		ae.Uint32(unix.RTA_OIF, index)
	}))
}

const ms = time.Millisecond

func TestChangesOfLinksAreLookedAt(t *testing.T) {
	const soon, later = pauseNews, pauseOwn
	for _, tc := range []struct {
		name   string
		before []netlink.Message // heard, and looked at
		tell   any
		after  time.Duration // 0: it is not looked at
	}{
		{"an address of a bridge goes", nil, []netlink.Message{lostAddress(pods)}, soon},
		{"an address of another link goes", nil, []netlink.Message{lostAddress(other)}, 0},
		{"a route by a bridge goes", nil, []netlink.Message{lostRoute(pods)}, soon},
		{"a route by another link goes", nil, []netlink.Message{lostRoute(other)}, 0},
		{"a route without a link goes", nil, []netlink.Message{lostRoute(0)}, 0},
		{"a bridge goes", nil, []netlink.Message{linkIs(unix.RTM_DELLINK, 0, pods, false, 0, "bridge", "")}, soon},
		{"another bridge goes", nil, []netlink.Message{linkIs(unix.RTM_DELLINK, 0, other, false, 0, "bridge", "")}, later},
		{"a bridge is first heard of", nil, []netlink.Message{bridgeIs(pods, false)}, later},
		{"a bridge is set down", []netlink.Message{bridgeIs(pods, true)}, []netlink.Message{bridgeIs(pods, false)}, soon},
		{"a bridge has not changed", []netlink.Message{bridgeIs(pods, true)}, []netlink.Message{bridgeIs(pods, true)}, 0},
		{"a pod comes", nil, []netlink.Message{portIs(unix.RTM_NEWLINK, 0), portIs(unix.RTM_NEWLINK, pods)}, later},
		{"a pod goes", []netlink.Message{portIs(unix.RTM_NEWLINK, pods)}, []netlink.Message{portIs(unix.RTM_DELLINK, 0)}, later},
		{"a port is taken off its bridge", []netlink.Message{portIs(unix.RTM_NEWLINK, pods)}, []netlink.Message{portIs(unix.RTM_NEWLINK, 0)}, soon},
		{"a port's flags change", []netlink.Message{portIs(unix.RTM_NEWLINK, pods)}, []netlink.Message{linkIs(unix.RTM_NEWLINK, unix.AF_BRIDGE, port, true, pods, "", "")}, later},
		{"the flags of a port from before the keeper change", nil, []netlink.Message{linkIs(unix.RTM_NEWLINK, unix.AF_BRIDGE, seenPort, true, pods, "", "")}, later},
		{"a port from before the keeper is taken off", nil, []netlink.Message{linkIs(unix.RTM_NEWLINK, 0, seenPort, true, 0, "veth", "tombolo:1:0123456789a:pods")}, soon},
		{"another port's flags change", nil, []netlink.Message{linkIs(unix.RTM_NEWLINK, unix.AF_BRIDGE, port, true, other, "", "")}, 0},
		{"somebody's link", nil, []netlink.Message{linkIs(unix.RTM_NEWLINK, 0, 20, true, 0, "dummy", "")}, 0},
		{"news are lost", nil, unix.ENOBUFS, soon},
		{"a datagram does not parse", nil, nl.ErrMalformed, soon},
		{"a link does not parse", nil, []netlink.Message{nltest.Message(unix.RTM_NEWLINK, []byte{1})}, soon},
		{"an address does not parse", nil, []netlink.Message{nltest.Message(unix.RTM_DELADDR, []byte{1})}, soon},
		{"a route does not parse", nil, []netlink.Message{nltest.Message(unix.RTM_DELROUTE, []byte{1})}, soon},
	} {
		t.Run(tc.name, func(t *testing.T) {
			onBench(t, func(_ *testing.T, b *bench) {
				if tc.before != nil {
					b.ports = append(b.ports, port)
					b.tell(tc.before...)
					b.after(4 * time.Second)
					b.looks = nil
				}
				begin := time.Since(b.start)
				b.announced <- tc.tell
				b.after(4 * time.Second)
				if tc.after == 0 {
					b.wantLooks()
				} else {
					b.wantLooks(begin + tc.after)
				}
			})
		})
	}
}

func TestLinksAreLookedAtThoughABurstDoesNotEnd(t *testing.T) {
	onBench(t, func(t *testing.T, b *bench) {
		for range 30 {
			b.tell(lostAddress(pods))
			b.after(100 * ms)
		}
		if len(b.looks) < 3 || len(b.looks) > 5 {
			t.Errorf("looked at %v", b.looks)
		}
		b.looks = nil
		for range 100 {
			b.tell(portIs(unix.RTM_NEWLINK, 0))
			b.after(100 * ms)
		}
		if len(b.looks) < 2 || len(b.looks) > 4 {
			t.Errorf("looked at %v for pods that come and go", b.looks)
		}
	})
}

func TestLinksAreLookedAtOnceInAWhile(t *testing.T) {
	onBench(t, func(_ *testing.T, b *bench) {
		b.after(121 * time.Second)
		b.wantLooks(60*time.Second, 120*time.Second)
	})
}

func TestLinksThatAreChangedAgainAndAgainAreLeftAloneForAMinute(t *testing.T) {
	onBench(t, func(t *testing.T, b *bench) {
		for range 6 {
			b.lacking["pods"] = []string{"the address"}
			b.tell(lostAddress(pods))
			b.after(2 * time.Second)
		}
		if len(b.repairs["pods"]) != 3 || !b.keep.metrics.linksContested {
			t.Fatalf("put right at %v, contested %v", b.repairs, b.keep.metrics.linksContested)
		}
		b.after(70 * time.Second)
		if len(b.repairs["pods"]) != 4 {
			t.Errorf("put right at %v", b.repairs)
		}
		b.after(125 * time.Second)
		text := exposition(t, &b.keep.metrics)
		for _, line := range []string{"tombolo_drift_found_total 4", "tombolo_drift_mended_total 4", "tombolo_links_contested 0", "tombolo_links_errors_total 0"} {
			if !strings.Contains(text, line+"\n") {
				t.Errorf("no %s in\n%s", line, text)
			}
		}
	})
}

// TestAFightOverOneNetworkDelaysNoOther has one program undo the repairs of a network all the
// time, while somebody harms another now and then.
func TestAFightOverOneNetworkDelaysNoOther(t *testing.T) {
	onBench(t, func(t *testing.T, b *bench) {
		for i := range 300 { // ten minutes
			b.lacking["pods"] = []string{"the address"}
			b.tell(lostAddress(pods))
			if i%20 == 10 { // every 40 s
				b.lacking["others"] = []string{"the route"}
				b.tell(lostRoute(pods2))
				b.after(urgeAgain + ms)
				if len(b.lacking["others"]) > 0 {
					t.Errorf("after %v the other network lacks %q", time.Since(b.start), b.lacking["others"])
				}
			}
			b.after(2 * time.Second)
		}
		fought, other := b.repairs["pods"], b.repairs["others"]
		if len(other) != 15 || len(fought) < 8 || len(fought) > 14 {
			t.Errorf("put right at %v, and the other one at %v", fought, other)
		}
		for i := 3; i < len(fought); i++ {
			if gap := fought[i] - fought[i-1]; gap < contestedFor {
				t.Errorf("put right %v after it was before", gap)
			}
		}
		if !b.keep.metrics.linksContested {
			t.Error("it is not contested")
		}
		delete(b.lacking, "pods")
		b.after(3 * time.Minute)
		if b.keep.metrics.linksContested {
			t.Error("it is contested though nobody fights any more")
		}
		// The same harm as before is put right at once again.
		b.lacking["pods"] = []string{"the address"}
		b.tell(lostAddress(pods))
		b.after(time.Second)
		if len(b.lacking) > 0 {
			t.Errorf("lacking %q", b.lacking)
		}
	})
}

// Otherwise it would be repaired every minute, and each pod's rules be written anew.
func TestWhatRepairingDoesNotHelpAgainstIsToldOnce(t *testing.T) {
	onBench(t, func(t *testing.T, b *bench) {
		b.lasting = []string{"the module is missing"}
		b.after(10 * time.Minute)
		if len(b.repairs["pods"]) != 1 || b.keep.metrics.linksContested {
			t.Errorf("put right at %v, contested %v", b.repairs, b.keep.metrics.linksContested)
		}
		// What comes on top is put right.
		b.lacking["pods"] = []string{"the address"}
		b.tell(lostAddress(pods))
		b.after(time.Second)
		if len(b.repairs["pods"]) != 2 || len(b.lacking) > 0 {
			t.Errorf("put right at %v, lacking %q", b.repairs, b.lacking)
		}
		if found, mended := b.keep.metrics.driftFound, b.keep.metrics.driftMended; found != 3 || mended != 1 {
			t.Errorf("found %d, mended %d", found, mended)
		}
	})
}
