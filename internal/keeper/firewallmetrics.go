package keeper

import (
	"fmt"
	"strings"
)

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

// writeFirewall writes what is known of the firewall. It holds m.mu.
func (m *metrics) writeFirewall(b *strings.Builder) {
	contested := 0
	if m.firewallContested {
		contested = 1
	}
	b.WriteString("# HELP tombolo_firewall_contested 1 if another program undoes again and again what pods need of the firewall; STATUS names it.\n# TYPE tombolo_firewall_contested gauge\n")
	fmt.Fprintf(b, "tombolo_firewall_contested %d\n", contested)
	b.WriteString("# HELP tombolo_firewall_obstacles Firewalls that stop pods and are out of reach, or left to their owners; STATUS names them.\n# TYPE tombolo_firewall_obstacles gauge\n")
	fmt.Fprintf(b, "tombolo_firewall_obstacles %d\n", m.firewallObstacles)
	writeCounters(b, []counter{
		{"tombolo_firewall_looks_total", "Looks at the firewall, after changes and once in a while.", m.firewallLooks},
		{"tombolo_firewall_mends_total", "Times that it was put right after somebody had changed it.", m.firewallMends},
		{"tombolo_firewall_contests_total", "Times that this began to happen again and again.", m.firewallContests},
		{"tombolo_firewall_errors_total", "Things that went wrong with it; the log says what.", m.firewallErrors},
	})
}
