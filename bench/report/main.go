// Report reads what the benchmarks print, and writes of it the table of README.md
// (to standard output), or with -write all of docs/benchmarks.md, its plots, the lines
// that they are made of, and that table between the marks in README.md.
//
//	report [-write DIRECTORY] FILE...
package main

import (
	"bytes"
	"flag"
	"fmt"
	"os"
	"path/filepath"
)

func main() {
	root := flag.String("write", "", "the repository's `directory`, to write docs/benchmarks.md there, its plots, and the table of README.md")
	flag.Parse()
	if err := run(*root, flag.Args()); err != nil {
		fmt.Fprintln(os.Stderr, "report:", err)
		os.Exit(1)
	}
}

func run(root string, files []string) error {
	r := newResults()
	var raw bytes.Buffer
	for _, name := range files {
		data, err := os.ReadFile(name)
		if err == nil {
			raw.Write(data)
			err = r.read(bytes.NewReader(data), name)
		}
		if err != nil {
			return err
		}
	}
	if len(r.names) == 0 {
		return fmt.Errorf("no benchmark's result in %q", files)
	}
	if root != "" {
		if err := r.write(root); err != nil {
			return err
		}
		return os.WriteFile(filepath.Join(root, "docs", "benchmarks", "run.txt"), raw.Bytes(), 0o644)
	}
	fmt.Print("\n", r.summary(true))
	return nil
}
