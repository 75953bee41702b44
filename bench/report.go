package main

import (
	"cmp"
	"encoding/json"
	"fmt"
	"io"
	"math"
	"runtime"
	"slices"
	"strings"

	"golang.org/x/sys/unix"
)

// report collects the figures of a run.
type report struct {
	series  []*series
	proofs  []string
	notes   []string
	skipped []string
}

// times is the unit of what is a ratio itself.
const times = "x"

// series is one figure of one contender, a value a round.
type series struct {
	scenario, metric, contender, unit string
	values                            []float64
}

func (r *report) find(scenario, metric, contender string) *series {
	for _, s := range r.series {
		if s.scenario == scenario && s.metric == metric && s.contender == contender {
			return s
		}
	}
	return nil
}

func (r *report) add(scenario, metric, contender, unit string, value float64) {
	s := r.find(scenario, metric, contender)
	if s == nil {
		s = &series{scenario: scenario, metric: metric, contender: contender, unit: unit}
		r.series = append(r.series, s)
	}
	s.values = append(s.values, value)
}

func (r *report) prove(format string, args ...any) {
	r.proofs = append(r.proofs, fmt.Sprintf(format, args...))
}

// note says what a reader of the figures has to know.
func (r *report) note(format string, args ...any) {
	r.notes = append(r.notes, fmt.Sprintf(format, args...))
}

// skip notes what was not measured and why, once.
func (r *report) skip(format string, args ...any) {
	if reason := fmt.Sprintf(format, args...); !slices.Contains(r.skipped, reason) {
		r.skipped = append(r.skipped, reason)
	}
}

// ratio is one contender's figure over another's.
type ratio struct {
	Scenario string   `json:"scenario"`
	Metric   string   `json:"metric"`
	Over     string   `json:"over"`  // "tombolo/floor"
	Ratio    interval `json:"ratio"` // of the medians
}

// comparisons are the pairs of contenders whose ratios are reported: tombolo with the
// others first, then the reference with floor.
func comparisons() [][2]string {
	return [][2]string{
		{tombolo, floor}, {tombolo, reference}, {tombolo, chainIPTables}, {tombolo, chainNFTables},
		{tomboloUDP, reference},
		{reference, floor},
	}
}

// ratios compares what was measured in rounds.
func (r *report) ratios() []ratio {
	var all []ratio
	for _, pair := range comparisons() {
		for _, s := range r.series {
			if s.contender != pair[0] || s.unit == times {
				continue
			}
			if other := r.find(s.scenario, s.metric, pair[1]); other != nil {
				all = append(all, ratio{s.scenario, s.metric, pair[0] + "/" + pair[1], ratioOf(s.values, other.values)})
			}
		}
	}
	return all
}

// summary is a series in the JSON report.
type summary struct {
	Scenario  string  `json:"scenario"`
	Metric    string  `json:"metric"`
	Contender string  `json:"contender"`
	Unit      string  `json:"unit"`
	Rounds    int     `json:"rounds"`
	Median    float64 `json:"median"`
	P95       float64 `json:"p95"`
	Min       float64 `json:"min"`
	Max       float64 `json:"max"`
}

func (s *series) summary() summary {
	return summary{
		s.scenario, s.metric, s.contender, s.unit, len(s.values),
		median(s.values), quantile(s.values, 0.95), slices.Min(s.values), slices.Max(s.values),
	}
}

func (r *report) writeJSON(w io.Writer, verdicts []verdict) error {
	document := struct {
		Machine string    `json:"machine"`
		Figures []summary `json:"figures"`
		Ratios  []ratio   `json:"ratios"`
		Proofs  []string  `json:"proofs"`
		Notes   []string  `json:"notes,omitempty"`
		Skipped []string  `json:"skipped"`
		Gates   []verdict `json:"gates"`
	}{Machine: machine(), Ratios: r.ratios(), Proofs: r.proofs, Notes: r.notes, Skipped: r.skipped, Gates: verdicts}
	for _, s := range r.series {
		document.Figures = append(document.Figures, s.summary())
	}
	encoder := json.NewEncoder(w)
	encoder.SetIndent("", "  ")
	return encoder.Encode(document)
}

// writeText prints a table of figures and one of ratios for each scenario.
func (r *report) writeText(w io.Writer, scenarios []scenario) error {
	var b strings.Builder
	fmt.Fprintln(&b, machine())
	for _, s := range scenarios {
		r.writeScenario(&b, s)
	}
	for _, list := range []struct {
		title string
		lines []string
	}{{"Proven", r.proofs}, {"Notes", r.notes}, {"Skipped", r.skipped}} {
		if len(list.lines) > 0 {
			fmt.Fprintf(&b, "\n%s:\n  %s\n", list.title, strings.Join(list.lines, "\n  "))
		}
	}
	_, err := io.WriteString(w, b.String())
	return err
}

func (r *report) writeScenario(b *strings.Builder, s scenario) {
	fmt.Fprintf(b, "\n%s: %s\n", s.name, s.text)
	fmt.Fprintf(b, "  %-16s %-22s %8s %8s %8s %8s %5s\n", "figure", "contender", "median", "p95", "min", "max", "n")
	for _, f := range r.byMetric(s.name) {
		m := f.summary()
		fmt.Fprintf(b, "  %-16s %-22s %8s %8s %8s %8s %5d\n", m.Metric+" "+m.Unit, m.Contender,
			digits(m.Median), digits(m.P95), digits(m.Min), digits(m.Max), m.Rounds)
	}
	title := fmt.Sprintf("\n  %-16s %-22s %8s   %s\n", "figure", "ratio of medians", "", "95 % interval")
	for _, x := range r.ratios() {
		if x.Scenario == s.name {
			fmt.Fprintf(b, "%s  %-16s %-22s %8s   %s to %s\n", title, x.Metric, x.Over,
				digits(x.Ratio.Value), digits(x.Ratio.Low), digits(x.Ratio.High))
			title = ""
		}
	}
}

// byMetric gives a scenario's series, those of one metric together: the metrics in
// the order of the measurement, the contenders in that of the report.
func (r *report) byMetric(scenario string) []*series {
	var metrics []string
	var all []*series
	for _, s := range r.series {
		if s.scenario == scenario {
			metrics = append(metrics, s.metric)
			all = append(all, s)
		}
	}
	order := contenders()
	slices.SortStableFunc(all, func(a, b *series) int {
		return cmp.Or(
			cmp.Compare(slices.Index(metrics, a.metric), slices.Index(metrics, b.metric)),
			cmp.Compare(slices.Index(order, a.contender), slices.Index(order, b.contender)))
	})
	return all
}

// digits prints three significant digits of a figure below 100 and no fraction above.
func digits(x float64) string {
	switch {
	case math.IsNaN(x):
		return "-"
	case x >= 100:
		return fmt.Sprintf("%.0f", x)
	case x >= 10:
		return fmt.Sprintf("%.1f", x)
	case x >= 1:
		return fmt.Sprintf("%.2f", x)
	}
	return fmt.Sprintf("%.3f", x)
}

// machine names what the absolute figures hold for.
func machine() string {
	var name unix.Utsname
	kernel := "unknown"
	if unix.Uname(&name) == nil {
		kernel = unix.ByteSliceToString(name.Release[:])
	}
	return fmt.Sprintf("Linux %s, %s, %d CPUs, %s", kernel, runtime.GOARCH, runtime.NumCPU(), runtime.Version())
}
