package cni

import (
	"os"
	"strings"
	"sync"
	"testing"

	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
)

// TestTombolodTakesNoPodsForAnotherProgram has pods come and go, sixty at once, while tombolod looks at links as often
// as it does at all. TOMBOLO_LONG has them do so forty times.
func TestTombolodTakesNoPodsForAnotherProgram(t *testing.T) {
	t.Parallel()
	rounds := 3
	if os.Getenv("TOMBOLO_LONG") != "" {
		rounds = 40
	}
	n := newNode(t)
	w := n.podnet(conf{"guard": true}) // a DEL shuts such a port before it deletes it
	w.add(n.pod("stays"))
	m := n.mind(t)
	stop := m.keepLooking()
	looks := m.metric("links_looks_total")
	pods := n.pods(60)
	for range rounds {
		atOnce(pods, func(p *pod) { expect.Success(t, expect.Err(w.tryAdd(p)), "ADD of %s", p.id) })
		atOnce(pods, func(p *pod) { expect.Success(t, w.tryDel(p), "DEL of %s", p.id) })
	}
	stop()
	t.Logf("%d looks", m.metric("links_looks_total")-looks)
	expect.That(t, m.metric("links_looks_total") != looks, "tombolod did not look: nothing is tested")
	for line := range strings.Lines(readFile(t, m.log)) {
		expect.That(t, !strings.Contains(line, "level=WARN") && !strings.Contains(line, "level=ERROR"), "%v", line)
	}
	if m.metric("drift_found_total") != 0 || m.metric("links_contested") != 0 {
		t.Errorf("%d differences, contested: %d", m.metric("drift_found_total"), m.metric("links_contested"))
	}
}

// keepLooking has the kernel announce again and again that the bridge has lost an address, which is nobody's.
func (m *minder) keepLooking() (stop func()) {
	const nobodys = "192.0.2.1/32"
	done := make(chan struct{})
	var ended sync.WaitGroup
	ended.Go(func() {
		for looks := -1; ; {
			select {
			case <-done:
				return
			default:
			}
			if now := m.metric("links_looks_total"); now != looks {
				looks = now
				m.ip("address add " + nobodys + " dev cbr0")
				m.ip("address delete " + nobodys + " dev cbr0")
			}
		}
	})
	return func() { close(done); ended.Wait() }
}
