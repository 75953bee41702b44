package main

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/tombolo-cni/tombolo/internal/golden"
)

// What follows writes the completion of two shells, and the man page, from the table of
// commands: go test ./cmd/tombolo -update. No binary has it.

const generated = "Written from cmd/tombolo/commands.go: go test ./cmd/tombolo -run Generated -update"

// places are what a command's arguments stand for, without brackets: NIC, FILE...
func places(c command) []string {
	return strings.Fields(strings.NewReplacer("[", "", "]", "").Replace(c.args))
}

// words gives the first words of all commands, or the second ones of a group.
func words(table []command, in string) []string {
	var list []string
	for _, c := range table {
		word, ok := c.name, true
		if in != "" {
			word, ok = strings.CutPrefix(c.name, in+" ")
		}
		if word, _, _ = strings.Cut(word, " "); ok && !slices.Contains(list, word) {
			list = append(list, word)
		}
	}
	return list
}

// groups gives the first words of commands that have two.
func groups(table []command) []string {
	var list []string
	for _, c := range table {
		if first, _, two := strings.Cut(c.name, " "); two && !slices.Contains(list, first) {
			list = append(list, first)
		}
	}
	return list
}

// valued gives the flags that a value follows.
func valued(table []command) []string {
	var list []string
	for _, c := range table {
		for _, f := range c.flags() {
			if name := "--" + f.name; f.value != "" && !slices.Contains(list, name) {
				list = append(list, name)
			}
		}
	}
	slices.Sort(list)
	return list
}

func bashCompletion(table []command) string {
	var b strings.Builder
	fmt.Fprintf(&b, `# bash completion for tombolo. %s

_tombolo() {
	local cur=${COMP_WORDS[COMP_CWORD]} prev=${COMP_WORDS[COMP_CWORD - 1]}
	local name= words= flags= places= place=- state=/run/tombolo given=0 i
	COMPREPLY=()
	for ((i = 1; i < COMP_CWORD; i++)); do
		case ${COMP_WORDS[i]} in
		--state) state=${COMP_WORDS[++i]} ;;
		%s) ((++i)) ;;
		-*) ;;
		*)
			case $name in
			'') name=${COMP_WORDS[i]} ;;
			%s) name+=" ${COMP_WORDS[i]}" ;;
			*) ((++given)) ;;
			esac
			;;
		esac
	done
	case $name in
	'') words='%s' flags='--version' ;;
`, generated, strings.Join(slices.DeleteFunc(valued(table), func(f string) bool { return f == "--state" }), " | "),
		strings.Join(groups(table), " | "), strings.Join(words(table, ""), " "))
	for _, g := range groups(table) {
		fmt.Fprintf(&b, "\t'%s') words='%s' ;;\n", g, strings.Join(words(table, g), " "))
	}
	for _, c := range table {
		var flags []string
		for _, f := range c.flags() {
			flags = append(flags, "--"+f.name)
		}
		fmt.Fprintf(&b, "\t'%s') flags='%s' places='%s' ;;\n", c.name, strings.Join(flags, " "), strings.Join(places(c), " "))
	}
	fmt.Fprintf(&b, `	esac
	case $prev in
	--state | --leases) mapfile -t COMPREPLY < <(compgen -d -- "$cur") && return ;;
	--network) places=NETWORK given=0 ;;
	%s) return ;;
	esac
	if [[ $cur == -* ]]; then
		mapfile -t COMPREPLY < <(compgen -W "$flags --help" -- "$cur")
		return
	fi
	for word in $places; do
		if ((given-- == 0)) || [[ $word == *... ]]; then
			place=${word%%...}
			break
		fi
	done
	case $place in
	NIC | BRIDGE) words=$(cd /sys/class/net && echo *) ;;
	NETWORK) words=$(cd "$state/networks" 2>/dev/null && for word in *.json; do [[ ! -e $word ]] || echo "${word%%.json}"; done) ;;
	COMMAND) words='%s' ;;
	FILE) mapfile -t COMPREPLY < <(compgen -f -- "$cur") && return ;;
	esac
	mapfile -t COMPREPLY < <(compgen -W "$words" -- "$cur")
}
complete -o filenames -F _tombolo tombolo
`, strings.Join(slices.DeleteFunc(valued(table), func(f string) bool { return f == "--state" || f == "--leases" || f == "--network" }), " | "),
		strings.Join(words(table, ""), " "))
	return strings.Replace(b.String(), "given=0 i\n", "given=0 i word\n", 1)
}

// zshText is text within a specification of _arguments or _describe, in single quotes.
func zshText(s string) string {
	return strings.NewReplacer("'", `'\''`, ":", `\:`, "[", `\[`, "]", `\]`).Replace(s)
}

// zshPlace gives what zsh offers for an argument or a flag's value.
func zshPlace(place string) string {
	switch strings.TrimSuffix(place, "...") {
	case "NIC", "BRIDGE":
		return "_net_interfaces"
	case "NETWORK":
		return "_files -W /run/tombolo/networks -g \"*.json(:r)\""
	case "DIR":
		return "_files -/"
	case "FILE":
		return "_files"
	}
	return ""
}

func zshCompletion(table []command) string {
	var b strings.Builder
	fmt.Fprintf(&b, "#compdef tombolo\n# %s\n\nlocal name=$words[2]\nlocal -a list\nif ((CURRENT == 2)); then\n\tlist=(\n", generated)
	for _, word := range words(table, "") {
		text := ""
		for _, c := range table {
			if c.name == word {
				text = c.summary
			}
		}
		if text == "" {
			text = verbs(group(table, word))
		}
		fmt.Fprintf(&b, "\t\t'%s:%s'\n", word, zshText(text))
	}
	b.WriteString("\t)\n\t_describe command list\n\treturn\nfi\n")
	for _, g := range groups(table) {
		fmt.Fprintf(&b, "if [[ $name == %s ]]; then\n\tif ((CURRENT == 3)); then\n\t\tlist=(\n", g)
		for _, c := range group(table, g) {
			fmt.Fprintf(&b, "\t\t\t'%s:%s'\n", strings.TrimPrefix(c.name, g+" "), zshText(c.summary))
		}
		b.WriteString("\t\t)\n\t\t_describe command list\n\t\treturn\n\tfi\n\tname+=\" $words[3]\"\n\tshift words\n\t((CURRENT--))\nfi\n")
	}
	b.WriteString("shift words\n((CURRENT--))\ncase $name in\n")
	for _, c := range table {
		fmt.Fprintf(&b, "'%s') _arguments '--help[help]'", c.name)
		for _, f := range c.flags() {
			fmt.Fprintf(&b, " \\\n\t'--%s[%s]", f.name, zshText(f.text))
			if f.value != "" {
				fmt.Fprintf(&b, ":%s:%s", f.value, zshPlace(f.value))
			}
			b.WriteString("'")
		}
		least, _ := c.count()
		for i, place := range places(c) {
			colons := "::"
			switch {
			case strings.HasSuffix(place, "..."):
				colons = "*:"
			case i < least:
				colons = ":"
			}
			name, offer := strings.TrimSuffix(place, "..."), zshPlace(place)
			if name == "COMMAND" {
				offer = "(" + strings.Join(words(table, ""), " ") + ")"
			}
			fmt.Fprintf(&b, " \\\n\t'%s%s:%s'", colons, name, offer)
		}
		b.WriteString(" ;;\n")
	}
	b.WriteString("esac\n")
	return b.String()
}

// roff is text of a man page: a hyphen that is typed, and no request at a line's start.
func roff(s string) string {
	return strings.NewReplacer(`\`, `\e`, "-", `\-`, "\n.", "\n\\&.", "\n'", "\n\\&'").Replace(s)
}

func manPage(table []command) string {
	var b strings.Builder
	fmt.Fprintf(&b, `.\" %s
.TH TOMBOLO 8 "" Tombolo "System administration"
.SH NAME
tombolo \- pods on a Linux bridge
.SH SYNOPSIS
.B tombolo
.I COMMAND
.RI [ flags ]
.RI [ arguments ]
.SH DESCRIPTION
Container runtimes run
.B tombolo
as a CNI plugin, with CNI_COMMAND in its environment. Otherwise it is an operator's tool, with the commands below. Flags may stand behind arguments.
.SH COMMANDS
`, roff(generated))
	for _, c := range table {
		fmt.Fprintf(&b, ".TP\n.B %s\n%s.\n", roff(c.usage()), roff(strings.ToUpper(c.summary[:1])+c.summary[1:]))
		if c.privileged {
			b.WriteString("It needs CAP_NET_ADMIN and CAP_SYS_ADMIN.\n")
		}
		for _, f := range c.flags() {
			fmt.Fprintf(&b, ".RS\n.TP\n.B %s\n%s\n.RE\n", roff(f.spelled), roff(f.text))
		}
	}
	b.WriteString(".SH EXIT STATUS\n")
	for _, s := range append(common(), collect(table)...) {
		fmt.Fprintf(&b, ".TP\n.B %d\n%s\n", s.code, roff(s.text))
	}
	b.WriteString(`.SH FILES
.TP
.I /etc/cni/net.d
networks, by which the runtime runs the plugin
.TP
.I /run/tombolo
records of networks and pods, which a boot ends
.TP
.I /var/lib/tombolo/leases
leases, which tombolod renews
.SH SEE ALSO
https://github.com/tombolo\-cni/tombolo/tree/main/docs
`)
	return b.String()
}

const shipped = "../../../deploy/share/"

func TestGeneratedFilesAreThoseOfTheTable(t *testing.T) {
	t.Parallel()
	table := commands()
	golden.Compare(t, shipped+"tombolo.bash", bashCompletion(table))
	golden.Compare(t, shipped+"_tombolo", zshCompletion(table))
	golden.Compare(t, shipped+"tombolo.8", manPage(table))
	if strings.Contains(manPage(table), "\n.\n") {
		t.Error("the man page has an empty request")
	}
}

func TestBashCompletesWhatCanFollow(t *testing.T) {
	t.Parallel()
	bash, err := exec.LookPath("bash")
	if err != nil {
		t.Fatal(err)
	}
	state := t.TempDir()
	if err := os.MkdirAll(filepath.Join(state, "networks"), 0o755); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"pods.json", "lab.json"} {
		if err := os.WriteFile(filepath.Join(state, "networks", name), nil, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	links, err := os.ReadDir("/sys/class/net")
	if err != nil {
		t.Fatal(err)
	}
	var nics []string
	for _, l := range links {
		nics = append(nics, l.Name())
	}
	for _, tt := range []struct {
		line string // the last word is being typed
		want []string
	}{
		{"tombolo ch", []string{"check"}},
		{"tombolo ", words(commands(), "")},
		{"tombolo --v", []string{"--version"}},
		{"tombolo uplink re", []string{"restore"}},
		{"tombolo uplink ", []string{"plan", "take", "restore", "status"}},
		{"tombolo uplink plan --k", []string{"--keep-address"}},
		{"tombolo uplink plan ", nics},
		{"tombolo uplink plan --timeout 3s eth0 ", nics},
		{"tombolo uplink plan eth0 br0 ", nil},
		{"tombolo remove --state " + state + " ", []string{"lab", "pods"}},
		{"tombolo remove --state " + state + " p", []string{"pods"}},
		{"tombolo remove --state " + state[:len(state)-1], []string{state}},
		{"tombolo ls --state " + state + " --network l", []string{"lab"}},
		{"tombolo ls --pod ", nil},
		{"tombolo leases --", []string{"--json", "--leases", "--help"}},
		{"tombolo help rep", []string{"repair"}},
		{"tombolo demo --pods ", nil},
	} {
		line := strings.Split(tt.line, " ")
		script := fmt.Sprintf("source ../../deploy/share/tombolo.bash; COMP_WORDS=(\"$@\"); COMP_CWORD=%d; _tombolo; printf '%%s\\n' \"${COMPREPLY[@]}\"", len(line)-1)
		out, err := exec.Command(bash, append([]string{"--norc", "-c", "set -e; " + script, "bash"}, line...)...).CombinedOutput()
		if err != nil {
			t.Errorf("%q: %v\n%s", tt.line, err, out)
			continue
		}
		got := strings.Fields(string(out))
		slices.Sort(got)
		want := slices.Sorted(slices.Values(tt.want))
		if diff := cmp.Diff(want, got); diff != "" && len(want)+len(got) > 0 {
			t.Errorf("%q (-want +got):\n%s", tt.line, diff)
		}
	}
}

// zsh's own functions are replaced by some that print what they are given.
func TestZshCompletesWhatCanFollow(t *testing.T) {
	t.Parallel()
	zsh, err := exec.LookPath("zsh")
	if err != nil {
		t.Fatal("needs zsh: test/deps.sh installs it")
	}
	for _, tt := range []struct {
		line string
		want []string
	}{
		{"tombolo ", []string{"DESCRIBE", "uplink:plan, take, restore or status", `ls:list the pods on this node`}},
		{"tombolo uplink ", []string{"DESCRIBE", "plan:print how"}},
		{"tombolo uplink plan ", []string{"ARGUMENTS uplink plan, word 2", "--keep-address[", "--timeout[", ":NIC:_net_interfaces", ":BRIDGE:_net_interfaces"}},
		{"tombolo ls --state ", []string{"ARGUMENTS ls, word 3", ":DIR:_files -/", ":NETWORK:_files -W /run/tombolo/networks"}},
		{"tombolo help ", []string{"*:COMMAND:(version ls"}},
	} {
		words := strings.Split(tt.line, " ")
		script := `_describe() { print -r DESCRIBE; print -rl -- ${(P)2} }
_arguments() { print -r "ARGUMENTS $name, word $CURRENT"; print -rl -- "$@" }
f() { local -a words=("$@"); local CURRENT=$#; source ../../deploy/share/_tombolo }
f "$@"`
		out, err := exec.Command(zsh, append([]string{"-f", "-c", script, "zsh"}, words...)...).CombinedOutput()
		if err != nil {
			t.Errorf("%q: %v\n%s", tt.line, err, out)
		}
		for _, want := range tt.want {
			if !strings.Contains(string(out), want) {
				t.Errorf("%q lacks %q:\n%s", tt.line, want, out)
			}
		}
	}
}
