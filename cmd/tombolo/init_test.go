package main

import (
	"errors"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/golden"
)

func TestInitKnowsTheRuntimesThatAreThere(t *testing.T) {
	const netavark = "/usr/lib/podman/netavark"
	t.Setenv("PATH", "/usr/bin:/usr/sbin")
	lan := firstNetwork{name: "home", options: "-o mode=lan -o uplink=eth0", docker: "--ipam-driver null"}
	docker := "Docker:\n\n  systemctl stop tombolod\n  systemctl enable --now tombolo-docker.socket tombolod\n" +
		"  docker network create -d tombolo --ipam-driver null -o mode=lan -o uplink=eth0 -o name=home home\n\n"
	podman := "podman 5:\n\n  systemctl enable --now tombolod\n  podman network create -d tombolo -o mode=lan -o uplink=eth0 home\n\n"
	for _, tt := range []struct {
		name     string
		there    []string
		speakers []string
		others   string
	}{
		{"none", nil, nil, ""},
		{"those that speak CNI", []string{"/usr/bin/containerd", "/usr/bin/crio", "/usr/bin/podman"}, []string{"containerd", "crio", "podman 4"}, ""},
		{"podman with netavark", []string{"/usr/bin/podman", netavark}, nil, podman},
		{"Docker, with its containerd", []string{"/usr/bin/containerd", "/usr/sbin/dockerd"}, []string{"containerd"}, docker},
		{"all", []string{"/usr/bin/containerd", "/usr/sbin/dockerd", "/usr/bin/podman", netavark}, []string{"containerd"}, docker + podman},
	} {
		t.Run(tt.name, func(t *testing.T) {
			speakers, others := lan.runtimes(func(path string) bool { return slices.Contains(tt.there, path) })
			expect.NoDiff(t, cmp.Diff(tt.speakers, speakers), "runtimes that speak CNI")
			expect.NoDiff(t, cmp.Diff(tt.others, others), "commands")
		})
	}
}

func TestInitWritesTheFileThatItShows(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	begin := func(args ...string) outcome {
		return run(t, nil, []string{"PATH=" + dir}, "", append([]string{"init", "--dir", dir}, args...)...)
	}
	for _, line := range []string{"lan --uplink lo", "pods --subnet 10.9.0.0/24"} {
		args := strings.Fields(line)
		shown := begin(args...)
		_, err := os.Stat(dir + "/10-home.conflist")
		expect.That(t, shown.status == 0 && (args[0] == "pods" || err != nil), "%s without --yes: %+v", line, shown)
		written, again := begin(append(args, "--yes")...), begin(append(args, "--yes")...)
		expect.Success(t, errors.Join(written.err(), again.err()), "%s --yes", line)
		golden.Compare(t, "init-"+args[0]+".txt", strings.ReplaceAll(shown.stdout+written.stdout+again.stdout, dir, "DIR"))
	}
	other := begin("pods", "--name", "home", "--yes")
	expect.That(t, other.status == exitFailed && strings.Contains(other.stderr, "10-home.conflist exists with other content"), "another file: %+v", other)
	wrong := begin("lan", "--uplink", "lan7")
	expect.That(t, wrong.status == exitFailed && strings.Contains(wrong.stderr, "uplink lan7: the host has no such link"), "a wrong uplink: %+v", wrong)
	none := begin("lan")
	expect.That(t, none.status == exitUsage && strings.Contains(none.stderr, "--uplink is missing"), "no uplink: %+v", none)
}
