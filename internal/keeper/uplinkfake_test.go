package keeper

import (
	"bytes"
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo"
	"github.com/tombolo-cni/tombolo/bridge/uplink"
	"github.com/tombolo-cni/tombolo/internal/lease"
	"github.com/tombolo-cni/tombolo/internal/nl/nltest"
	"github.com/tombolo-cni/tombolo/internal/state"
)

// site is a host with an uplink that is not there. Time in it is the bubble's. Its NIC
// has a name of its own, since locks are shared by a whole network namespace.
type site struct {
	t       *testing.T
	nic     string
	dir     *state.Dir
	keep    *Keeper
	stop    func()
	log     bytes.Buffer
	changes chan change

	mu           sync.Mutex
	differs      bool                  // what check finds
	journals     bool                  // mend writes before it does anything
	undo         func()                // what happens after a mend
	done         []string              // "mend", in order, and when
	finished     func() *uplink.Record // what Recover leaves
	fails        map[string]error      // by what is done
	index        [2]int                // of NIC and bridge
	feeds        int                   // that were opened
	repairs      int
	noRepairLock bool                                // the NIC's lock is somebody else's while it repairs
	now          func(*uplink.Record) *uplink.Record // what the record would be by now; nil: the same
	source       *fakeSource                         // nil while nobody listens
	began        time.Time
}

// fakeSource announces what a test says.
type fakeSource struct {
	announced chan []netlink.Message
	closed    chan struct{}
	once      sync.Once
}

func (s *fakeSource) Next() ([]netlink.Message, error) {
	select {
	case m := <-s.announced:
		if m == nil {
			return nil, unix.ENOBUFS
		}
		return m, nil
	case <-s.closed:
		return nil, os.ErrClosed
	}
}

func (s *fakeSource) Close() error {
	s.once.Do(func() { close(s.closed) })
	return nil
}

// inSite runs a test in a site with a clock of its own.
func inSite(t *testing.T, test func(*testing.T, *site)) {
	t.Helper()
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		dir, err := state.Open(inMemory(t) + "/state")
		if err != nil {
			t.Fatal(err)
		}
		test(t, &site{
			t: t, dir: dir, nic: fmt.Sprintf("n%08x", rand.Uint32()), changes: make(chan change, 16),
			fails: map[string]error{}, index: [2]int{3, 4}, began: now(),
		})
	})
}

// save writes the uplink's record, as a takeover does.
func (s *site) save(reached uplink.State) {
	s.t.Helper()
	data, err := json.Marshal(s.record(reached))
	if err == nil {
		err = s.dir.Uplink(s.nic).Save(data)
	}
	if err != nil {
		s.t.Fatal(err)
	}
}

func (s *site) record(reached uplink.State) *uplink.Record {
	return &uplink.Record{Version: 1, Uplink: uplink.Uplink{NIC: s.nic, Bridge: "br0"}, State: reached}
}

// raw puts anything in the record's place.
func (s *site) raw(content string) {
	s.t.Helper()
	err := os.MkdirAll(s.dir.UplinksPath(), 0o700)
	if err == nil {
		err = os.WriteFile(s.path(), []byte(content), 0o600)
	}
	if err != nil {
		s.t.Fatal(err)
	}
}

func (s *site) path() string { return s.dir.UplinksPath() + "/" + s.nic + ".json" }

// start runs a keeper of uplinks until the test's end, or stop.
func (s *site) start() {
	s.t.Helper()
	leases, err := lease.Open(s.dir.Path() + "/leases")
	if err != nil {
		s.t.Fatal(err)
	}
	if s.keep, err = New(&Config{Leases: leases, State: s.dir, Log: slog.New(slog.NewTextHandler(&s.log, nil)), Repair: s.repair}); err != nil {
		s.t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	u := s.keep.newUplinks(ctx, s, s.listen)
	done := make(chan struct{})
	go func() {
		defer close(done)
		defer u.closeFeed()
		u.rescan()
		u.loop(s.changes)
	}()
	s.stop = sync.OnceFunc(func() { cancel(); <-done })
	s.t.Cleanup(s.stop)
	synctest.Wait()
}

func (s *site) later(d time.Duration) { pass(d, &s.mu) }

// tell has the keeper hear of the record.
func (s *site) tell() {
	s.changes <- change{s.nic}
	synctest.Wait()
}

func (s *site) listen() (*feed, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := s.fails["listen"]; err != nil {
		return nil, err
	}
	s.feeds++
	s.source = &fakeSource{announced: make(chan []netlink.Message), closed: make(chan struct{})}
	return feedFrom(s.source), nil
}

// announce has the kernel tell something; nil is that it lost something.
func (s *site) announce(m []netlink.Message) {
	s.mu.Lock()
	source := s.source
	s.mu.Unlock()
	source.announced <- m
	synctest.Wait()
}

// listens says whether somebody does.
func (s *site) listens() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.source == nil {
		return false
	}
	select {
	case <-s.source.closed:
		return false
	default:
		return true
	}
}

// did gives what was done, and forgets it.
func (s *site) did() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	list := s.done
	s.done = nil
	return list
}

// wants checks what was done since the last time.
func (s *site) wants(want ...string) {
	s.t.Helper()
	if got := s.did(); !slices.Equal(got, want) {
		s.t.Errorf("done: %q, want %q", got, want)
	}
}

// repair is not among what was done: it is what somebody else does. How often, is counted.
func (s *site) repair(context.Context) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.repairs++
	if s.noRepairLock {
		return s.fails["repair"]
	}
	// A repair takes the NIC's lock.
	l, err := s.dir.TryLockUplink(s.nic)
	if err != nil || l == nil {
		s.t.Errorf("the keeper has the NIC's lock while it has pods put back: %v", err)
		return err
	}
	return errors.Join(s.fails["repair"], l.Close())
}

func (s *site) set(fn func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	fn()
}

func (s *site) note(what string) error {
	s.done = append(s.done, what)
	return s.fails[what]
}

func (s *site) check(context.Context, *uplink.Record) ([]tombolo.Difference, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := s.note("check"); err != nil || !s.differs {
		return nil, err
	}
	return []tombolo.Difference{{Object: "link " + s.nic, What: "master", Want: "br0"}}, nil
}

func (s *site) mend(_ context.Context, rec *uplink.Record, j uplink.Journal) (bool, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.journals {
		next := *rec
		next.Timeout++
		data, err := json.Marshal(next)
		if err := errors.Join(err, j.Save(data)); err != nil {
			s.t.Error(err)
		}
		s.changes <- change{s.nic} // as inotify says
	}
	if err := s.note("mend"); err != nil {
		return false, err
	}
	was := s.differs
	s.differs = false
	if s.undo != nil {
		s.undo()
	}
	return was, nil
}

func (s *site) finish(_ context.Context, rec *uplink.Record, j uplink.Journal) (*uplink.Record, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := s.note("finish " + string(rec.State)); err != nil {
		return nil, err
	}
	if s.finished == nil {
		return nil, j.Remove()
	}
	after := s.finished()
	data, err := json.Marshal(after)
	return after, errors.Join(err, j.Save(data))
}

func (s *site) adopt(context.Context, *uplink.Record) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.note("adopt")
}

func (s *site) disown(_ context.Context, _ string, give func() error) error {
	s.mu.Lock()
	err := s.note("disown")
	s.mu.Unlock()
	if err != nil {
		return err
	}
	return give()
}

func (s *site) links(*uplink.Record) [2]int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.index
}

// link is an announcement of a link.
func linkMessage(typ uint16, index int, name string, master uint32) []netlink.Message {
	header := make([]byte, unix.SizeofIfInfomsg)
	header[4], header[8] = byte(index), unix.IFF_UP
	return []netlink.Message{nltest.Message(typ, nltest.Body(header, func(ae *netlink.AttributeEncoder) {
		ae.String(unix.IFLA_IFNAME, name)
		ae.Uint32(unix.IFLA_MTU, 1500)
		ae.Bytes(unix.IFLA_ADDRESS, []byte{2, 0, 0, 0, 0, 1})
		if master != 0 {
			ae.Uint32(unix.IFLA_MASTER, master)
		}
	}))}
}

// withCarrier has an announcement's link have a carrier.
func withCarrier(m []netlink.Message) []netlink.Message {
	flags := m[0].Data[8:12] // struct ifinfomsg
	binary.NativeEndian.PutUint32(flags, binary.NativeEndian.Uint32(flags)|unix.IFF_LOWER_UP)
	return m
}

// address is an announcement of an address.
func address(index int) []netlink.Message {
	data := make([]byte, unix.SizeofIfAddrmsg)
	data[4] = byte(index)
	return []netlink.Message{nltest.Message(unix.RTM_NEWADDR, data)}
}

func (s *site) logged(text string) bool { return strings.Contains(s.log.String(), text) }
