package main

import (
	"context"
	"flag"
	"fmt"
	"io"
	"sort"
	"strings"
)

const (
	helpWidth  = 98
	helpColumn = 38 // where a summary begins
)

// common are the exit statuses that all commands have.
func common() []status {
	return []status{{0, "success"}, {exitFailed, "failure; stderr says why"}, {exitUsage, "the command line is wrong"}}
}

// help is the command that prints all of the others' help, or that of one.
func help(flags *flag.FlagSet) runner {
	return func(_ context.Context, out io.Writer, args []string) error {
		table := commands()
		text := overview(table)
		if len(args) > 0 {
			if list := group(table, args[0]); len(args) == 1 && len(list) > 0 {
				text = describeAll(list)
			} else {
				c, _, err := find(table, args)
				if err != nil {
					return err
				}
				text = c.describe()
			}
		}
		_, err := io.WriteString(out, text)
		return err
	}
}

// overview is the text of tombolo help.
func overview(table []command) string {
	var b strings.Builder
	b.WriteString("tombolo puts pods on a Linux bridge. Container runtimes run it as a CNI plugin.\n\nusage:\n")
	for _, c := range table {
		line := "  " + wrap(c.usage(), 4)
		if len(line) >= helpColumn {
			b.WriteString(line + "\n")
			line = ""
		}
		fmt.Fprintf(&b, "%-*s%s\n", helpColumn, line, wrap(c.summary, helpColumn))
	}
	b.WriteString("\nPOD is a pod's name, with or without its namespace, or the beginning of a container ID.\n" +
		"tombolo COMMAND --help explains the flags of a command.\n\nexit status:\n")
	for _, s := range common() {
		fmt.Fprintf(&b, "  %d  %s\n", s.code, s.text)
	}
	for _, s := range collect(table) {
		fmt.Fprintf(&b, "  %d  %s\n", s.code, wrap(s.text, len("  0  ")))
	}
	return b.String()
}

// collect gives the further exit statuses, each with the commands that have it.
func collect(table []command) []status {
	var all []status
	var names []string // of the commands that have it
	for _, c := range table {
	statuses:
		for _, s := range c.statuses {
			for i := range all {
				if all[i] == s {
					names[i] += ", " + c.name
					continue statuses
				}
			}
			all, names = append(all, s), append(names, c.name)
		}
	}
	for i := range all {
		all[i].text = names[i] + ": " + all[i].text
	}
	sort.SliceStable(all, func(i, j int) bool { return all[i].code < all[j].code })
	return all
}

// describe is the text of tombolo COMMAND --help.
func (c *command) describe() string {
	var b strings.Builder
	fmt.Fprintf(&b, "usage: %s\n\n%s.\n", c.usage(), wrap(strings.ToUpper(c.summary[:1])+c.summary[1:], 0))
	if c.privileged {
		b.WriteString("It needs root, or CAP_NET_ADMIN and CAP_SYS_ADMIN.\n")
	}
	if list := c.flags(); len(list) > 0 {
		b.WriteString("\nflags:\n")
		for _, f := range list {
			fmt.Fprintf(&b, "  %-24s%s\n", f.spelled, wrap(f.text, 26))
		}
	}
	b.WriteString("\nexit status:\n")
	for _, s := range append(common(), c.statuses...) {
		fmt.Fprintf(&b, "  %d  %s\n", s.code, wrap(s.text, len("  0  ")))
	}
	return b.String()
}

func describeAll(list []command) string {
	var b strings.Builder
	for i, c := range list {
		if i > 0 {
			b.WriteString("\n")
		}
		b.WriteString(c.describe())
	}
	return b.String()
}

// shown is a flag as help has it.
type shown struct {
	name    string
	value   string // what stands behind it, "" for a switch
	spelled string // "--state DIR"
	text    string
}

// flags gives those that help has, by name.
func (c *command) flags() []shown {
	set := flag.NewFlagSet(c.name, flag.ContinueOnError)
	c.setup(set)
	var list []shown
	set.VisitAll(func(f *flag.Flag) {
		value, text := flag.UnquoteUsage(f)
		s := shown{name: f.Name, value: strings.ToUpper(value), spelled: "--" + f.Name, text: text}
		if s.value != "" {
			s.spelled += " " + s.value
			if f.DefValue != "" {
				s.text += " (" + f.DefValue + ")"
			}
		}
		list = append(list, s)
	})
	return list
}

// usage is the line that tells how a command is spelt.
func (c *command) usage() string {
	words := "tombolo " + c.name
	for _, f := range c.flags() {
		words += " [" + f.spelled + "]"
	}
	if c.args != "" {
		words += " " + c.args
	}
	return words
}

// wrap breaks a text between words, so that it ends before the last column and goes on
// where it began.
func wrap(text string, column int) string {
	var b strings.Builder
	at := column
	for i, word := range strings.Fields(text) {
		switch {
		case i == 0:
		case at+1+len(word) > helpWidth:
			b.WriteString("\n" + strings.Repeat(" ", column))
			at = column
		default:
			b.WriteByte(' ')
			at++
		}
		b.WriteString(word)
		at += len(word)
	}
	return b.String()
}
