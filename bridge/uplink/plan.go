package uplink

import (
	"fmt"
	"net"
	"net/netip"
	"slices"
	"sort"
	"strings"

	"github.com/tombolo-cni/tombolo/addr"
	"github.com/tombolo-cni/tombolo/internal/link"
	"github.com/tombolo-cni/tombolo/internal/nl"
)

// StepName names a step.
type StepName string

// The steps of a takeover, in their order.
const (
	// StepBridge makes the bridge and gives it the NIC's parameters.
	StepBridge StepName = "bridge"
	// StepAddresses adds addresses and rules where they go to.
	StepAddresses StepName = "addresses"
	// StepPort copies the neighbours, and makes the NIC a port, or no longer.
	StepPort StepName = "port"
	// StepRoutes moves routes.
	StepRoutes StepName = "routes"
	// StepVerify waits until what was reachable is reachable again.
	StepVerify StepName = "verify"
	// StepRelease deletes the addresses and rules where they came from.
	StepRelease StepName = "release"
	// StepSettle sets what was not to be strict meanwhile, or takes the bridge away.
	StepSettle StepName = "settle"
)

// takeSteps is the order of a takeover.
func takeSteps() []StepName {
	return []StepName{StepBridge, StepAddresses, StepPort, StepRoutes, StepVerify, StepRelease, StepSettle}
}

// restoreSteps is the order in which a NIC is given back. What goes by the NIC is
// delivered through the bridge as long as it is a port; so it stops being one when
// nothing goes by the bridge any more.
func restoreSteps() []StepName {
	return []StepName{StepBridge, StepAddresses, StepRoutes, StepPort, StepRelease, StepSettle}
}

// Steps is a plan: what is to be done in which order, and what the operator has to
// know beforehand. Each step ends before the next begins, and can be repeated.
type Steps struct {
	List []Step
	// Moves are the addresses that are moved, those of the link itself aside.
	Moves []netip.Addr
	// Warnings are about what goes on after the steps, but otherwise than before.
	Warnings []string
}

// Step is one step.
type Step struct {
	Name StepName
	// Do is what is done, in words, in the order in which it is done.
	Do []string

	ops []operation
}

// String tells all of it, a line for each thing that is done.
func (s *Steps) String() string {
	var b strings.Builder
	if s == nil {
		return ""
	}
	for i, step := range s.List {
		fmt.Fprintf(&b, "%d. %s\n", i+1, step.Name)
		for _, what := range step.Do {
			fmt.Fprintf(&b, "   %s\n", what)
		}
	}
	for _, w := range s.Warnings {
		fmt.Fprintf(&b, "warning: %s\n", w)
	}
	return b.String()
}

// step gives the operations of a step.
func (s *Steps) step(name StepName) []operation {
	i := slices.IndexFunc(s.List, func(step Step) bool { return step.Name == name })
	if i < 0 {
		return nil
	}
	return s.List[i].ops
}

func (s *Steps) add(name StepName, words []string, ops ...[]operation) {
	step := Step{Name: name, Do: words, ops: slices.Concat(ops...)}
	for _, op := range step.ops {
		if op.text != "" {
			step.Do = append(step.Do, op.text)
		}
	}
	s.List = append(s.List, step)
}

// noLink stands for the index of a bridge that is not there yet.
const noLink = -1

// Plan says how a NIC is taken over, from what a Snapshot found. It is pure. The
// error matches ErrRefused where it must not be, and names every reason.
func Plan(s *Snapshot, u Uplink) (*Steps, error) {
	if err := u.validate(); err != nil {
		return nil, err
	}
	if s == nil {
		return nil, missing("snapshot")
	}
	if err := s.refuse(&u); err != nil {
		return nil, fmt.Errorf("take over %s: %w", u.NIC, err)
	}
	steps := planTake(s, &u, s.Bridge == nil)
	steps.Warnings = s.warn(&u)
	return steps, nil
}

func (u *Uplink) validate() error {
	switch {
	case !isLinkName(u.NIC):
		return fmt.Errorf("take over a NIC: %w: its name is %q", ErrInvalid, u.NIC)
	case !isLinkName(u.Bridge) || u.Bridge == u.NIC:
		return fmt.Errorf("take over %s: %w: the bridge's name is %q", u.NIC, ErrInvalid, u.Bridge)
	case u.Timeout < 0:
		return fmt.Errorf("take over %s: %w: a timeout of %s", u.NIC, ErrInvalid, u.Timeout)
	}
	return nil
}

// planTake is Plan without refusals, for a takeover that is half done too; made says
// that the bridge is of our making.
func planTake(s *Snapshot, u *Uplink, made bool) *Steps {
	bridge := Link{Index: noLink, Name: u.Bridge}
	first := fmt.Sprintf("make bridge %s with MAC %s and MTU %d, and set it up", u.Bridge, s.NIC.MAC, s.NIC.MTU)
	if s.Bridge != nil {
		bridge = *s.Bridge
		first = fmt.Sprintf("use bridge %s", u.Bridge)
		if s.Bridge.MAC != s.NIC.MAC {
			first = fmt.Sprintf("use bridge %s, and give it MAC %s", u.Bridge, s.NIC.MAC)
		}
	}
	m := newMove(s, s.NIC, bridge)
	var steps Steps
	for _, a := range inOrder(m.addresses()) {
		if ip := a.Prefix.Addr(); !ip.IsLinkLocalUnicast() {
			steps.Moves = append(steps.Moves, ip)
		}
	}
	copied := s.copied(u.Bridge)
	words := []string{first}
	if len(copied) > 0 {
		words = append(words, fmt.Sprintf("give %s the kernel parameters of %s", u.Bridge, u.NIC))
	}
	for _, p := range s.told(copied, u.Bridge) {
		words = append(words, p.String())
	}
	steps.add(StepBridge, words, unsaid(set(copied...)), set(s.loose(u.Bridge)...))
	steps.add(StepAddresses, nil, m.addAddresses(), m.addRules())
	steps.add(StepPort, nil, m.copyNeighbours(), m.enslave())
	steps.add(StepRoutes, nil, m.moveRoutes())
	steps.add(StepVerify, verifyWords(m, u))
	if u.KeepAddress {
		steps.add(StepRelease, nil, m.restoreAddressFlags(), m.keepAddresses(), m.delRules(), m.delNeighbours())
	} else {
		steps.add(StepRelease, nil, m.restoreAddressFlags(), m.delAddresses(), m.delRules(), m.delNeighbours())
	}
	steps.add(StepSettle, nil, set(s.strict(u.Bridge, made)...))
	return &steps
}

// unsaid are operations that were told of otherwise.
func unsaid(ops []operation) []operation {
	for i := range ops {
		ops[i].text = ""
	}
	return ops
}

// enslave makes the NIC a port, unless it is one.
func (m *move) enslave() []operation {
	if m.from.Master == m.to.Index {
		return nil
	}
	return []operation{{
		text:    fmt.Sprintf("make %s a port of %s", m.from.Name, m.to.Name),
		request: func(b *nl.Batch) { setMaster(b, m.from, &m.to.Index) },
	}}
}

// loose are parameters for the time in which packets come in by the bridge and
// their answers still go by the NIC: a strict check of the source would drop them,
// and a filter would leave an ARP request unanswered.
func (s *Snapshot) loose(bridge string) []setting {
	list := []setting{
		{conf4 + bridge + "/rp_filter", "2"},
		{conf4 + bridge + "/arp_filter", "0"},
	}
	if asked := s.of(conf6, s.NIC.Name, "accept_ra"); asked != "" && s.hasIPv6() {
		list = append(list, setting{conf6 + bridge + "/accept_ra", s.acceptRA(asked)})
	}
	return s.changed(list)
}

// strict are the same, as the NIC has them, and what would have had no effect
// before.
func (s *Snapshot) strict(bridge string, made bool) []setting {
	var list []setting
	for _, name := range []string{"rp_filter", "arp_filter"} {
		if value := s.of(conf4, s.NIC.Name, name); value != "" {
			list = append(list, setting{conf4 + bridge + "/" + name, value})
		}
	}
	if value, set := s.mtu6(s.NIC.Name, s.NIC.MTU); set && s.hasIPv6() {
		list = append(list, setting{conf6 + bridge + "/mtu", value})
	}
	if made && s.of(conf6, s.NIC.Name, "addr_gen_mode") == "0" && s.hasLinkLocal() {
		// A new bridge makes no link-local address of its own; but should it ever be set
		// down and up, it is to come by this one again.
		list = append(list, setting{conf6 + bridge + "/addr_gen_mode", "0"})
	}
	return list
}

// changed leaves out what is so already, as far as that is known.
func (s *Snapshot) changed(list []setting) []setting {
	return slices.DeleteFunc(list, func(p setting) bool { return s.Settings[p.path] == p.value })
}

func (s *Snapshot) hasIPv6() bool {
	return s.of(conf6, s.NIC.Name, "disable_ipv6") == "0" && s.NIC.MTU >= 1280
}

func (s *Snapshot) hasLinkLocal() bool {
	return slices.ContainsFunc(s.Addresses, func(a addr.Address) bool {
		return a.Link == s.NIC.Index && isLinkLocal6(a)
	})
}

func isLinkLocal6(a addr.Address) bool {
	return a.Prefix.Addr().Is6() && a.Prefix.Addr().IsLinkLocalUnicast()
}

// keepAddresses leaves the NIC what agents look for. Nothing renews it there, so it
// is to stay until it is taken away; and it is not to bring its route back.
func (m *move) keepAddresses() []operation {
	var ops []operation
	for _, a := range slices.Backward(m.addresses()) {
		if a.Prefix.Addr().IsLinkLocalUnicast() {
			ops = append(ops, operation{text: "delete " + m.words(a), request: put("delete address", &a, a.DelMessage), done: gone})
			continue
		}
		n := a
		n.Valid, n.Preferred = nil, nil
		if a.Prefix.Addr().Is6() {
			n.Flags |= addr.NoPrefixRoute
		}
		if n.Flags == a.Flags && a.Valid == nil {
			continue
		}
		ops = append(ops, operation{text: "keep " + m.words(n), request: put("replace address", &n, n.ReplaceMessage)})
	}
	return ops
}

func verifyWords(m *move, u *Uplink) []string {
	var list []string
	for _, g := range m.gateways() {
		list = append(list, fmt.Sprintf("if %s answers through %s now, wait up to %s until it does through %s; else undo all of it",
			g, m.from.Name, u.timeout(), m.to.Name))
	}
	return list
}

// PlanRestore says how a NIC is given back, from a Snapshot of now and the record
// of its takeover. It is pure. What the bridge has now goes to the NIC, whether or
// not it came from there, but for what the bridge had before.
func PlanRestore(s *Snapshot, rec *Record) (*Steps, error) {
	if err := rec.validate(); err != nil {
		return nil, err
	}
	if s == nil {
		return nil, missing("snapshot")
	}
	if s.Bridge == nil {
		rec = rec.withoutReplaced(s)
	}
	return planRestore(s, rec), nil
}

func planRestore(s *Snapshot, rec *Record) *Steps {
	if s.Bridge == nil {
		s = s.withLost(rec, noLink, true)
		s.Bridge = &Link{Index: noLink, Name: rec.Bridge}
	}
	m := backMove(s, rec)
	var steps Steps
	steps.add(StepBridge, nil, set(s.looseBack(rec)...))
	steps.add(StepAddresses, nil, m.addAddresses(), m.addRules(), m.copyNeighbours())
	steps.add(StepRoutes, nil, m.moveRoutes())
	steps.add(StepPort, nil, m.release())
	steps.add(StepRelease, nil, m.restoreAddressFlags(), m.delAddresses(), m.delRules(), m.delNeighbours())
	steps.add(StepSettle, settleWords(s, rec), m.removeBridge(rec), m.macBack(rec), set(s.settingsBack(rec)...))
	return &steps
}

// backMove is the move from the bridge, which is there, to the NIC.
func backMove(s *Snapshot, rec *Record) *move {
	m := newMove(s, *s.Bridge, s.NIC)
	if !rec.MadeBridge {
		m.stays = rec.Before.onlyOf(s.Bridge.Index)
	}
	// A link-local address that the NIC had not is one that the bridge made itself.
	for _, a := range s.Addresses {
		if a.Link == m.from.Index && isLinkLocal6(a) && rec.Before.address(rec.Before.NIC.Index, a) == nil {
			m.stays.Addresses = append(m.stays.Addresses, a)
		}
	}
	return m
}

// release makes the NIC no port, unless it is none of this bridge's.
func (m *move) release() []operation {
	if m.to.Master == 0 || m.to.Master != m.from.Index {
		return nil
	}
	return []operation{{
		text:    fmt.Sprintf("make %s no port of %s any more", m.to.Name, m.from.Name),
		request: func(b *nl.Batch) { setMaster(b, m.to, new(0)) },
	}}
}

// looseBack is loose for the way back: routes go by the NIC while packets still come
// in by the bridge.
func (s *Snapshot) looseBack(rec *Record) []setting {
	var list []setting
	if s.Bridge.Index != noLink {
		list = append(list, setting{conf4 + rec.Bridge + "/rp_filter", "2"}, setting{conf4 + rec.Bridge + "/arp_filter", "0"})
	}
	if asked := rec.Before.of(conf6, rec.NIC, "accept_ra"); asked == "1" && s.acceptsRA(rec.Bridge) {
		list = append(list, setting{conf6 + rec.NIC + "/accept_ra", s.acceptRA(asked)})
	}
	return s.changed(list)
}

// goes says that the bridge is deleted.
func (rec *Record) goes(s *Snapshot) bool {
	return rec.MadeBridge && s.Bridge != nil && s.Bridge.Index != noLink && len(s.otherPorts()) == 0
}

func (m *move) removeBridge(rec *Record) []operation {
	if !rec.goes(m.s) {
		return nil
	}
	return []operation{{
		text:    "delete bridge " + m.from.Name,
		done:    gone,
		request: func(b *nl.Batch) { link.Request{Index: m.from.Index}.Delete(b, m.from.Name) },
	}}
}

// macBack gives a bridge that was there before its MAC again, unless others have come
// to know it by this one.
func (m *move) macBack(rec *Record) []operation {
	if rec.MadeBridge || m.from.Index == noLink || len(m.s.otherPorts()) > 0 || rec.Before.Bridge == nil || rec.Before.Bridge.MAC == m.from.MAC {
		return nil
	}
	mac, err := net.ParseMAC(rec.Before.Bridge.MAC)
	if err != nil {
		return nil
	}
	return []operation{{
		text: fmt.Sprintf("give %s its MAC %s again", m.from.Name, mac),
		request: func(b *nl.Batch) {
			link.Request{Index: m.from.Index, MAC: mac}.Set(b, "set MAC of", m.from.Name)
		},
	}}
}

func settleWords(s *Snapshot, rec *Record) []string {
	if rec.goes(s) || s.Bridge.Index == noLink {
		return nil
	}
	why := "it was there before"
	if ports := s.otherPorts(); rec.MadeBridge && len(ports) > 0 {
		why = fmt.Sprintf("%s is a port of it", ports[0])
		if len(ports) > 1 {
			why = fmt.Sprintf("it has %d other ports, of which %s is one", len(ports), ports[0])
		}
	}
	return []string{fmt.Sprintf("leave bridge %s: %s", rec.Bridge, why)}
}

// otherPorts names the bridge's ports but the NIC.
func (s *Snapshot) otherPorts() []string {
	var list []string
	for _, l := range s.Links {
		if s.Bridge != nil && l.Master == s.Bridge.Index && l.Index != s.NIC.Index {
			list = append(list, l.Name)
		}
	}
	return list
}

// settingsBack are the parameters of a bridge that was there before.
func (s *Snapshot) settingsBack(rec *Record) []setting {
	if rec.MadeBridge || s.Bridge.Index == noLink {
		return nil
	}
	var list []setting
	for path, value := range rec.Before.Settings {
		_, ours := renamed(path, rec.Bridge, rec.Bridge)
		loosened := ours && (name(path) == "rp_filter" || name(path) == "arp_filter")
		written := ours && name(path) != "mtu" && (!notCopied(path) || name(path) == "accept_ra")
		if loosened || written && s.Settings[path] != value {
			list = append(list, setting{path, value})
		}
	}
	sort.Slice(list, func(i, j int) bool { return list[i].path < list[j].path })
	return list
}
