package delegate_test

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/tombolo-cni/tombolo/internal/ipam/delegate"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
)

// The test binary is also the fake plugin: started with FAKE_LOG set, it appends what it was given to that file and does
// what FAKE_<verb> says: "print:<stdout>", "fail:<stdout>", "stderr:<text>", "silent", "flood", "hang" or "linger".
const (
	logVar = "FAKE_LOG"
	modeOf = "FAKE_"
)

func TestMain(m *testing.M) {
	if os.Getenv(logVar) != "" {
		os.Exit(fake())
	}
	os.Exit(m.Run())
}

// A call is what the fake plugin was started with, as a line of its log.
type call struct {
	Verb  string
	Env   map[string]string // CNI_*
	Other string            // the variable FAKE_OTHER, for what is inherited
	Stdin string
}

func fake() int {
	stdin, _ := io.ReadAll(os.Stdin)
	c := call{Verb: os.Getenv("CNI_COMMAND"), Env: map[string]string{}, Other: os.Getenv("FAKE_OTHER"), Stdin: string(stdin)}
	for _, entry := range os.Environ() {
		if key, value, _ := strings.Cut(entry, "="); strings.HasPrefix(key, "CNI_") {
			c.Env[key] = value
		}
	}
	line, _ := json.Marshal(c)
	log, err := os.OpenFile(os.Getenv(logVar), os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o600)
	if err != nil {
		return 99
	}
	fmt.Fprintf(log, "%s\n", line)
	log.Close()

	mode, text, _ := strings.Cut(os.Getenv(modeOf+c.Verb), ":")
	switch mode {
	case "print", "":
		fmt.Print(text)
		return 0
	case "fail":
		fmt.Print(text)
		return 1
	case "stderr":
		fmt.Fprint(os.Stderr, text)
		return 3
	case "flood":
		for err := error(nil); err == nil; {
			_, err = os.Stdout.Write(make([]byte, 1<<16))
		}
		return 0
	case "hang":
		fmt.Fprint(os.Stderr, "waiting for a server")
		// A child that shares stdout must not keep the caller waiting either.
		child := sleeper("600")
		if err := child.Start(); err != nil {
			return 98
		}
		_ = os.WriteFile(text, []byte(fmt.Sprint(child.Process.Pid)), 0o600)
		_ = child.Wait()
		return 0
	case "linger":
		// For longer than the caller waits, and not for ever.
		if err := sleeper("60").Start(); err != nil {
			return 98
		}
		fmt.Print(text)
		return 0
	}
	return 97
}

// sleeper is a process that holds our stdout for that many seconds.
func sleeper(seconds string) *exec.Cmd {
	child := exec.Command("sleep", seconds)
	child.Stdout = os.Stdout
	return child
}

// fakePlugin installs the fake as "fake" in a directory of its own. modes maps a verb to what it is to do.
func fakePlugin(t *testing.T, modes map[string]string) (plugin *delegate.Plugin, calls func() []call) {
	t.Helper()
	dir := t.TempDir()
	self := must.Of(os.Executable()).Get(t)
	must.Succeed(t, os.Symlink(self, filepath.Join(dir, "fake")))
	log := filepath.Join(dir, "calls")
	env := append(os.Environ(), logVar+"="+log, "FAKE_OTHER=inherited", "CNI_COMMAND=VERSION", "CNI_IFNAME=stale",
		// Under the race detector a process otherwise sleeps for a second before it exits.
		"GORACE=atexit_sleep_ms=0")
	for verb, mode := range modes {
		env = append(env, modeOf+verb+"="+mode)
	}
	plugin = &delegate.Plugin{
		Name:        "fake",
		Path:        "/nonexistent::" + dir,
		ContainerID: "pod",
		NetNS:       "/run/netns/pod",
		IfName:      "eth0",
		Args:        "K=V",
		Environ:     env,
		Stdin:       []byte(`{"cniVersion":"0.4.0","name":"lan","ipam":{"type":"fake"}}`),
	}
	return plugin, func() []call { return readCalls(t, log) }
}

func readCalls(t *testing.T, log string) []call {
	t.Helper()
	file, err := os.Open(log)
	if os.IsNotExist(err) {
		return nil
	}
	must.Succeed(t, err)
	defer file.Close()
	var calls []call
	for lines := bufio.NewScanner(file); lines.Scan(); {
		var c call
		must.Succeed(t, json.Unmarshal(lines.Bytes(), &c))
		calls = append(calls, c)
	}
	return calls
}

func verbs(calls []call) string {
	var names []string
	for _, c := range calls {
		names = append(names, c.Verb)
	}
	return strings.Join(names, " ")
}
