package link

import (
	"errors"
	"io/fs"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/nl"
	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
)

// Between the last use of a namespace and the deletion of its links the kernel shows that these will go. That may
// be too short for a process that has to wait for the kernel's lock on links.
func TestALinkLosesItsOtherEndWithTheNamespaceOfThat(t *testing.T) {
	t.Parallel()
	host := nstest.New(t)
	conn := must.Of(nl.Dial(unix.NETLINK_ROUTE, host)).Get(t)
	defer conn.Close()
	for begin := time.Now(); time.Since(begin) < time.Minute; {
		pod := nstest.New(t)
		nstest.Veth(t, host, "port", pod, "eth0")
		for _, link := range []string{"port", "lo"} {
			expect.Of(LosesOtherEnd(conn, link)).Is(t, false, "%s, while the namespace is in use", link)
		}
		pod.Close()
		if showsThatItGoes(t, conn, "port") {
			return
		}
	}
	t.Error("each time the link went, and nothing showed that it would")
}

// showsThatItGoes looks at a link until it is gone.
func showsThatItGoes(t *testing.T, conn *nl.Conn, name string) (known bool) {
	t.Helper()
	for begin := time.Now(); time.Since(begin) < time.Minute; {
		goes, err := LosesOtherEnd(conn, name)
		if errors.Is(err, fs.ErrNotExist) {
			return known
		}
		must.That(t, err == nil && (!known || goes), "%t after %t, %v", goes, known, err)
		known = goes
	}
	t.Fatal("the link stays")
	return false
}
