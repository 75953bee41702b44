package state

import (
	"errors"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/tombolo-cni/tombolo/internal/file"
	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
)

// enter enters and leaves, and tells the epoch.
func enter(t testing.TB, d *Dir) Epoch {
	t.Helper()
	l, epoch, err := d.Enter(t.Context())
	must.Succeed(t, err)
	expect.Equal(t, l.Mode(), Shared, "the mode of Enter's lock")
	must.Succeed(t, l.Close())
	return epoch
}

func TestEpochLastsAsLongAsTheNodeLives(t *testing.T) {
	t.Parallel()
	const otherBoot = "00000000-1111-2222-3333-444444444444"
	tests := map[string]struct {
		happens func(*node)
		over    bool
	}{
		"nothing":                             {func(*node) {}, false},
		"time passes":                         {func(n *node) { n.uptime += time.Hour }, false},
		"reboot":                              {func(n *node) { n.setBoot(otherBoot) }, true},
		"node's container restarts":           {func(n *node) { n.setInit(2 * time.Hour); n.cookie = 7 }, true},
		"reboot, and long ago":                {func(n *node) { n.setBoot(otherBoot); n.uptime = time.Minute }, true},
		"caller in a pod on the host network": {func(n *node) { n.setInit(2 * time.Hour) }, false},
		"caller in another network namespace": {func(n *node) { n.cookie = 7 }, false},
		"no sight of pid 1":                   {func(n *node) { must.Succeed(n.t, os.Remove(n.dir+"/stat")) }, false},
	}
	for what, test := range tests {
		t.Run(what, func(t *testing.T) {
			t.Parallel()
			d, n := newDirOn(t)
			expect.Is(t, expect.Err(d.Epoch()), os.ErrNotExist, "before the first")
			first := enter(t, d)
			test.happens(n)
			read, err := d.Epoch()
			expect.That(t, read == first && errors.Is(err, ErrStale) == test.over && (err != nil) == test.over,
				"Epoch = %+v, %v; over is %v", read, err, test.over)
			second := enter(t, d)
			expect.That(t, test.over == (second.Token() != first.Token()), "over is %v: %+v after %+v", test.over, second, first)
			expect.Of(d.Epoch()).Is(t, second, "Epoch")
		})
	}
}

func TestEpochStartsWithPid1(t *testing.T) {
	t.Parallel()
	tests := map[string]struct{ pid1, uptime, ago time.Duration }{
		"a machine":        {0, time.Hour, time.Hour},
		"a nested node":    {50 * time.Minute, time.Hour, 10 * time.Minute},
		"the first moment": {0, 0, 0},
	}
	for what, test := range tests {
		d, n := newDirOn(t)
		n.setInit(test.pid1)
		n.uptime = test.uptime
		epoch := enter(t, d)
		got, want := d.Begun(epoch), n.sources().now().Add(-test.ago)
		expect.That(t, got.Sub(want).Abs() <= time.Millisecond, "%s: begun %v, want %v", what, got, want)
		expect.That(t, epoch.Made == test.uptime, "%s: made %v after boot, want %v", what, epoch.Made, test.uptime)
	}
}

// The clock of an epoch's first moment may have been behind.
func TestALifeBeganByTheClockThatIsRightNow(t *testing.T) {
	t.Parallel()
	d, n := newDirOn(t)
	n.setInit(50 * time.Minute)
	n.uptime = time.Hour
	epoch := enter(t, d)
	began := d.Begun(epoch)
	n.uptime += time.Minute
	was := d.sources.now()
	d.sources.now = func() time.Time { return was.Add(24*time.Hour + time.Minute) } // it is set
	got, want := d.Begun(epoch), began.Add(24*time.Hour)
	expect.That(t, got.Equal(want), "begun %v, want %v", got, want)
}

func TestEpochOfANewerVersionIsLeftAlone(t *testing.T) {
	t.Parallel()
	d := newDir(t)
	writeFile(t, d.epochPath(), `{"version":2,"lives":[]}`)
	expect.Is(t, expect.Err(d.Epoch()), ErrVersion, "Epoch")
	l, _, err := d.Enter(t.Context())
	expect.That(t, errors.Is(err, ErrVersion) && l == nil, "Enter: %v, %v, want ErrVersion", l, err)
	expect.Equal(t, mustRead(t, d.epochPath()), `{"version":2,"lives":[]}`, "it is now")
	expect.That(t, lock(t, d, Exclusive).Mode() == Exclusive, "Enter kept the lock")
}

func TestDamagedEpochsAreReplaced(t *testing.T) {
	t.Parallel()
	whole := string(lineOf(t, &Epoch{Boot: "b", ID: "i", Init: 1, Made: 5, NetNS: 1}))
	texts := []string{"null", "{}", `{"version":1}`, `{"version":1,"boot":"b"}`, strings.Repeat("x", file.MaxRecord*2)}
	for i := range len(whole) - 1 {
		texts = append(texts, whole[:i])
	}
	for _, text := range texts {
		d := newDir(t)
		writeFile(t, d.epochPath(), text)
		_, err := d.Epoch()
		expect.That(t, errors.Is(err, ErrDamaged) &&
			strings.Contains(err.Error(), d.epochPath()), "Epoch of %.80q: %v, want ErrDamaged", text, err)
		epoch := enter(t, d)
		expect.Of(d.Epoch()).Is(t, epoch, "after %.80q: Epoch", text)
	}
}

func TestEpochFailsWhereTheNodeCannotBeSeen(t *testing.T) {
	t.Parallel()
	broken := errors.New("broken")
	tests := map[string]func(*Dir, *node){
		"no boot id":    func(_ *Dir, n *node) { os.Remove(n.dir + "/boot_id") },
		"empty boot id": func(_ *Dir, n *node) { n.setBoot("") },
		"odd stat":      func(_ *Dir, n *node) { writeFile(t, n.dir+"/stat", "1 (init) S 0 1") },
		"no cookie": func(d *Dir, _ *node) {
			d.sources.netns = func() (uint64, error) { return 0, broken }
		},
	}
	for what, breaks := range tests {
		d, n := newDirOn(t)
		breaks(d, n)
		l, _, err := d.Enter(t.Context())
		expect.That(t, err != nil && l == nil, "%s: Enter = %v, %v, want an error", what, l, err)
		expect.Is(t, expect.Err(os.Lstat(d.epochPath())), os.ErrNotExist, "%s: there is an epoch all the same", what)
	}
}

func TestEpochsDifferFromEachOther(t *testing.T) {
	t.Parallel()
	seen := make(map[string]bool)
	for range 20 {
		epoch := enter(t, newDir(t)) // of one boot, one pid 1 and one clock
		if seen[epoch.Token()] {
			t.Errorf("%s comes twice", epoch.Token())
		}
		seen[epoch.Token()] = true
	}
}

func TestParseStartFindsField22(t *testing.T) {
	t.Parallel()
	rest := " S 0 1 1 0 -1 4194560 30166 285737 0 148 37 188 452 268 10 -10 13 0 25 43233280"
	tests := map[string]struct {
		stat string
		want time.Duration
		ok   bool
	}{
		"usual":              {"1 (systemd)" + rest, 250 * time.Millisecond, true},
		"spaces in the name": {"1 (my init 1 2 3)" + rest, 250 * time.Millisecond, true},
		"brackets":           {"1 (a) b) S ()" + rest, 250 * time.Millisecond, true},
		"at boot":            {"1 (x)" + strings.Replace(rest, " 25 ", " 0 ", 1), 0, true},
		"no more fields":     {"1 (x)" + strings.TrimSuffix(rest, " 43233280"), 250 * time.Millisecond, true},
		"too few fields":     {"1 (x) S 0 1", 0, false},
		"empty":              {"", 0, false},
		"no number":          {"1 (x)" + strings.Replace(rest, " 25 ", " later ", 1), 0, false},
		"negative":           {"1 (x)" + strings.Replace(rest, " 25 ", " -1 ", 1), 0, false},
		"overflow":           {"1 (x)" + strings.Replace(rest, " 25 ", " 18446744073709551615 ", 1), 0, false},
	}
	for what, test := range tests {
		got, err := parseStart([]byte(test.stat))
		expect.That(t, got == test.want && (err == nil) == test.ok, "%s: %v, %v, want %v", what, got, err, test.want)
	}
}

// The sources of the machine that the test runs on.
func TestHostSources(t *testing.T) {
	t.Parallel()
	s := hostSources()
	expect.Of(s.bootID()).Len(t, len("a59bef75-6922-4ab4-8416-46a500e25de5"), "boot id")
	up := s.uptime()
	start, err := s.initStart()
	expect.That(t, err == nil && start >= 0 && start <= up, "pid 1 started at %v of %v, %v", start, up, err)
	cookie, err := s.netns()
	expect.That(t, err == nil && cookie != 0, "cookie %d, %v", cookie, err)
}

func TestCookieIsTheThreadsNamespaces(t *testing.T) {
	t.Parallel()
	here := must.Of(NetNSCookie()).Get(t)
	inNewNetNS(t, func() {
		there, err := NetNSCookie()
		expect.That(t, err == nil && there != here, "cookie %d in a new namespace and %d outside, %v", there, here, err)
	})
}
