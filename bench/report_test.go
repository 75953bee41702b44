package main

import (
	"bytes"
	"encoding/json"
	"flag"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// golden compares got with a file in testdata, or writes it with -update.
func golden(t *testing.T, name, got string) {
	t.Helper()
	path := filepath.Join("testdata", name)
	if flag.Lookup("update").Value.String() == "true" {
		if err := os.MkdirAll("testdata", 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(got), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(string(want), got); diff != "" {
		t.Errorf("%s (-want +got; -update accepts it):\n%s", path, diff)
	}
}

func TestTextReportShowsFiguresRatiosAndWhatWasSkipped(t *testing.T) {
	t.Parallel()
	r := figures()
	r.prove("all is well")
	r.note("nobody hurried")
	r.skip("memory: it was forgotten")
	scenarios, err := parseScenarios("ipv4,dual")
	if err != nil {
		t.Fatal(err)
	}
	var b bytes.Buffer
	if err := r.writeText(&b, scenarios); err != nil {
		t.Fatal(err)
	}
	// The first line is about this machine.
	_, text, _ := strings.Cut(b.String(), "\n")
	golden(t, "report.txt", text)
}

func TestJSONReportHoldsTheSame(t *testing.T) {
	t.Parallel()
	r := figures()
	r.skip("memory: it was forgotten")
	gates, err := parseGates("add/floor<=1.9,attach/floor<=1.3")
	if err != nil {
		t.Fatal(err)
	}
	var b bytes.Buffer
	if err := r.writeJSON(&b, []verdict{gates[0].judge(r), gates[1].judge(r)}); err != nil {
		t.Fatal(err)
	}
	var document map[string]any
	if err := json.Unmarshal(b.Bytes(), &document); err != nil {
		t.Fatal(err)
	}
	if document["machine"] == "" {
		t.Error("the machine has no name")
	}
	document["machine"] = "this one"
	text, err := json.MarshalIndent(document, "", "  ")
	if err != nil {
		t.Fatal(err)
	}
	golden(t, "report.json", string(text)+"\n")
}

func TestReasonsAreGivenOnce(t *testing.T) {
	t.Parallel()
	r := &report{}
	r.skip("%s is missing", "nft")
	r.skip("%s is missing", "nft")
	if len(r.skipped) != 1 {
		t.Errorf("got %q", r.skipped)
	}
}

func TestDigitsKeepThree(t *testing.T) {
	t.Parallel()
	for x, want := range map[float64]string{0.0456: "0.046", 1.234: "1.23", 12.34: "12.3", 123.4: "123"} {
		if got := digits(x); got != want {
			t.Errorf("digits(%v) = %s, want %s", x, got, want)
		}
	}
}
