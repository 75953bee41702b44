// Report reads what the benchmarks print, and writes of it the table of README.md
// (to standard output), or with -write all of docs/benchmarks.md, its plots, and that
// table between the marks in README.md.
//
//	report [-write DIRECTORY] FILE...
package main

import (
	"flag"
	"fmt"
	"os"
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
	for _, name := range files {
		f, err := os.Open(name)
		if err == nil {
			err = r.read(f, name)
			f.Close()
		}
		if err != nil {
			return err
		}
	}
	if len(r.names) == 0 {
		return fmt.Errorf("no benchmark's result in %q", files)
	}
	if root != "" {
		return r.write(root)
	}
	fmt.Print("\n", r.summary(true))
	return nil
}
