package cni

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"gopkg.in/yaml.v3"

	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
)

// documents gives what a file of YAML has.
func documents(t *testing.T, path string) []map[string]any {
	t.Helper()
	f := must.Of(os.Open(path)).Get(t)
	defer f.Close()
	var list []map[string]any
	for d := yaml.NewDecoder(f); ; {
		var document map[string]any
		err := d.Decode(&document)
		if errors.Is(err, io.EOF) {
			return list
		}
		must.Succeed(t, err, "%s", path)
		list = append(list, document)
	}
}

// manifest is what the tests look at of a DaemonSet.
type manifest struct {
	Kind     string
	Metadata struct{ Name, Namespace string }
	Spec     struct {
		Selector struct{ MatchLabels map[string]string }
		Template struct {
			Metadata struct{ Labels map[string]string }
			Spec     struct {
				HostNetwork, HostPID         bool
				ServiceAccountName           string
				AutomountServiceAccountToken *bool
				InitContainers, Containers   []container
				Volumes                      []struct {
					Name     string
					HostPath struct{ Path string }
				}
			}
		}
	}
}

type container struct {
	Name, Image    string
	Command, Args  []string
	Env            []struct{ Name, Value string }
	Resources      struct{ Requests, Limits map[string]string }
	ReadinessProbe struct {
		HTTPGet struct{ Host, Port, Path string }
	}
	SecurityContext struct{ Privileged bool }
	VolumeMounts    []struct{ Name, MountPath, MountPropagation string }
}

// readManifest reads one whose directories of CNI are replaced as deploy/kubernetes/README.md says.
func readManifest(t *testing.T, name string, directories ...string) (m manifest) {
	t.Helper()
	text := strings.NewReplacer(directories...).Replace(readFile(t, filepath.Join(repository, "deploy/kubernetes", name)))
	// yaml.v3 wants the names of fields in lower case; the manifest's are not.
	text = regexp.MustCompile(`[A-Za-z]+:`).ReplaceAllStringFunc(text, strings.ToLower)
	must.Succeed(t, yaml.Unmarshal([]byte(text), &m), "%s", name)
	return m
}

// A program that is started as /opt/cni/bin/tombolo has to be there on the node, too.
func TestDaemonSetsInstallIntoTheDirectoriesOfOtherDistributions(t *testing.T) {
	t.Parallel()
	const bin, conf = "/var/lib/rancher/k3s/data/cni", "/var/lib/rancher/k3s/agent/etc/cni/net.d"
	for _, name := range []string{"tombolo.yaml", "uninstall.yaml"} {
		pod := readManifest(t, name, "/opt/cni/bin", bin, "/etc/cni/net.d", conf).Spec.Template.Spec
		paths := map[string]string{}
		for _, v := range pod.Volumes {
			paths[v.Name] = v.HostPath.Path
		}
		expect.That(t, paths["cni-bin"] == bin && paths["cni-conf"] == conf, "%s has the node's %v", name, paths)
		installs := 0
		for _, c := range slices.Concat(pod.InitContainers, pod.Containers) {
			if len(c.Env) == 0 {
				continue
			}
			installs++
			expect.Equal(t, fmt.Sprint(c.Env), "[{CNI_BIN "+bin+"} {CNI_CONF "+conf+"}]", "%s: %s has", name, c.Name)
			for _, mount := range c.VolumeMounts {
				path := paths[mount.Name]
				expect.That(t, path == "" || mount.MountPath == "/host"+path, "%s: %s has the node's %s at %s", name, c.Name, path, mount.MountPath)
			}
		}
		expect.Equal(t, installs, 1, "%s has %d containers that are told the directories", name, installs)
	}
}

func TestTheDaemonSetIsReadyWhenTombolodIsHealthy(t *testing.T) {
	t.Parallel()
	pod := readManifest(t, "tombolo.yaml").Spec.Template.Spec
	for _, c := range slices.Concat(pod.InitContainers, pod.Containers) {
		expect.That(t, c.Resources.Requests["cpu"] != "" && c.Resources.Requests["memory"] != "" && c.Resources.Limits["memory"] != "",
			"%s has resources %v", c.Name, c.Resources)
		if c.Name != "tombolod" {
			continue
		}
		get := c.ReadinessProbe.HTTPGet
		expect.That(t, get.Path == "/healthz" && slices.Equal(c.Args, []string{"--metrics", net.JoinHostPort(get.Host, get.Port)}),
			"it is asked at %v, and runs with %q", get, c.Args)
	}
	if load := pod.InitContainers[0]; !load.SecurityContext.Privileged || !strings.Contains(fmt.Sprint(load.Command), "modprobe br_netfilter") {
		t.Errorf("%+v loads no br_netfilter", load)
	}
}

func TestDaemonSetsAreWhole(t *testing.T) {
	t.Parallel()
	for _, name := range []string{"tombolo.yaml", "uninstall.yaml"} {
		path := filepath.Join(repository, "deploy/kubernetes", name)
		n := len(documents(t, path))
		must.That(t, n == 1, "%s has %d documents", name, n)
		m := readManifest(t, name)
		pod := m.Spec.Template.Spec
		expect.That(t, m.Kind == "DaemonSet" && m.Metadata.Namespace == "kube-system" && pod.HostNetwork,
			"%s is %+v", name, m)
		diff := cmp.Diff(m.Spec.Selector.MatchLabels, m.Spec.Template.Metadata.Labels)
		expect.That(t, diff == "", "%s selects other pods than its own: %s", name, diff)
		expect.That(t, pod.AutomountServiceAccountToken != nil && !*pod.AutomountServiceAccountToken && pod.ServiceAccountName == "",
			"%s has an account of the API server", name)
		var volumes, mounted []string
		for _, v := range pod.Volumes {
			volumes = append(volumes, v.Name)
		}
		for _, c := range slices.Concat(pod.InitContainers, pod.Containers) {
			expect.Equal(t, c.Image, "tombolo:dev", "%s: container %s has image", name, c.Name)
			if len(c.Command) > 0 && strings.HasSuffix(c.Command[0], "install.sh") {
				if o := exec.Command("grep", "-q", "^"+c.Command[1]+")", filepath.Join(repository, "deploy/kubernetes/install.sh")).Run(); o != nil {
					t.Errorf("%s: install.sh has no verb %q", name, c.Command[1])
				}
			}
			for _, mount := range c.VolumeMounts {
				mounted = append(mounted, mount.Name)
				expect.That(t, !strings.HasSuffix(mount.MountPath, "run/netns") || mount.MountPropagation == "HostToContainer",
					"%s: namespaces that are mounted later do not arrive at %s", name, mount.MountPath)
			}
		}
		slices.Sort(volumes)
		slices.Sort(mounted)
		diff = cmp.Diff(volumes, slices.Compact(mounted))
		expect.That(t, diff == "", "%s: volumes and what is mounted of them (-volumes +mounts):\n%s", name, diff)
	}
}

// tree gives a directory's files, with their text, or where a link leads.
func tree(t *testing.T, dir string) map[string]string {
	t.Helper()
	all := map[string]string{}
	must.Succeed(t, filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		name := strings.TrimPrefix(path, dir)
		if target, err := os.Readlink(path); err == nil {
			all[name] = "-> " + target
			return nil
		}
		all[name] = readFile(t, path)
		return nil
	}))
	return all
}

func TestInstallScriptOfTheDaemonSet(t *testing.T) {
	t.Parallel()
	nstest.Need(t, "busybox")
	host, from := t.TempDir(), t.TempDir()
	write := func(path, text string) {
		t.Helper()
		must.Succeed(t, errors.Join(os.MkdirAll(filepath.Dir(path), 0o755), os.WriteFile(path, []byte(text), 0o755)))
	}
	run := func(verb string) {
		t.Helper()
		cmd := exec.Command("busybox", "sh", filepath.Join(repository, "deploy/kubernetes/install.sh"), verb)
		cmd.Env = []string{"PATH=" + os.Getenv("PATH"), "HOST=" + host, "FROM=" + from, "NETWORK=" + from + "/10-tombolo.conflist", "NAMES=" + filepath.Join(repository, "deploy/names.sh")}
		out, err := cmd.CombinedOutput()
		must.That(t, err == nil, "%s: %v\n%s", verb, err, out)
	}
	want := func(when string, files map[string]string) {
		t.Helper()
		expect.NoDiff(t, cmp.Diff(files, tree(t, host)), "%s", when)
	}
	const network = `{"name": "n", "plugins": [{ "type": "tombolo" }]}`
	others := map[string]string{"/opt/cni/bin/bridge": "b", "/etc/cni/net.d/20-other.conflist": "{}"}
	for name, text := range others {
		write(host+name, text)
	}
	with := func(more ...string) map[string]string {
		all := map[string]string{}
		for name, text := range others {
			all[name] = text
		}
		for i := 0; i < len(more); i += 2 {
			all[more[i]] = more[i+1]
		}
		return all
	}
	program := host + "/opt/cni/bin/tombolo"
	const loopback = "#!/opt/cni/bin/tombolo as\n# Tombolo, by the name of the reference plugin loopback. To undo: tombolo install --undo /opt/cni/bin\n"

	write(from+"/tombolo-cni", "#!/bin/sh\nread line\n")
	run("install")
	want("without a network", with("/opt/cni/bin/tombolo", "#!/bin/sh\nread line\n", "/opt/cni/bin/loopback", loopback))

	// A runtime has the old one open while the new one comes: a write in place would change it.
	old := must.Of(os.Open(program)).Get(t)
	defer old.Close()
	write(from+"/tombolo-cni", "new")
	write(from+"/10-tombolo.conflist", network)
	write(program+".new.7", "what a killed install left")
	run("install")
	installed := with("/opt/cni/bin/tombolo", "new", "/opt/cni/bin/loopback", loopback, "/etc/cni/net.d/10-tombolo.conflist", network)
	want("a new version", installed)
	if text, err := io.ReadAll(old); err != nil || string(text) != "#!/bin/sh\nread line\n" {
		t.Errorf("a program that was running is %q now, %v", text, err)
	}
	before := must.Of(os.Stat(program)).Get(t)
	run("install")
	after, err := os.Stat(program)
	expect.That(t, err == nil && os.SameFile(before, after), "what was there already was replaced, %v", err)

	run("uninstall")
	want("uninstalled", others)
	run("uninstall")
	want("uninstalled again", others)

	write(host+"/etc/cni/net.d/10-tombolo.conflist", `{"plugins": [{ "type": "other" }]}`)
	write(host+"/opt/cni/bin/loopback", "the reference's")
	run("uninstall")
	want("where others have such names", with("/etc/cni/net.d/10-tombolo.conflist", `{"plugins": [{ "type": "other" }]}`, "/opt/cni/bin/loopback", "the reference's"))
}

func TestInstallScriptKeepsWhatSomebodyDeletes(t *testing.T) {
	t.Parallel()
	nstest.Need(t, "busybox")
	host, from := t.TempDir(), t.TempDir()
	must.Succeed(t, os.WriteFile(from+"/tombolo-cni", []byte("program"), 0o755))
	cmd := exec.Command("busybox", "sh", filepath.Join(repository, "deploy/kubernetes/install.sh"), "keep")
	cmd.Env = []string{"PATH=" + os.Getenv("PATH"), "HOST=" + host, "FROM=" + from, "EVERY=0.05", "NAMES=" + filepath.Join(repository, "deploy/names.sh")}
	out := must.Of(cmd.StdoutPipe()).Get(t)
	must.Succeed(t, cmd.Start())
	program := host + "/opt/cni/bin/tombolo"
	buffer := make([]byte, 1000)
	for range 2 { // what it prints is the event
		n, err := out.Read(buffer)
		got := string(buffer[:n])
		expect.That(t, err == nil && got == "installed "+program+"\n", "it printed %q, %v", got, err)
		expect.Success(t, os.Remove(program))
	}
	must.Succeed(t, cmd.Process.Signal(os.Interrupt))
	_, _ = io.Copy(io.Discard, out)
	expect.Success(t, cmd.Wait(), "it ends with")
}

func TestWorkflowsParseAndPinTheirActions(t *testing.T) {
	t.Parallel()
	files, err := filepath.Glob(filepath.Join(repository, ".github/workflows/*.yml"))
	must.That(t, err == nil && len(files) > 0, "no workflows, %v", err)
	for _, path := range files {
		list := documents(t, path)
		jobs, ok := list[0]["jobs"].(map[string]any)
		must.That(t, len(list) == 1 && ok && len(jobs) > 0, "%s has %d documents, jobs %v", path, len(list), jobs)
		for name, job := range jobs {
			steps, ok := job.(map[string]any)["steps"].([]any)
			expect.That(t, ok && len(steps) > 0, "%s: job %s has no steps", path, name)
			for _, step := range steps {
				s := step.(map[string]any)
				if uses, ok := s["uses"].(string); ok && !regexp.MustCompile(`^(actions|docker)/[a-z-]+@[0-9a-f]{40}$`).MatchString(uses) {
					t.Errorf("%s: %s names no commit", path, uses)
				}
				line := fmt.Sprint(s["run"])
				for _, m := range regexp.MustCompile(`\bmake ((?:[a-z-]+ )*[a-z-]+)`).FindAllStringSubmatch(line, -1) {
					for target := range strings.FieldsSeq(m[1]) {
						out, err := exec.Command("make", "-C", repository, "-n", target).CombinedOutput()
						expect.That(t, err == nil, "%s: make %s: %v\n%s", path, target, err, out)
					}
				}
			}
		}
	}
}
