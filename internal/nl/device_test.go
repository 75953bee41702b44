package nl_test

import (
	"os"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nltest"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
)

// where is the namespace and the thread that it is called on.
func where(t *testing.T) (namespace string, thread int) {
	t.Helper()
	namespace, err := os.Readlink("/proc/thread-self/ns/net")
	must.Succeed(t, err)
	return namespace, unix.Gettid()
}

func TestWithinRunsInTheSocketsNamespace(t *testing.T) {
	t.Parallel()
	ns := nstest.New(t)
	c := dial(t, ns)
	var want, got string
	err := ns.Do(func() error {
		var outer, inner int
		want, outer = where(t)
		err := c.Within(func() error {
			got, inner = where(t)
			return nil
		})
		expect.Equal(t, inner, outer, "a thread that is there already was left")
		return err
	})
	expect.That(t, err == nil && got == want, "from within: %s, %v, want %s", got, err, want)
	got = ""
	if err := c.Within(func() error { got, _ = where(t); return nil }); err != nil || got != want {
		t.Errorf("from outside: %s, %v, want %s", got, err, want)
	}
	own, _ := where(t)
	expect.That(t, own != want, "the caller was left in the namespace")
}

func TestATransportThatIsNoSocketTellsNoIndex(t *testing.T) {
	t.Parallel()
	index, known, err := fake(nltest.AckAll).LinkIndex("lo")
	expect.That(t, index == 0 && !known && err == nil, "of a fake: %d, %t, %v", index, known, err)
	index, known, err = dial(t, nstest.New(t)).LinkIndex("lo")
	expect.That(t, index == 1 && known && err == nil, "of a socket: %d, %t, %v, want 1", index, known, err)
}
