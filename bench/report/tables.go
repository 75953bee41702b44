package main

import (
	"bytes"
	"fmt"
	"maps"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
)

// row is a figure of Tombolo's beside those of others.
type row struct {
	what     string
	inReadme bool
	scenario string
	ours     string // the contender
	verb     string // ADD or DEL, as the ratios are called
	unit     string
	floor    string // the contender that does the kernel's work alone
	theirs   string // the one that does the same
}

func rows() []row {
	const chain = "chain-nftables"
	list := []row{
		{"ADD, one IPv4 pod", true, "ipv4", "tombolo", "ADD", "ns/op", "floor", "reference"},
		{"the same beside kindnet's way", false, "ipv4", "tombolo", "ADD", "ns/op", "", "kindnet"},
		{"the same beside kindnet's own plugin", true, "ipv4", "tombolo", "ADD", "ns/op", "", "cni-kindnet"},
		{"DEL of the same", false, "ipv4", "tombolo", "DEL", "DEL-ns", "floor", "reference"},
		{"ADD, dual-stack with masquerade", false, "dual", "tombolo", "ADD", "ns/op", "floor", "reference"},
		{"ADD, dual-stack, masquerade, host port, firewall, limits", true, "everything", "tombolo", "ADD", "ns/op", "floor", chain},
		{"DEL of the same", false, "everything", "tombolo", "DEL", "DEL-ns", "floor", chain},
		{"ADD of the same by the reference's names, in four calls", false, "everything", "names", "ADD", "ns/op", "", chain},
		{"ADD of the same, with 200 such pods there", true, "everything-beside-200", "tombolo", "ADD", "ns/op", "floor", chain},
		{"ADD, one IPv4 pod, with 900 there", false, "ipv4-beside-900", "tombolo", "ADD", "ns/op", "floor", ""},
		{"ADD and DEL of 80 pods, eight at once", false, "crowd", "tombolo", "ADD", "ns/op", "floor", "reference"},
		{"ADD by DHCP, dnsmasq", true, "dhcp", "tombolo", "ADD", "ns/op", "", "reference"},
		{"Attach, in process", false, "ipv4", "attach", "ADD", "ns/op", "kernel", ""},
	}
	for _, ports := range []string{"1", "200", "10000"} {
		list = append(list, row{"docker run -p, " + ports + " ports, beside Docker's bridge", false,
			"docker-ports-" + ports, "tombolo", "ADD", "ns/op", "", "docker"})
	}
	return list
}

// summary is a table of what there is a figure of: all of it, or what README.md has.
func (r *results) summary(forReadme bool) string {
	var b strings.Builder
	b.WriteString("| what | Tombolo | floor | reference | times the floor | times the reference |\n|---|---|---|---|---|---|\n")
	for _, row := range rows() {
		name := compared(row.scenario, row.ours)
		_, ok := r.get(name, row.unit)
		_, beside := r.get(compared(row.scenario, row.theirs), row.unit)
		if !ok || row.floor == "" && !beside && row.theirs != "docker" || forReadme && !row.inReadme {
			continue
		}
		figure := func(contender string) string { return r.figure(compared(row.scenario, contender), row.unit) }
		over := func(contender string) string { return r.ratio(name, row.verb+"/"+contender) }
		fmt.Fprintf(&b, "| %s | %s | %s | %s | %s | %s |\n", row.what, r.figure(name, row.unit), figure(row.floor), figure(row.theirs), over(row.floor), over(row.theirs))
	}
	r.sizes(&b)
	return b.String()
}

// ratio writes a ratio with its 95 % interval.
func (r *results) ratio(name, unit string) string {
	text := r.figure(name, unit)
	if _, ok := r.get(name, unit+":low"); ok {
		text += fmt.Sprintf(" (%s–%s)", r.figure(name, unit+":low"), r.figure(name, unit+":high"))
	}
	return text
}

// lan is a table of the traffic of a pod on the host's LAN, beside hosts whose NIC is a bridge's port or macvlan's.
func (r *results) lan() string {
	var b strings.Builder
	for _, path := range []string{"pod-to-lan", "lan-to-pod", "host-to-pod", "pod-to-host"} {
		scenario := "lan-traffic/path=" + path
		name := compared(scenario, "tombolo")
		for _, row := range []struct{ what, verb, unit string }{{"MiB by TCP", "stream", "MiB-ns"}, {"round trip", "trip", "ns/op"}} {
			if _, ok := r.get(name, row.unit); ok {
				fmt.Fprintf(&b, "| %s | %s | %s | %s | %s | %s |\n", path, row.what, r.figure(name, row.unit),
					r.figure(compared(scenario, "bridge"), row.unit), r.ratio(name, row.verb+"/bridge"), r.ratio(name, row.verb+"/macvlan"))
			}
		}
	}
	if b.Len() == 0 {
		return ""
	}
	return "\n## On a LAN\n\n| path | what | Tombolo | bridge | times the bridge | times macvlan |\n|---|---|---|---|---|---|\n" + b.String()
}

// sizes are the lines of the table that are no times.
func (r *results) sizes(b *strings.Builder) {
	line := func(what, ours, theirs, unit string) {
		v, ok := r.get(ours, unit)
		w, beside := r.get(theirs, unit)
		switch {
		case ok && beside:
			fmt.Fprintf(b, "| %s | %.1f MiB | – | %.1f MiB | – | %s |\n", what, v, w, digits(v/w))
		case ok:
			fmt.Fprintf(b, "| %s | %.1f MiB | – | – | – | – |\n", what, v)
		}
	}
	line("peak memory of one ADD", compared("ipv4", "tombolo"), compared("ipv4", "reference"), "peak-MiB")
	leases := compared("leases", "tombolo")
	pods, _ := r.get(leases, "leases")
	line(fmt.Sprintf("memory of the keeper of %.0f leases", pods), leases, compared("leases", "reference"), "memory-MiB")
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

// Between these marks README.md has its table, a plot, and the link to the page.
const (
	tableBegins = "<!-- make bench-report writes this table -->\n"
	tableEnds   = "<!-- the table ends -->\n"
	readmePlot  = "add-ipv4.svg"
)

// readme is what README.md has between the marks.
func (r *results) readme(plots []drawn) string {
	text := r.summary(true) + "\n"
	if i := slices.IndexFunc(plots, func(p drawn) bool { return p.file == readmePlot }); i >= 0 {
		text += fmt.Sprintf("![%s](docs/benchmarks/%s)\n\n", plots[i].title, readmePlot)
	}
	return text + "All figures and plots: [docs/benchmarks.md](docs/benchmarks.md).\n"
}

// write writes the page, its plots and tables, and README's part.
func (r *results) write(root string) error {
	plots, err := r.draw(filepath.Join(root, "docs", "benchmarks"))
	if err != nil {
		return err
	}
	if err := os.WriteFile(filepath.Join(root, "docs", "benchmarks.md"), []byte(r.page(plots)), 0o644); err != nil {
		return err
	}
	if err := os.WriteFile(filepath.Join(root, "docs", "benchmarks", "tables.md"), []byte(r.tables()), 0o644); err != nil {
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
	return os.WriteFile(path, []byte(string(before)+tableBegins+r.readme(plots)+tableEnds+string(after)), 0o644)
}

// page is docs/benchmarks.md.
func (r *results) page(plots []drawn) string {
	var b strings.Builder
	b.WriteString("# Benchmarks\n\n`make bench-report` has written this page. [bench/README.md](../bench/README.md) describes contenders and method.\n" +
		"Times hold for one machine on one day: read the ratios, with their 95 % intervals. Every pod was\nproven to work, and to leave nothing. [tables.md](benchmarks/tables.md) has a line for every benchmark.\n\n## Where\n\n| | |\n|---|---|\n")
	for _, key := range []string{"date", "tombolo", "reference", "kernel", "cpu", "cpus", "goarch", "go", "nft", "iptables", "dnsmasq", "cni-kindnet", loadBefore} {
		if value := r.config[key]; value != "" {
			value, _, _ = strings.Cut(value, " (") // the release's name
			value, _, _ = strings.Cut(value, "  Copyright")
			fmt.Fprintf(&b, "| %s | %s |\n", key, value)
		}
	}
	b.WriteString("\n## In short\n\n" + r.summary(false) + r.lan())
	for _, p := range plots {
		fmt.Fprintf(&b, "\n![%s](benchmarks/%s)\n", p.title, p.file)
	}
	return b.String()
}

// tables is docs/benchmarks/tables.md: each benchmark's line.
func (r *results) tables() string {
	var b strings.Builder
	b.WriteString("# Benchmarks: every line\n\n`make bench-report` has written these tables too. [run.txt](run.txt) has all figures, for benchstat.\n")
	last := ""
	for _, name := range r.names {
		at := strings.LastIndex(name, "/")
		title := strings.ReplaceAll(name[:max(at, 0)], "/", ", ")
		if at < 0 {
			title = name
		}
		if title != last {
			last = title
			fmt.Fprintf(&b, "\n## %s\n\n| | median | 95 %% | |\n|---|---|---|---|\n", title)
		}
		fmt.Fprintf(&b, "| %s | %s | %s | %s |\n", name[at+1:], r.figure(name, "ns/op"), r.figure(name, "p95-ns/op"), strings.Join(r.further(name), ", "))
	}
	return b.String()
}

// figure writes a value by its unit.
func (r *results) figure(name, unit string) string {
	v, ok := r.get(name, unit)
	switch {
	case !ok:
		return "–"
	case strings.HasSuffix(unit, "-ns") || strings.HasSuffix(unit, "ns/op"):
		return duration(v)
	}
	return digits(v)
}

// further writes what a line has besides its times: ratios with their intervals, and
// figures of other kinds but CPU times, which run.txt has.
func (r *results) further(name string) []string {
	var list []string
	for _, unit := range slices.Sorted(maps.Keys(r.values[name])) {
		_, interval := r.get(name, unit+":low")
		switch {
		case unit == "ns/op" || unit == "p95-ns/op" || strings.HasSuffix(unit, "-cpu-ns") || strings.Contains(unit, ":"):
		case interval:
			list = append(list, fmt.Sprintf("%s %s × (%s to %s)", unit, r.figure(name, unit), r.figure(name, unit+":low"), r.figure(name, unit+":high")))
		default:
			list = append(list, unit+" "+r.figure(name, unit))
		}
	}
	return list
}
