package main

import (
	"bytes"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"strings"
)

// row is a line of README's table: a figure of Tombolo's beside those of others.
type row struct {
	what     string
	scenario string
	ours     string // the contender
	verb     string // ADD or DEL, as the ratios are called
	unit     string
	floor    string // the contender that does the kernel's work alone
	theirs   string // the one that does the same
}

func rows() []row {
	const chain = "chain-nftables"
	return []row{
		{"ADD, one IPv4 pod", "ipv4", "tombolo", "ADD", "ns/op", "floor", "reference"},
		{"the same beside kindnet's way", "ipv4", "tombolo", "ADD", "ns/op", "", "kindnet"},
		{"DEL of the same", "ipv4", "tombolo", "DEL", "DEL-ns", "floor", "reference"},
		{"ADD, dual-stack with masquerade", "dual", "tombolo", "ADD", "ns/op", "floor", "reference"},
		{"ADD, that with a host port, firewall and bandwidth", "everything", "tombolo", "ADD", "ns/op", "floor", chain},
		{"DEL of the same", "everything", "tombolo", "DEL", "DEL-ns", "floor", chain},
		{"ADD of the same, with 200 such pods there", "everything-beside-200", "tombolo", "ADD", "ns/op", "floor", chain},
		{"ADD, one IPv4 pod, with 900 there", "ipv4-beside-900", "tombolo", "ADD", "ns/op", "floor", ""},
		{"ADD and DEL of 80 pods, eight at once", "crowd", "tombolo", "ADD", "ns/op", "floor", "reference"},
		{"ADD by DHCP, dnsmasq", "dhcp", "tombolo", "ADD", "ns/op", "", "reference"},
		{"Attach, in process", "ipv4", "attach", "ADD", "ns/op", "kernel", ""},
	}
}

// summary is README's table, of what there is a figure of.
func (r *results) summary() string {
	var b strings.Builder
	b.WriteString("| what | Tombolo | floor | reference | over the floor | over the reference |\n|---|---|---|---|---|---|\n")
	for _, row := range rows() {
		name := compared(row.scenario, row.ours)
		value, ok := r.get(name, row.unit)
		_, beside := r.get(compared(row.scenario, row.theirs), row.unit)
		if !ok || row.floor == "" && !beside {
			continue
		}
		figure := func(contender string) string {
			v, ok := r.get(compared(row.scenario, contender), row.unit)
			if !ok || contender == "" {
				return "–"
			}
			return duration(v)
		}
		over := func(contender string) string {
			if contender == "" {
				return "–"
			}
			return r.ratio(name, row.verb+"/"+contender, false)
		}
		fmt.Fprintf(&b, "| %s | %s | %s | %s | %s | %s |\n", row.what, duration(value), figure(row.floor), figure(row.theirs), over(row.floor), over(row.theirs))
	}
	r.sizes(&b)
	return b.String()
}

// sizes are the lines of the table that are no times.
func (r *results) sizes(b *strings.Builder) {
	line := func(what, ours, theirs, unit string) {
		v, ok := r.get(ours, unit)
		w, beside := r.get(theirs, unit)
		switch {
		case ok && beside:
			fmt.Fprintf(b, "| %s | %.1f MiB | – | %.1f MiB | – | %s × |\n", what, v, w, digits(v/w))
		case ok:
			fmt.Fprintf(b, "| %s | %.1f MiB | – | – | – | – |\n", what, v)
		}
	}
	line("peak memory of one ADD", compared("ipv4", "tombolo"), compared("ipv4", "reference"), "peak-MiB")
	leases := "Leases/keeper=tombolo"
	pods, _ := r.get(leases, "leases")
	line(fmt.Sprintf("memory of the keeper of %.0f leases", pods), leases, "Leases/keeper=reference", "memory-MiB")
}

// ratio writes a ratio, with its interval where that is wanted and known.
func (r *results) ratio(name, unit string, interval bool) string {
	v, ok := r.get(name, unit)
	if !ok {
		return "–"
	}
	text := digits(v) + " ×"
	if low, ok := r.get(name, unit+":low"); ok && interval {
		high, _ := r.get(name, unit+":high")
		text += fmt.Sprintf(" (%s to %s)", digits(low), digits(high))
	}
	return text
}

// duration writes nanoseconds.
func duration(ns float64) string {
	switch {
	case ns >= 1e9:
		return digits(ns/1e9) + " s"
	case ns >= 1e6:
		return digits(ns/1e6) + " ms"
	}
	return digits(ns/1e3) + " µs"
}

// digits writes three significant digits below 100, and no fraction above.
func digits(x float64) string {
	if math.IsNaN(x) {
		return "–"
	}
	places := 3
	for limit := 1.0; limit <= 100 && x >= limit; limit *= 10 {
		places--
	}
	return fmt.Sprintf("%.*f", places, x)
}

// Between these marks README.md has the table.
const (
	tableBegins = "<!-- make bench-report writes this table -->\n"
	tableEnds   = "<!-- the table ends -->\n"
)

// write writes the page, its plots, and README's table.
func (r *results) write(root string) error {
	plots, err := r.draw(filepath.Join(root, "docs", "benchmarks"))
	if err != nil {
		return err
	}
	if err := os.WriteFile(filepath.Join(root, "docs", "benchmarks.md"), []byte(r.page(plots)), 0o644); err != nil {
		return err
	}
	path := filepath.Join(root, "README.md")
	text, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	before, rest, begins := bytes.Cut(text, []byte(tableBegins))
	_, after, ends := bytes.Cut(rest, []byte(tableEnds))
	if !begins || !ends {
		return fmt.Errorf("%s lacks the marks %q and %q", path, tableBegins, tableEnds)
	}
	return os.WriteFile(path, []byte(string(before)+tableBegins+r.summary()+tableEnds+string(after)), 0o644)
}

// page is docs/benchmarks.md.
func (r *results) page(plots []drawn) string {
	var b strings.Builder
	b.WriteString("# Benchmarks\n\n`make bench-report` has written this page and its plots; nothing in it is typed by hand.\n" +
		"[bench/README.md](../bench/README.md) says what the contenders are and how they are measured.\n" +
		"Read the ratios: the times hold for one machine on one day. Every pod of every figure was\nproven to work, and to leave nothing when it went.\n\n## Where\n\n| | |\n|---|---|\n")
	for _, key := range []string{"date", "tombolo", "reference", "kernel", "cpu", "cpus", "goarch", "go", "nft", "iptables", "dnsmasq"} {
		if value := r.config[key]; value != "" {
			fmt.Fprintf(&b, "| %s | %s |\n", key, value)
		}
	}
	b.WriteString("\n## In short\n\n" + r.summary())
	for _, p := range plots {
		fmt.Fprintf(&b, "\n![%s](benchmarks/%s)\n", p.title, p.file)
	}
	r.scenarios(&b)
	r.singles(&b)
	return b.String()
}

// scenarios writes a table for each comparison.
func (r *results) scenarios(b *strings.Builder) {
	last := ""
	for _, name := range r.under("Compare/scenario=") {
		scenario, contender, _ := strings.Cut(name, "/contender=")
		if scenario != last {
			fmt.Fprintf(b, "\n## Beside others: %s\n\n| contender | ADD, median | 95 %% | DEL | CPU of ADD and DEL | peak | ratios (95 %% interval) |\n|---|---|---|---|---|---|---|\n", scenario)
			last = scenario
		}
		full := compared(scenario, contender)
		figure := func(unit string) string {
			if v, ok := r.get(full, unit); ok {
				return duration(v)
			}
			return "–"
		}
		cpu, peak := "–", "–"
		if add, ok := r.get(full, "ADD-cpu-ns"); ok {
			del, _ := r.get(full, "DEL-cpu-ns")
			cpu = duration(add + del)
		}
		if mib, ok := r.get(full, "peak-MiB"); ok {
			peak = fmt.Sprintf("%.1f MiB", mib)
		}
		fmt.Fprintf(b, "| %s | %s | %s | %s | %s | %s | %s |\n", contender, figure("ns/op"), figure("p95-ns/op"), figure("DEL-ns"), cpu, peak, r.ratios(full))
	}
}

// ratios lists those of a contender, in one cell.
func (r *results) ratios(name string) string {
	var list []string
	for _, unit := range []string{"growth", "ADD/go-limit", "ADD/kernel", "ADD/floor", "ADD/reference", "ADD/kindnet", "ADD/chain-iptables", "ADD/chain-nftables",
		"ADD-at-0/chain-iptables", "ADD-at-0/chain-nftables", "DEL/kernel", "DEL/floor", "DEL/reference", "DEL/kindnet", "DEL/chain-iptables", "DEL/chain-nftables"} {
		if _, ok := r.get(name, unit); ok {
			list = append(list, unit+" "+r.ratio(name, unit, true))
		}
	}
	return strings.Join(list, "; ")
}

// singles writes what is measured of Tombolo alone.
func (r *results) singles(b *strings.Builder) {
	b.WriteString("\n## Alone\n\n| benchmark | median | 95 % | allocations | bytes | |\n|---|---|---|---|---|---|\n")
	usual := map[string]bool{"ns/op": true, "p95-ns/op": true, "allocs/op": true, "B/op": true}
	for _, name := range r.names {
		if strings.HasPrefix(name, "Compare/") {
			continue
		}
		cell := func(unit string, write func(float64) string) string {
			if v, ok := r.get(name, unit); ok {
				return write(v)
			}
			return "–"
		}
		var more []string
		for _, unit := range []string{"first-ns", "first-growth", "growth", "restore-ns", "memory-MiB", "threads", "descriptors", "leases"} {
			if v, ok := r.get(name, unit); ok && !usual[unit] {
				text := digits(v)
				if strings.HasSuffix(unit, "-ns") {
					text = duration(v)
				}
				more = append(more, unit+" "+text)
			}
		}
		fmt.Fprintf(b, "| %s | %s | %s | %s | %s | %s |\n", name, cell("ns/op", duration), cell("p95-ns/op", duration), cell("allocs/op", digits), cell("B/op", digits), strings.Join(more, ", "))
	}
}
