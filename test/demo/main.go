package main

import (
	"context"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
)

func main() {
	pods := flag.Int("pods", 5, "run this `number` of pods")
	flag.Usage = func() {
		fmt.Fprintln(flag.CommandLine.Output(), "usage: demo [-pods number] plugin")
		flag.PrintDefaults()
	}
	flag.Parse()

	if flag.NArg() != 1 {
		flag.Usage()
		os.Exit(2)
	}

	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()

	plugin, err := filepath.Abs(flag.Arg(0))
	if err == nil {
		err = Run(ctx, os.Stdout, plugin, *pods)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "tombolo:", err)
		os.Exit(1)
	}
}
