package cni

import (
	"encoding/json"
	"fmt"
	"io"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/tombolo-cni/tombolo/internal/testutil/must"
)

// fakeIPAM is the name by which this program is an IPAM plugin of a third party. What
// it does is in the ipam section of its configuration.
const fakeIPAM = "fake-ipam"

// fakeConf is that section.
type fakeConf struct {
	Type string `json:"type"`
	// Log gets a line for each verb: the verb, the container, the interface and the arguments.
	Log string `json:"log"`
	// Answer is the result of an ADD.
	Answer json.RawMessage `json:"answer,omitempty"`
	// Fail has a verb fail with an error object.
	Fail map[string]json.RawMessage `json:"fail,omitempty"`
	// Hang has a verb never end.
	Hang string `json:"hang,omitempty"`
}

// fake is an ipam section for a conf. Other verbs than those that are to fail or hang
// succeed.
func fake(t testing.TB, f fakeConf) (ipam fakeConf, calls func() []string) {
	f.Type = fakeIPAM
	f.Log = t.TempDir() + "/log"
	if f.Answer == nil {
		f.Answer = json.RawMessage(`{"cniVersion":"1.0.0","ips":[{"address":"10.77.0.9/24","gateway":"10.77.0.1"}]}`)
	}
	return f, func() []string {
		data, err := os.ReadFile(f.Log)
		must.That(t, err == nil || os.IsNotExist(err), "%v", err)
		return strings.FieldsFunc(string(data), func(r rune) bool { return r == '\n' })
	}
}

func runFakeIPAM() int {
	stdin, err := io.ReadAll(os.Stdin)
	if err != nil {
		panic(err)
	}
	var conf struct {
		IPAM fakeConf `json:"ipam"`
	}
	if err := json.Unmarshal(stdin, &conf); err != nil {
		panic(err)
	}
	verb := os.Getenv("CNI_COMMAND")
	log, err := os.OpenFile(conf.IPAM.Log, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		panic(err)
	}
	fmt.Fprintln(log, strings.TrimSpace(verb+" "+os.Getenv("CNI_CONTAINERID")+" "+os.Getenv("CNI_IFNAME")+" "+os.Getenv("CNI_ARGS")))
	if conf.IPAM.Hang == verb {
		// Until the plugin is killed.
		for parent := os.Getppid(); os.Getppid() == parent; {
			time.Sleep(50 * time.Millisecond)
		}
		return 1
	}
	if failure, ok := conf.IPAM.Fail[verb]; ok {
		fmt.Printf("%s\n", failure)
		return 1
	}
	if verb == "ADD" {
		fmt.Printf("%s\n", conf.IPAM.Answer)
	}
	return 0
}
