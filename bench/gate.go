package main

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
)

// gate is a limit on one of tombolo's figures, or on its ratio to another
// contender's: "add/floor<=2.7", "growth<=1.6", "dual:add/reference<=0.45".
type gate struct {
	text     string
	scenario string // empty: the first that has the figure
	of       string // tombolo, or tombolo by another name
	metric   string
	over     string // the other contender, empty for none
	limit    float64
}

// verdict is a gate after the run.
type verdict struct {
	Gate  string  `json:"gate"`
	Value float64 `json:"value"`
	Holds bool    `json:"holds"`
	Why   string  `json:"why,omitempty"` // it could not be judged
}

// String gives the line that is printed.
func (v verdict) String() string {
	switch {
	case v.Why != "":
		return fmt.Sprintf("gate %s: cannot be judged: %s", v.Gate, v.Why)
	case v.Holds:
		return fmt.Sprintf("gate %s: holds with %s", v.Gate, digits(v.Value))
	}
	return fmt.Sprintf("gate %s: broken by %s", v.Gate, digits(v.Value))
}

// parseGates reads a comma-separated list, which may be empty.
func parseGates(list string) ([]gate, error) {
	if list == "" {
		return nil, nil
	}
	var gates []gate
	for _, text := range strings.Split(list, ",") {
		g, err := parseGate(strings.TrimSpace(text))
		if err != nil {
			return nil, err
		}
		gates = append(gates, g)
	}
	return gates, nil
}

func parseGate(text string) (gate, error) {
	g := gate{text: text, of: tombolo}
	figure, limit, ok := strings.Cut(text, "<=")
	if !ok {
		return g, fmt.Errorf("gate %q: want [SCENARIO:][tombolo-udp:]FIGURE[/CONTENDER]<=NUMBER", text)
	}
	var err error
	if g.limit, err = strconv.ParseFloat(limit, 64); err != nil {
		return g, fmt.Errorf("gate %q: %w", text, err)
	}
	for prefix, rest, ok := strings.Cut(figure, ":"); ok; prefix, rest, ok = strings.Cut(figure, ":") {
		if figure = rest; ours(prefix) {
			g.of = prefix
		} else {
			g.scenario = prefix
		}
	}
	g.metric, g.over, _ = strings.Cut(figure, "/")
	if g.over != "" && (ours(g.over) || !slices.Contains(contenders(), g.over)) {
		return g, fmt.Errorf("gate %q: no contender %q to compare with: want one of %v", text, g.over, contenders())
	}
	return g, nil
}

// judge compares a gate with the figures. What was not measured is not held: a
// gate that nobody can judge must not pass for a good one.
func (g gate) judge(r *report) verdict {
	v := verdict{Gate: g.text}
	ours := g.figure(r)
	if ours == nil {
		v.Why = "no such figure of " + g.of + " was measured"
		return v
	}
	v.Value = median(ours.values)
	if g.over != "" {
		other := r.find(ours.scenario, ours.metric, g.over)
		if other == nil {
			v.Why = "no such figure of " + g.over + " was measured"
			return v
		}
		v.Value = ratioOf(ours.values, other.values).Value
	}
	v.Holds = v.Value <= g.limit
	return v
}

func (g gate) figure(r *report) *series {
	for _, s := range r.series {
		if s.contender == g.of && s.metric == g.metric && (g.scenario == "" || g.scenario == s.scenario) {
			return s
		}
	}
	return nil
}
