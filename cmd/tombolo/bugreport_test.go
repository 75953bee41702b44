package main

import (
	"os"
	"strings"
	"testing"

	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
)

func TestABugReportHasWhatIsNeededAndNoSecrets(t *testing.T) {
	t.Parallel()
	ns, dir := nstest.New(t), t.TempDir()
	for name, text := range map[string]string{
		"10-chain.conflist": `{"cniVersion": "1.0.0", "name": "chain", "unknown": "SECRET1", "plugins": [
			{"type": "calico", "token": "SECRET2", "mtu": "SECRET3", "ipam": {"type": "host-local", "subnet": "SECRET4"}},
			{"type": "tombolo", "mtu": 1400, "_note": "SECRET5", "pasword": "SECRET6", "args": {"cni": {"mac": "SECRET7"}}, "type": "/opt/tombolo",
			 "ipam": {"type": "whereabouts", "subnet": "SECRET8", "kubeconfig": {"name": "SECRET9"}}},
			{"type": "tombolo", "internal": true, "ipam": {"type": "dhcp", "clientID": "pod", "provide": [{"option": "90", "value": "SECRET10"}]}},
			{"type": {"name": "x", "key": "SECRET11"}}]}`,
		"20-torn.conf": `{"name": "SECRET12`, "30-list.json": `["SECRET"]`,
	} {
		must.Succeed(t, os.WriteFile(dir+"/"+name, []byte(text), 0o600))
	}
	nstest.Run(t, ns, "nft", `add table inet other; add chain inet other f { type filter hook forward priority 5; comment "SECRET13"; }; add table inet tombolo; add chain inet tombolo x { comment "of ours"; }`)
	path := dir + "/report"
	args := []string{"bugreport", path, "--dir", dir, "--state", forge(t), "--leases", t.TempDir()}
	got := run(t, ns, []string{"TOKEN=SECRET14"}, "", args...)
	expect.That(t, got.status == 0 && got.stderr == "" && strings.HasPrefix(got.stdout, path+" is written: "), "outcome is %+v", got)
	text := string(mustRead(t, path))
	for _, want := range []string{"### tombolo version\n", "\nCNI 0.1.0", "Linux ", "pods       3, 3 of them not", "3 attachments, 3 of them differ", "default/web-0  0123456789ab",
		"no lease is on record", "no NIC is shared or taken over", "tombolo: a problem was found\n```\n",
		`{"_note":"(left out)","args":"(left out)","ipam":{"kubeconfig":"(left out)","subnet":"(left out)","type":"whereabouts"},"mtu":1400,`,
		`{"ipam":"(left out)","mtu":"(left out)","token":"(left out)","type":"calico"}`, `"clientID":"pod"`, `"internal":true,`, "20-torn.conf: unexpected end"} {
		expect.Contains(t, text, want)
	}
	expect.That(t, !strings.Contains(text, "SECRET"), "it has a secret:\n%s", text)
	info := must.Of(os.Stat(path)).Get(t)
	expect.Equal(t, info.Mode(), os.FileMode(0o600), "mode")
	got = run(t, ns, nil, "", args...)
	expect.That(t, got.status == exitFailed && strings.Contains(got.stderr, "file exists") && string(mustRead(t, path)) == text, "a second time: %+v", got)
}
