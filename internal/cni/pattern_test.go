package cni

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
		".*", "", "$", "^", "^$", "x", `^net\.ipv4\..*$`, "^[.]", "a.b", `^net.ipv4.conf.[a-z0-9_-]+.arp_filter$`, "[-a]b", "^[-]",
	} {
		for _, name := range names {
			got, err := matchesPattern(pattern, name)
			if want := regexp.MustCompile(pattern).MatchString(name); err != nil || got != want {
				t.Errorf("%q in %q: %t, %v, want %t", pattern, name, got, err, want)
			}
		}
	}
	for _, pattern := range []string{"(a|b)", "a|b", `\d`, "[^a]", "[[:alpha:]]", "a**", "a{2}", "*a", "a^", "a$b", "[", "[]", `\`, `[\]]`, "(?i)a"} {
		if got, err := matchesPattern(pattern, "a"); err == nil {
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
		got, err := matchesPattern(pattern, name)
		if err != nil {
			return
		}
		if re, err := regexp.Compile(pattern); err == nil && re.MatchString(name) != got {
			t.Errorf("%q in %q: %t", pattern, name, got)
		}
	})
}
