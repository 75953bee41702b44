package keeper

import (
	"fmt"
	"strings"

	"github.com/tombolo-cni/tombolo/bridge/uplink"
)

// uplinksAre tells how many uplinks are in each state.
func (m *metrics) uplinksAre(states map[uplink.State]int) {
	m.mu.Lock()
	m.uplinks = states
	m.mu.Unlock()
}

// writeUplinks writes what is known of uplinks. It holds m.mu.
func (m *metrics) writeUplinks(b *strings.Builder) {
	b.WriteString("# HELP tombolo_uplinks NICs that are taken over, or on the way, by state.\n# TYPE tombolo_uplinks gauge\n")
	for _, s := range []uplink.State{uplink.Taking, uplink.Taken, uplink.Restoring, uplink.Undoing} {
		fmt.Fprintf(b, "tombolo_uplinks{state=%q} %d\n", s, m.uplinks[s])
	}
	writeCounters(b, []counter{
		{"tombolo_uplink_mends_total", "Takeovers put right after somebody had undone part of them.", m.uplinkMends},
		{"tombolo_uplink_finished_total", "Takeovers and returns finished that were cut short.", m.uplinksFinished},
		{"tombolo_uplink_errors_total", "Things that went wrong with uplinks; the log says what.", m.uplinkErrors},
	})
}
