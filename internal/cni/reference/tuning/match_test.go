package tuning

import (
	"regexp"
	"testing"
)

// What a pattern matches is what the library's regular expressions do, and what is not known is an
// error.
func TestPatternsAreRegularExpressions(t *testing.T) {
	t.Parallel()
	names := []string{"", "a", "net.core.somaxconn", "net.ipv4.conf.eth0.arp_filter", "net.ipv4.conf.IFNAME.arp_filter", "net/core/x", "xnet.core", "aab", "abb"}
	for _, pattern := range []string{
		"^net.core.somaxconn$", `^net\.core\.somaxconn$`, "net", "conf", "^net.ipv4.conf.[a-zA-Z0-9]+.arp_filter$", "^net[./]core", "^a*b$", "^a+b", "ab?b$",
		".*", "", "$", "^", "^$", "x", `^net\.ipv4\..*$`, "[a-]b", "^[.]", "a.b",
	} {
		for _, name := range names {
			got, err := matches(pattern, name)
			if want := regexp.MustCompile(pattern).MatchString(name); err != nil || got != want {
				t.Errorf("%q in %q: %t, %v, want %t", pattern, name, got, err, want)
			}
		}
	}
	for _, pattern := range []string{"(a|b)", "a|b", `\d`, "[^a]", "[[:alpha:]]", "a**", "a{2}", "*a", "a^", "a$b", "[", "[]", `\`, `[\]]`, "(?i)a"} {
		if got, err := matches(pattern, "a"); err == nil {
			t.Errorf("%q: %t, and no error", pattern, got)
		}
	}
}

func FuzzPattern(f *testing.F) {
	f.Add("^net[a-z.]+x?$", "net.core.x")
	f.Fuzz(func(t *testing.T, pattern, name string) {
		if len(pattern) > 12 || len(name) > 12 {
			return
		}
		for _, c := range []byte(pattern + name) {
			if c >= 0x80 || c == '\n' {
				return // the library goes by runes
			}
		}
		got, err := matches(pattern, name)
		if err != nil {
			return
		}
		if re, err := regexp.Compile(pattern); err == nil && re.MatchString(name) != got {
			t.Errorf("%q in %q: %t", pattern, name, got)
		}
	})
}

func TestAllowlistNamesWhatIsAllowed(t *testing.T) {
	t.Parallel()
	const list = "^net.core.somaxconn$\n\n ^net\\.ipv4\\.conf\\.IFNAME\\.[a-z_]+$ \n"
	for key, want := range map[string]bool{"net.core.somaxconn": true, "net.ipv4.conf.IFNAME.arp_filter": true, "net.ipv4.conf.all.arp_filter": false, "xnet.core.somaxconn": false} {
		if err := allowedBy(list, map[string]string{key: "1"}); (err == nil) != want {
			t.Errorf("%s: %v", key, err)
		}
	}
	if err := allowedBy("a|b\n.*", map[string]string{"net.core.somaxconn": "1"}); err == nil {
		t.Error("a pattern that is not known allows")
	}
}
