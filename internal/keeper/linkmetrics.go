package keeper

// drifted counts what was found changed by others.
func (m *metrics) drifted(n int) {
	m.mu.Lock()
	m.driftFound += uint64(n)
	m.mu.Unlock()
}

// mended counts what of it was put right.
func (m *metrics) mended(n int) {
	m.mu.Lock()
	m.driftMended += uint64(n)
	m.mu.Unlock()
}

func (m *metrics) linksAreContested(yes bool) {
	m.mu.Lock()
	m.linksContested = yes
	m.mu.Unlock()
}

// collectLinks is part of Collect.
func (m *metrics) collectLinks(to sink) {
	to.gauge("tombolo_links_contested", "1 if another program changes again and again links, addresses or routes that pods need; the log says which.", truth(m.linksContested), nil)
	to.counter("tombolo_links_looks_total", "Looks at links, addresses and routes, after changes and once in a while.", m.linkLooks)
	to.counter("tombolo_links_errors_total", "Things that went wrong with them; the log says what.", m.linkErrors)
	to.counter("tombolo_drift_found_total", "Links, addresses, routes and settings of them that were found not as pods need them.", m.driftFound)
	to.counter("tombolo_drift_mended_total", "Those of them that were put right.", m.driftMended)
}
