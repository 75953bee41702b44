package keeper

func (m *metrics) firewallIsContested(yes bool) {
	m.mu.Lock()
	m.firewallContested = yes
	m.mu.Unlock()
}

func (m *metrics) firewallObstaclesAre(n int) {
	m.mu.Lock()
	m.firewallObstacles = n
	m.mu.Unlock()
}

// collectFirewall is part of Collect.
func (m *metrics) collectFirewall(to sink) {
	to.gauge("tombolo_firewall_contested", "1 if another program undoes again and again what pods need of the firewall; STATUS names it.", truth(m.firewallContested), nil)
	to.gauge("tombolo_firewall_obstacles", "Firewalls that stop pods and are out of reach, or left to their owners; STATUS names them.", float64(m.firewallObstacles), nil)
	to.counter("tombolo_firewall_looks_total", "Looks at the firewall, after changes and once in a while.", m.firewallLooks)
	to.counter("tombolo_firewall_mends_total", "Times that it was put right after somebody had changed it.", m.firewallMends)
	to.counter("tombolo_firewall_contests_total", "Times that this began to happen again and again.", m.firewallContests)
	to.counter("tombolo_firewall_errors_total", "Things that went wrong with it; the log says what.", m.firewallErrors)
}
