package delegate_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/containernetworking/cni/pkg/types"
	"github.com/google/go-cmp/cmp"

	"github.com/tombolo-cni/tombolo/internal/ipam/delegate"
	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
)

func TestEveryVerbHandsOverTheCall(t *testing.T) {
	t.Parallel()
	plugin, calls := fakePlugin(t, map[string]string{"ADD": `print:{"ips":[{"version":"4","address":"10.1.0.2/24"}]}`})
	ctx := context.Background()
	expect.Success(t, expect.Err(plugin.Add(ctx)))
	for _, verb := range []string{"DEL", "CHECK", "GC", "STATUS"} {
		expect.Success(t, plugin.Run(ctx, verb), "%s", verb)
	}
	got := calls()
	if len(got) != 5 {
		t.Fatalf("the plugin ran %d times (%s)", len(got), verbs(got))
	}
	for _, c := range got {
		want := call{Verb: c.Verb, Other: "inherited", Stdin: string(plugin.Stdin), Env: map[string]string{
			"CNI_COMMAND": c.Verb, "CNI_CONTAINERID": "pod", "CNI_NETNS": "/run/netns/pod", "CNI_IFNAME": "eth0",
			"CNI_ARGS": "K=V", "CNI_PATH": plugin.Path,
		}}
		expect.NoDiff(t, cmp.Diff(want, c), "%s", c.Verb)
	}
}

func TestUnsetParametersAreNotInherited(t *testing.T) {
	t.Parallel()
	plugin, calls := fakePlugin(t, nil)
	plugin.ContainerID, plugin.NetNS, plugin.IfName, plugin.Args = "", "", "", ""
	must.Succeed(t, plugin.Run(context.Background(), "STATUS"))
	want := map[string]string{"CNI_COMMAND": "STATUS", "CNI_PATH": plugin.Path}
	expect.NoDiff(t, cmp.Diff(want, calls()[0].Env), "environment")
}

func TestResultsOfEveryVersionAreConverted(t *testing.T) {
	t.Parallel()
	const want = `{"cniVersion":"1.1.0","ips":[{"address":"10.1.0.2/24","gateway":"10.1.0.1"}],"routes":[{"dst":"0.0.0.0/0"}]}`
	for name, stdout := range map[string]string{
		"0.2.0":               `{"cniVersion":"0.2.0","ip4":{"ip":"10.1.0.2/24","gateway":"10.1.0.1","routes":[{"dst":"0.0.0.0/0"}]}}`,
		"0.4.0":               `{"cniVersion":"0.4.0","ips":[{"version":"4","address":"10.1.0.2/24","gateway":"10.1.0.1"}],"routes":[{"dst":"0.0.0.0/0"}]}`,
		"1.0.0":               `{"cniVersion":"1.0.0","ips":[{"address":"10.1.0.2/24","gateway":"10.1.0.1"}],"routes":[{"dst":"0.0.0.0/0"}]}`,
		"1.1.0":               want,
		"that of the netconf": `{"ips":[{"version":"4","address":"10.1.0.2/24","gateway":"10.1.0.1"}],"routes":[{"dst":"0.0.0.0/0"}]}`,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			plugin, _ := fakePlugin(t, map[string]string{"ADD": "print:" + stdout})
			result := must.Of(plugin.Add(context.Background())).Get(t)
			got := must.Of(json.Marshal(result)).Get(t)
			expect.NoDiff(t, cmp.Diff(want, string(got)))
		})
	}
}

func TestBadResultsAreErrors(t *testing.T) {
	t.Parallel()
	for name, stdout := range map[string]string{
		"nothing":             ``,
		"not JSON":            `ok`,
		"null":                `null`,
		"a list":              `[]`,
		"unknown version":     `{"cniVersion":"9.9.9"}`,
		"null address":        `{"cniVersion":"0.4.0","ips":[null]}`,
		"null interface":      `{"cniVersion":"0.4.0","interfaces":[null]}`,
		"null route":          `{"cniVersion":"1.1.0","routes":[null]}`,
		"entry without an IP": `{"cniVersion":"1.1.0","ips":[{}]}`,
		"bad address":         `{"cniVersion":"1.1.0","ips":[{"address":"10.1.0.2"}]}`,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			plugin, _ := fakePlugin(t, map[string]string{"ADD": "print:" + stdout})
			result, err := plugin.Add(context.Background())
			expect.That(t, errors.Is(err, delegate.ErrBadResult) && strings.Contains(err.Error(), "plugin fake"),
				"got %v, %v; want ErrBadResult", result, err)
		})
	}
}

func TestThePluginsOwnErrorPassesThrough(t *testing.T) {
	t.Parallel()
	const object = `fail:{"cniVersion":"1.1.0","code":11,"msg":"busy","details":"try later"}`
	plugin, _ := fakePlugin(t, map[string]string{"ADD": object, "DEL": object, "CHECK": object, "GC": object, "STATUS": object})
	ctx := context.Background()
	_, addErr := plugin.Add(ctx)
	for name, err := range map[string]error{
		"ADD": addErr, "DEL": plugin.Run(ctx, "DEL"), "CHECK": plugin.Run(ctx, "CHECK"), "GC": plugin.Run(ctx, "GC"), "STATUS": plugin.Run(ctx, "STATUS"),
	} {
		var own *types.Error
		if !errors.As(err, &own) {
			t.Errorf("%s: got %v, want the plugin's error", name, err)
			continue
		}
		expect.NoDiff(t, cmp.Diff(&types.Error{Code: 11, Msg: "busy", Details: "try later"}, own), "%s", name)
	}
}

func TestAnErrorWithoutACodeIsInternal(t *testing.T) {
	t.Parallel()
	plugin, _ := fakePlugin(t, map[string]string{"CHECK": `fail:{"msg":"old plugin"}`})
	var own *types.Error
	err := plugin.Run(context.Background(), "CHECK")
	expect.That(t, errors.As(err, &own) && own.Code == types.ErrInternal, "got %v", err)
}

func TestFailuresWithoutAnErrorObjectQuoteTheOutput(t *testing.T) {
	t.Parallel()
	for name, tt := range map[string]struct{ mode, want string }{
		"stderr":      {"stderr:no route to the server\n", `run plugin fake: exit status 3; stderr: "no route to the server"`},
		"odd stdout":  {"fail:panic: x", `run plugin fake: exit status 1; stdout: "panic: x"`},
		"nothing":     {"fail:", `run plugin fake: exit status 1`},
		"long stderr": {"stderr:" + strings.Repeat("x", 3000) + "end", `run plugin fake: exit status 3; stderr: "` + strings.Repeat("x", 509) + `end"`},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			plugin, _ := fakePlugin(t, map[string]string{"CHECK": tt.mode})
			err := plugin.Run(context.Background(), "CHECK")
			expect.That(t, err != nil && strings.HasPrefix(err.Error(), tt.want), "got  %v\nwant %s", err, tt.want)
		})
	}
}

func TestStderrIsPassedOnWhole(t *testing.T) {
	t.Parallel()
	text := strings.Repeat("y", 5000)
	plugin, _ := fakePlugin(t, map[string]string{"CHECK": "stderr:" + text})
	var stderr bytes.Buffer
	plugin.Stderr = &stderr
	expect.Failure(t, plugin.Run(context.Background(), "CHECK"), "no error")
	if stderr.String() != text {
		t.Errorf("%d bytes of stderr came through, want %d", stderr.Len(), len(text))
	}
}

func TestAPluginTooOldForAVerbIsNoFailure(t *testing.T) {
	t.Parallel()
	const object = `fail:{"code":100,"msg":"unknown CNI_COMMAND: STATUS"}`
	plugin, _ := fakePlugin(t, map[string]string{"GC": object, "STATUS": object, "CHECK": object})
	ctx := context.Background()
	expect.Success(t, plugin.Run(ctx, "STATUS"), "STATUS")
	expect.Success(t, plugin.Run(ctx, "GC"), "GC")
	expect.Failure(t, plugin.Run(ctx, "CHECK"), "CHECK, which every plugin has to know, does not fail")
}

func TestMissingPluginsAreNamed(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	for _, name := range []string{"directory", "plain"} {
		if name == "directory" {
			must.Succeed(t, os.Mkdir(filepath.Join(dir, name), 0o755))
		} else if err := os.WriteFile(filepath.Join(dir, name), nil, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	for name, tt := range map[string]struct{ name, path, want string }{
		"not there":      {"missing", dir, `find plugin "missing": no such executable in CNI_PATH (` + dir + `): plugin not found`},
		"a directory":    {"directory", dir, `find plugin "directory": no such executable in CNI_PATH (` + dir + `): plugin not found`},
		"not executable": {"plain", dir, `find plugin "plain": no such executable in CNI_PATH (` + dir + `): plugin not found`},
		"no path":        {"x", "", `find plugin "x": CNI_PATH is empty: plugin not found`},
		"no name":        {"", dir, `find plugin "": not the name of a file: plugin not found`},
		"a path as name": {"../sh", "/bin", `find plugin "../sh": not the name of a file: plugin not found`},
		"parent":         {"..", dir, `find plugin "..": no such executable in CNI_PATH (` + dir + `): plugin not found`},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			_, err := delegate.Find(tt.name, tt.path)
			expect.That(t, errors.Is(err, delegate.ErrNotFound) && err.Error() == tt.want,
				"got  %v\nwant %s", err, tt.want)
			plugin := &delegate.Plugin{Name: tt.name, Path: tt.path}
			expect.Is(t, expect.Err(plugin.Add(context.Background())), delegate.ErrNotFound, "Add: got")
		})
	}
}
