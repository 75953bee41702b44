package cni

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/containernetworking/cni/libcni"

	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
)

// These tests run what README.md and docs tell a reader to type, and have libcni read the
// configurations in them.

const repository = "../.."

// docBlock is a fenced block of a page.
type docBlock struct {
	page, language, text string
}

// first is the line by which a block is named below.
func (b docBlock) first() string {
	line, _, _ := strings.Cut(b.text, "\n")
	line, _, _ = strings.Cut(line, " #")
	return b.page + ": " + strings.TrimSpace(line)
}

func docBlocks(t testing.TB) []docBlock {
	t.Helper()
	pages, err := filepath.Glob(repository + "/docs/*.md")
	must.That(t, err == nil && len(pages) >= 10, "%d pages, %v", len(pages), err)
	var list []docBlock
	for _, path := range append(pages, repository+"/README.md") {
		text := must.Of(os.ReadFile(path)).Get(t)
		page := must.Of(filepath.Rel(repository, path)).Get(t)
		for _, m := range regexp.MustCompile("(?ms)^```([a-z]*)\n(.*?)^```$").FindAllStringSubmatch(string(text), -1) {
			list = append(list, docBlock{page, m[1], m[2]})
		}
	}
	return list
}

// Where each block of commands is run, in this order. A machine has a LAN, or a host
// outside that it reaches.
type docLab struct {
	name   string
	lan    bool
	config string // a page whose first configuration is put into /etc/cni/net.d
	blocks []string
	output []string // what is printed among the rest
}

func docLabs() []docLab {
	return []docLab{
		{
			name:   "README",
			blocks: []string{"README.md: make install", "README.md: tombolo init pods --yes"},
			output: []string{"inet 10.22.0.2/16"},
		},
		{
			name:   "podman",
			blocks: []string{"docs/getting-started.md: make install", "docs/getting-started.md: podman --network-backend cni run --rm --network pods docker.io/library/busybox ip address"},
			output: []string{"inet 10.22.0.2/16", "inet6 fd22::2/64"},
		},
		{
			name:   "getting started",
			blocks: []string{"docs/getting-started.md: make install", "docs/getting-started.md: export CNI_PATH=/opt/cni/bin", "docs/getting-started.md: tombolo remove pods", "docs/getting-started.md: ctr image pull docker.io/library/busybox:latest"},
			output: []string{"CNI 0.1.0", `"address": "10.22.0.2/16"`, "1 packets received", "inet 10.22.0."},
		},
		{
			name: "LAN", lan: true, config: "docs/lan.md",
			blocks: []string{"docs/getting-started.md: make install", "docs/lan.md: ip route show default", "docs/lan.md: ctr image pull docker.io/library/nginx:alpine",
				"docs/lan.md: ctr task delete --force web"},
			output: []string{"default via 192.168.50.1 dev eth0", "br0", "192.168.50.1", "network home is removed"},
		},
		{
			name: "Multus' configuration", lan: true, config: "docs/coming-from.md",
			blocks: []string{"docs/getting-started.md: make install", "docs/lan.md: ip route show default", "docs/lan.md: ctr image pull docker.io/library/nginx:alpine"},
			output: []string{"sw-lan", "192.168.50."},
		},
		{
			name: "LAN with podman", lan: true, config: "docs/lan.md",
			blocks: []string{"docs/getting-started.md: make install", "docs/lan.md: ip route show default", "docs/lan.md: podman --network-backend cni run -d --name web --network home docker.io/library/nginx:alpine"},
			output: []string{"home", "192.168.50."},
		},
		{
			name: "takeover", lan: true,
			blocks: []string{"docs/getting-started.md: make install", "docs/lan.md: ip route show default", "docs/lan.md: tombolo uplink plan --take eth0 br0"},
		},
		{
			name: "keeper", lan: true,
			blocks: []string{"docs/getting-started.md: make install", "docs/dhcp.md: systemctl enable --now tombolod"},
		},
		{
			name:   "cluster", // TestDoctorFollowsTheWayToAnotherNodesPods says what it is good for
			blocks: []string{"docs/cluster.md: iptables -A FORWARD -s 10.244.0.0/16 -o cbr0 -j ACCEPT"},
		},
		{
			name:   "drop-in",
			blocks: []string{"docs/getting-started.md: make install", "docs/coming-from.md: tombolo install --names all /opt/cni/bin", "docs/drop-in.md: tombolo install --names all /opt/cni/bin", "docs/drop-in.md: tombolo install --undo /opt/cni/bin", "docs/drop-in.md: tombolo gc"},
		},
		{
			name:   "embedding",
			blocks: []string{"docs/embedding.md: cd test/embed"},
			output: []string{"BenchmarkPod", "flat%", "alloc_objects"},
		},
	}
}

// notRun are the blocks of commands that no test can run.
func notRun() map[string]string {
	return map[string]string{
		"docs/embedding.md: go get github.com/tombolo-cni/tombolo@latest":                                                                               "it asks the Internet for the module; test/embed uses the module as another would",
		"docs/lan.md: podman network create -d tombolo -o mode=lan -o uplink=eth0 home":                                                                 "test/podman/run.sh runs it, in a Debian 13",
		"docs/lan.md: systemctl stop tombolod":                                                                                                          "test/docker runs it, with a dockerd",
		"docs/getting-started.md: systemctl stop tombolod":                                                                                              "likewise",
		"README.md: curl -fLO https://github.com/tombolo-cni/tombolo/releases/download/v0.1.0/tombolo_0.1.0_amd64.deb":                                  "test/deb.sh runs it, in a clean root",
		"docs/getting-started.md: curl -fL https://github.com/tombolo-cni/tombolo/releases/download/v0.1.0/tombolo-v0.1.0-linux-amd64.tar.gz | tar -xz": "likewise",
		"README.md: curl -fL https://github.com/tombolo-cni/tombolo/releases/download/v0.1.0/tombolo-v0.1.0-image-amd64.tar.gz | docker load":           "test/docker runs it, with a dockerd",
		"docs/coming-from.md: docker network create -d tombolo --ipam-driver null -o mode=lan -o uplink=eth0 my-dhcp-net":                               "likewise",
		"docs/coming-from.md: docker network create -d tombolo --subnet 192.168.50.0/24 --gateway 192.168.50.1 --ip-range 192.168.50.192/27 \\":         "likewise",
		"docs/coming-from.md: docker network create -d tombolo --ipam-driver null -o mode=lan -o uplink=eth0 wire":                                      "likewise",
		"docs/coming-from.md: docker network create -d tombolo --subnet 10.80.0.0/24 -o publishAdmission=false safe":                                    "likewise",
		"docs/coming-from.md: podman network create -d tombolo -o mode=lan -o uplink=eth0 webnetwork":                                                   "test/podman/run.sh runs it, in a Debian 13",
		"docs/lan.md: docker compose up --no-start":                                                                                                     "Debian 12 has no compose of version 2",
		"docs/getting-started.md: podman network create -d tombolo pods":                                                                                "test/podman/run.sh runs it",
	}
}

func TestDocsCommandsAreRun(t *testing.T) {
	t.Parallel()
	used := notRun()
	for _, lab := range docLabs() {
		for _, block := range lab.blocks {
			used[block] = "run"
		}
	}
	for _, b := range docBlocks(t) {
		if b.language != "sh" {
			if !slices.Contains([]string{"json", "go", "text", "ini"}, b.language) {
				t.Errorf("%s has a block in language %q: a block of commands is sh, of output text", b.first(), b.language)
			}
			continue
		}
		if used[b.first()] == "" {
			t.Errorf("%s is in no lab: have it run, or say in notRun why that cannot be", b.first())
		}
		delete(used, b.first())
	}
	for name := range used {
		t.Errorf("no page has the block %s", name)
	}
	for _, lab := range docLabs() {
		nstest.RunParallel(t, lab.name, func(t *testing.T) {
			lab.run(t)
		})
	}
}

func (lab docLab) run(t *testing.T) {
	for _, program := range []string{"unshare", "bash", "make", "go", "busybox", "containerd", "runc", "ctr"} {
		nstest.Need(t, program)
	}
	if lab.name == "podman" {
		if version, err := exec.Command("podman", "--version").Output(); err != nil || !strings.Contains(string(version), "version 4.") {
			t.Skipf("podman 4 is not installed: %s %v", version, err)
		}
	}
	n := lab.node(t)
	var script strings.Builder
	script.WriteString("source test/cni/testdata/lab.sh\n")
	if lab.config != "" {
		file := filepath.Join(t.TempDir(), "10-docs.conflist")
		must.Succeed(t, os.WriteFile(file, []byte(docConfig(t, lab.config)), 0o644))
		fmt.Fprintf(&script, "mkdir -p /etc/cni/net.d && cp %s /etc/cni/net.d/\n", file)
	}
	blocks := docBlocks(t)
	for _, name := range lab.blocks {
		i := slices.IndexFunc(blocks, func(b docBlock) bool { return b.first() == name })
		must.That(t, i >= 0, "no page has the block %s", name)
		fmt.Fprintf(&script, "set -x\n%s\n{ set +x; } 2>/dev/null\n", blocks[i].text)
	}
	script.WriteString("echo DONE\n")
	unshare := must.Of(exec.LookPath("unshare")).Get(t)
	root := must.Of(filepath.Abs(repository)).Get(t)
	environ := append(os.Environ(), "REPOSITORY="+root, "PATH="+os.Getenv("PATH")+":"+built+":"+cniPath)
	o, err := n.exec(context.Background(), unshare, nil, environ,
		"--mount", "--pid", "--fork", "--mount-proc", "--kill-child", "--wd", root, "bash", "-c", script.String())
	must.Succeed(t, err)
	removePodmansGroups()
	for _, want := range append(slices.Clone(lab.output), "DONE") {
		expect.Contains(t, o.stdout, want)
	}
	expect.That(t, !t.Failed() && o.status == 0, "exit status %d\n%s\n%s", o.status, o.stdout, o.stderr)
}

// node is the machine: its NIC is eth0, and the default route goes by it.
func (lab docLab) node(t *testing.T) *node {
	if lab.lan {
		return homeLAN(t).node
	}
	n := newNode(t)
	n.outside()
	return n
}

func docConfig(t testing.TB, page string) string {
	t.Helper()
	for _, b := range docBlocks(t) {
		if b.page == page && b.language == "json" {
			return b.text
		}
	}
	t.Fatalf("%s has no configuration", page)
	return ""
}

func TestDocsConfigurationsAreReadByLibcni(t *testing.T) {
	t.Parallel()
	found := map[string]int{}
	for _, b := range docBlocks(t) {
		if b.language != "json" {
			continue
		}
		var err error
		switch {
		case strings.Contains(b.text, `"plugins"`):
			found["list"]++
			_, err = libcni.ConfListFromBytes([]byte(b.text))
		case strings.Contains(b.text, `"type"`):
			found["network"]++
			_, err = libcni.NetworkPluginConfFromBytes([]byte(b.text))
		default:
			found["other"]++
			unmarshal(t, b.text, &map[string]any{})
		}
		expect.That(t, err == nil, "%s: %v\n%s", b.page, err, b.text)
	}
	expect.That(t, found["list"] >= 6 && found["network"] >= 8 && found["other"] == 1,
		"found %v: these are not all", found)
}

// Runtimes that know no cniVersions speak the first, and the others choose the last, which has
// GC and STATUS. What is one network of its own has no such list.
func TestShippedListsAreForOldRuntimesAndNew(t *testing.T) {
	t.Parallel()
	lists := map[string]string{}
	for i, b := range docBlocks(t) {
		if b.language == "json" && strings.Contains(b.text, `"type": "tombolo"`) {
			lists[fmt.Sprintf("%s (block %d)", b.page, i)] = b.text
		}
	}
	for _, pattern := range []string{"/deploy/*.conflist", "/deploy/*/*.conflist*"} {
		paths, err := filepath.Glob(repository + pattern)
		must.That(t, err == nil && len(paths) > 0, "%s: %v, %v", pattern, paths, err)
		for _, path := range paths {
			text := must.Of(os.ReadFile(path)).Get(t)
			lists[path] = regexp.MustCompile(`(?s)\{\{if.*?\{\{end\}\}|\{\{.*?\}\}`).ReplaceAllString(string(text), "")
		}
	}
	expect.That(t, len(lists) >= 10, "%d configurations: these are not all", len(lists))
	for name, text := range lists {
		var c struct {
			CNIVersion  string   `json:"cniVersion"`
			CNIVersions []string `json:"cniVersions"`
			Plugins     []any    `json:"plugins"`
		}
		unmarshal(t, text, &c)
		if c.CNIVersion != "1.0.0" || c.Plugins != nil && !slices.Equal(c.CNIVersions, []string{"1.0.0", "1.1.0"}) {
			t.Errorf("%s: cniVersion %q, cniVersions %q", name, c.CNIVersion, c.CNIVersions)
		}
	}
}
