package containerd

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/containernetworking/cni/libcni"

	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/golden"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
)

func TestTemplateYieldsANetworkOfThePodCIDRs(t *testing.T) {
	t.Parallel()
	for name, cidrs := range map[string]string{
		"ipv4": "10.22.0.0/24",
		"ipv6": "fd22::/64",
		"dual": "10.22.0.0/24,fd22::/64",
	} {
		nstest.RunParallel(t, name, func(t *testing.T) {
			got := renderTemplate(t, cidrs)
			golden.Compare(t, name+".conflist", got)
		})
	}
}

// containerd 1.6 and 1.7 speak 1.0.0 at most, and know nothing of cniVersions; with
// 1.1.0, which containerd speaks from 2.0 on, come STATUS and GC.
func TestTemplateLetsNewRuntimesSpeakTheNewVersion(t *testing.T) {
	t.Parallel()
	list := must.Of(libcni.ConfListFromBytes([]byte(renderTemplate(t, "10.22.0.0/24")))).Get(t)
	expect.Equal(t, list.CNIVersion, "1.1.0", "a runtime that speaks 1.1.0 chooses")
}

func TestReadmeConfiguresContainerd(t *testing.T) {
	t.Parallel()
	requirePrograms(t)
	readme := must.Of(os.ReadFile("../../deploy/containerd/README.md")).Get(t)
	// The form of containerd 1.x, which later ones read too.
	_, config, _ := strings.Cut(string(readme), "```toml\n")
	config, _, found := strings.Cut(config, "```")
	must.That(t, found, "the README has no configuration")
	path := filepath.Join(t.TempDir(), configName)
	must.Succeed(t, os.WriteFile(path, []byte(config), 0o644))
	effective := nstest.Run(t, nil, "containerd", "--config", path, "config", "dump")
	for _, want := range []string{"conf_dir = ./etc/cni/net.d.", "conf_template = ./etc/containerd/10-tombolo.conflist.template."} {
		expect.That(t, regexp.MustCompile(want).MatchString(effective),
			"containerd does not have %s:\n%s", want, effective)
	}
}
