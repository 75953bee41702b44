package nltest

import (
	"bufio"
	"encoding/hex"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"
)

// Recording is what a kernel listed of the object that a command made.
type Recording struct {
	Command  string
	Messages []netlink.Message // without their headers but for the type
	Refused  string            // why the kernel, or this machine's ip(8), did not take the command
}

// Kernel gives the kernel's version as recordings are named by it: "6.18".
func Kernel(tb testing.TB) string {
	tb.Helper()
	var u unix.Utsname
	if err := unix.Uname(&u); err != nil {
		tb.Fatal(err)
	}
	release := unix.ByteSliceToString(u.Release[:])
	parts := strings.SplitN(release, ".", 3)
	if len(parts) < 3 {
		tb.Fatalf("kernel %q has no version", release)
	}
	return parts[0] + "." + parts[1]
}

const recorded = "testdata/recorded"

// SaveRecordings writes the file of the running kernel anew.
func SaveRecordings(tb testing.TB, list []Recording) {
	tb.Helper()
	version := Kernel(tb)
	var w strings.Builder
	fmt.Fprintf(&w, "# What Linux %s lists after each command: type and data of the messages.\n", version)
	for _, r := range list {
		fmt.Fprintln(&w, r.Command)
		if r.Refused != "" {
			fmt.Fprintf(&w, "\trefused: %s\n", strings.Join(strings.Fields(r.Refused), " "))
		}
		for _, m := range r.Messages {
			fmt.Fprintf(&w, "\t%d %x\n", m.Header.Type, m.Data)
		}
	}
	if err := os.MkdirAll(recorded, 0o755); err != nil {
		tb.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(recorded, "linux-"+version+".txt"), []byte(w.String()), 0o644); err != nil {
		tb.Fatal(err)
	}
}

// Recordings reads the package's files, by kernel.
func Recordings(tb testing.TB) map[string][]Recording {
	tb.Helper()
	files, err := filepath.Glob(filepath.Join(recorded, "linux-*.txt"))
	if err != nil || len(files) == 0 {
		tb.Fatalf("no recordings in %s: %v", recorded, err)
	}
	all := map[string][]Recording{}
	for _, path := range files {
		all[strings.TrimSuffix(filepath.Base(path), ".txt")] = readRecordings(tb, path)
	}
	return all
}

func readRecordings(tb testing.TB, path string) []Recording {
	tb.Helper()
	f, err := os.Open(path)
	if err != nil {
		tb.Fatal(err)
	}
	defer f.Close()
	var list []Recording
	scan := bufio.NewScanner(f)
	for scan.Scan() {
		line, indented := strings.CutPrefix(scan.Text(), "\t")
		switch {
		case strings.HasPrefix(line, "#"):
		case !indented:
			list = append(list, Recording{Command: line})
		default:
			last := &list[len(list)-1]
			if text, ok := strings.CutPrefix(line, "refused: "); ok {
				last.Refused = text
				continue
			}
			last.Messages = append(last.Messages, parseMessage(tb, path, line))
		}
	}
	if err := scan.Err(); err != nil {
		tb.Fatal(err)
	}
	return list
}

func parseMessage(tb testing.TB, path, line string) netlink.Message {
	tb.Helper()
	number, data, _ := strings.Cut(line, " ")
	typ, err := strconv.ParseUint(number, 10, 16)
	if err != nil {
		tb.Fatalf("%s: %v", path, err)
	}
	b, err := hex.DecodeString(data)
	if err != nil {
		tb.Fatalf("%s: %v", path, err)
	}
	return netlink.Message{Header: netlink.Header{Type: netlink.HeaderType(typ)}, Data: b}
}
