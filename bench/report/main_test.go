package main

import (
	"flag"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

var update = flag.Bool("update", false, "write the golden files anew")

func golden(t *testing.T, name, got string) {
	t.Helper()
	path := filepath.Join("testdata", name)
	if *update {
		if err := os.WriteFile(path, []byte(got), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	if want, err := os.ReadFile(path); err != nil || string(want) != got {
		t.Errorf("%s (%v) is not what comes out, -update writes it anew:\n%s", path, err, got)
	}
}

func TestReportIsWrittenOfWhatWasMeasured(t *testing.T) {
	t.Parallel()
	root := t.TempDir()
	readme := filepath.Join(root, "README.md")
	const before, after = "# Tombolo\n\n" + tableBegins, tableEnds + "\nand more\n"
	if err := os.WriteFile(readme, []byte(before+"an older table\n"+after), 0o644); err != nil {
		t.Fatal(err)
	}
	for range 2 { // the second time it finds what it wrote
		if err := os.MkdirAll(filepath.Join(root, "docs"), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := run(root, []string{"testdata/run.txt"}); err != nil {
			t.Fatal(err)
		}
		got, err := os.ReadFile(readme)
		if err != nil {
			t.Fatal(err)
		}
		table, begins := strings.CutPrefix(string(got), before)
		table, ends := strings.CutSuffix(table, after)
		if !begins || !ends {
			t.Fatalf("what is around the table has changed: %s", got)
		}
		golden(t, "table.golden", table)
	}
	page, err := os.ReadFile(filepath.Join(root, "docs", "benchmarks.md"))
	if err != nil {
		t.Fatal(err)
	}
	golden(t, "benchmarks.golden", string(page))
	tables, err := os.ReadFile(filepath.Join(root, "docs", "benchmarks", "tables.md"))
	if err != nil {
		t.Fatal(err)
	}
	golden(t, "tables.golden", string(tables))
	for _, name := range []string{"add-ipv4.svg", "steps.svg", "pods.svg"} {
		svg, err := os.ReadFile(filepath.Join(root, "docs", "benchmarks", name))
		if err != nil || !strings.Contains(string(svg), "<svg") || !strings.Contains(string(page), "benchmarks/"+name) {
			t.Errorf("%s: %v, %d bytes", name, err, len(svg))
		}
	}
	run, err := os.ReadFile("testdata/run.txt")
	if err != nil {
		t.Fatal(err)
	}
	if kept, err := os.ReadFile(filepath.Join(root, "docs", "benchmarks", "run.txt")); err != nil || string(kept) != string(run) {
		t.Errorf("the lines of the run are not kept: %v", err)
	}
	if _, err := os.Stat(filepath.Join(root, "docs", "benchmarks", "add-everything.svg")); err == nil {
		t.Error("there is a plot of what was not measured")
	}
}

func TestReportOfNothingIsAnError(t *testing.T) {
	t.Parallel()
	empty := filepath.Join(t.TempDir(), "empty")
	if err := os.WriteFile(empty, []byte("PASS\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	for _, files := range [][]string{nil, {empty}, {empty + ".missing"}} {
		if err := run("", files); err == nil {
			t.Errorf("%q made a report", files)
		}
	}
	if err := run(filepath.Dir(empty), []string{"testdata/run.txt"}); err == nil {
		t.Error("a README that is not there was written")
	}
}

func TestFiguresHaveThreeDigits(t *testing.T) {
	t.Parallel()
	for x, want := range map[float64]string{0.03812: "0.038", 1.5249: "1.52", 15.249: "15.2", 152.49: "152", 1524.9: "1525"} {
		if got := digits(x); got != want {
			t.Errorf("%g is written %s, want %s", x, got, want)
		}
	}
	for ns, want := range map[float64]string{812: "0.812 µs", 81200: "81.2 µs", 1.52e6: "1.52 ms", 2.5e9: "2.50 s"} {
		if got := duration(ns); got != want {
			t.Errorf("%g ns is written %s, want %s", ns, got, want)
		}
	}
}
