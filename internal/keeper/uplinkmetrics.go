package keeper

import (
	"github.com/prometheus/client_golang/prometheus"

	"github.com/tombolo-cni/tombolo/bridge/uplink"
)

// uplinksAre tells how many uplinks are in each state.
func (m *metrics) uplinksAre(states map[uplink.State]int) {
	m.mu.Lock()
	m.uplinks = states
	m.mu.Unlock()
}

// collectUplinks is part of Collect.
func (m *metrics) collectUplinks(to sink) {
	for _, s := range []uplink.State{uplink.Taking, uplink.Taken, uplink.Restoring, uplink.Undoing} {
		to.gauge("tombolo_uplinks", "NICs that are taken over, or on the way, by state.", float64(m.uplinks[s]), prometheus.Labels{"state": string(s)})
	}
	to.counter("tombolo_uplink_mends_total", "Takeovers put right after somebody had undone part of them.", m.uplinkMends)
	to.counter("tombolo_uplink_finished_total", "Takeovers and returns finished that were cut short.", m.uplinksFinished)
	to.counter("tombolo_uplink_errors_total", "Things that went wrong with uplinks; the log says what.", m.uplinkErrors)
}
