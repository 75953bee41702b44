package main

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/spf13/cobra"
	"github.com/tombolo-cni/tombolo/internal/cni/conflist"
)

const errInvalid found = "at least one configuration is invalid"

func (o *options) validateCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "validate FILE...",
		Short: "print all that is wrong with configuration files, or what their first ADD would do",
		Long: "Print all that is wrong with configuration files, or what the first ADD of each would do; change nothing. The exit\n" +
			"status is 4 if a file is invalid.",
		Args: takes(1, -1), ValidArgsFunction: cobra.FixedCompletions(nil, cobra.ShellCompDirectiveDefault),
		RunE: func(_ *cobra.Command, args []string) error { return o.validate(args) },
	}
}

// validate prints what there is to say of each file.
func (o *options) validate(files []string) error {
	var text strings.Builder
	invalid := false
	var unread error
	for _, name := range files {
		data, err := os.ReadFile(name)
		if err != nil {
			unread = errors.Join(unread, err)
			continue
		}
		r := conflist.Examine(data)
		switch ext := filepath.Ext(name); {
		case ext == ".conflist" && r.Single:
			r.Problems = append(r.Problems, `runtimes take a .conflist file only as a list: put the plugin into "plugins"`)
		case (ext == ".conf" || ext == ".json") && r.List:
			r.Problems = append(r.Problems, "runtimes take a "+ext+" file only as the conf of one plugin: name it .conflist")
		}
		verdict, lines := "valid", r.Plan
		if len(r.Problems) > 0 {
			invalid, verdict, lines = true, "invalid", r.Problems
		}
		fmt.Fprintf(&text, "%s: %s\n", name, verdict)
		for _, line := range r.Warnings {
			fmt.Fprintf(&text, "  warning: %s\n", line)
		}
		for _, line := range lines {
			fmt.Fprintf(&text, "  %s\n", line)
		}
	}
	if err := o.print(text.String(), nil); err != nil {
		return err
	}
	if unread != nil {
		return unread
	}
	if invalid {
		return errInvalid
	}
	return nil
}
