package cni

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"io/fs"
	"maps"
	"net"
	"path/filepath"
	"regexp"
	"slices"
	"strings"

	"github.com/go-json-experiment/json/jsontext"
	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/file"
	"github.com/tombolo-cni/tombolo/internal/link"
	"github.com/tombolo-cni/tombolo/internal/nl"
)

// attributes holds the link attributes that the plugin tuning sets, as fields of its configuration. nil leaves an
// attribute unchanged.
type attributes struct {
	MAC      *string `json:"mac,omitempty"`
	Promisc  *bool   `json:"promisc,omitempty"` // a configuration can only switch it on
	MTU      *int    `json:"mtu,omitempty"`
	AllMulti *bool   `json:"allmulti,omitempty"`
	TxQLen   *int    `json:"txQLen,omitempty"`
}

// currentValues returns the link's current values of the attributes that are not nil in a. The rest is nil.
func (a attributes) currentValues(l *link.Info) attributes {
	return attributes{
		pointerIfSet(a.MAC, l.MAC.String()), pointerIfSet(a.Promisc, l.Flags&unix.IFF_PROMISC != 0),
		pointerIfSet(a.MTU, l.MTU),
		pointerIfSet(a.AllMulti, l.Flags&unix.IFF_ALLMULTI != 0), pointerIfSet(a.TxQLen, int(l.TxQLen)),
	}
}

// pointerIfSet returns a pointer to have, or nil if set is nil.
func pointerIfSet[T any](set *T, have T) *T {
	if set == nil {
		return nil
	}
	return &have
}

// set changes the link's attributes that are not nil in a, by one netlink message.
func (a attributes) set(conn *nl.Conn, l *link.Info, name string) error {
	r := link.Request{Index: l.Index, MAC: a.mac(), MTU: a.MTU}
	for bit, isOn := range map[uint32]*bool{unix.IFF_PROMISC: a.Promisc, unix.IFF_ALLMULTI: a.AllMulti} {
		if isOn != nil {
			r.Change |= bit
		}
		if orZero(isOn) {
			r.Flags |= bit
		}
	}

	if a.TxQLen != nil {
		r.TxQLen = new(uint32(*a.TxQLen))
	}

	return r.Apply(context.Background(), conn, "tune link", name)
}

// mac returns the MAC to set, or nil if there is none.
func (a attributes) mac() net.HardwareAddr {
	mac, _ := net.ParseMAC(orZero(a.MAC))
	return mac
}

// tuningConf is the configuration of the reference plugin tuning, which sets kernel parameters of a pod and
// attributes of its interface.
type tuningConf struct {
	Common
	tuningSettings
	DataDir string `json:"dataDir"`
}

// tuningSettings holds the kernel parameters and link attributes to set.
type tuningSettings struct {
	Sysctl sysctls `json:"sysctl"`
	attributes
}

// sysctls maps the names of kernel parameters to values. As in the reference plugin, a duplicate name is an error,
// since it is unclear which value is intended.
type sysctls map[string]string

// UnmarshalJSON parses an object whose values are strings. It returns an error for a key that occurs twice.
func (s *sysctls) UnmarshalJSON(data []byte) error {
	if !jsontext.Value(data).IsValid(jsontext.AllowInvalidUTF8(true)) {
		return errors.New("a parameter is given twice")
	}
	return json.Unmarshal(data, (*map[string]string)(s))
}

// JSONExpects describes the JSON that the type accepts, for errors.
func (sysctls) JSONExpects() string { return "an object of strings, each key once" }

const (
	defaultTuningDir = "/run/cni/tuning"
	allowlistFile    = "/etc/cni/tuning/allowlist.conf"
)

// complete merges the settings from all sources, and drops attributes that request no change. For the MAC the order of
// precedence, lowest first, is: the field mac, CNI_ARGS, runtimeConfig, args.cni.
func (f *tuningConf) complete(c *call) {
	f.Common.complete(c)
	f.DataDir = cmp.Or(f.DataDir, defaultTuningDir)
	args, err := parseArgs(c.args)
	if err != nil {
		c.undecoded = append(c.undecoded, err)
	}

	if mac := cmp.Or(f.RuntimeConfig.MAC, args["MAC"]); mac != "" {
		f.MAC = &mac
	}

	c.readArgs(&f.tuningSettings) // args.cni replaces only the settings that it has
	f.MAC, f.MTU, f.Promisc = unlessZero(f.MAC), unlessZero(f.MTU), unlessZero(f.Promisc)
}

// unlessZero returns p, or nil if *p is zero.
func unlessZero[T comparable](p *T) *T {
	if orZero(p) == *new(T) {
		return nil
	}
	return p
}

func (f *tuningConf) problems() []error {
	p := problems(f.Common.problems())
	if f.MAC != nil {
		_, err := net.ParseMAC(*f.MAC)
		p.add(err != nil, "mac: %v", err)
	}

	p.add(orZero(f.MTU) < 0 || orZero(f.TxQLen) < 0, "mtu and txQLen cannot be negative")
	for _, key := range slices.Sorted(maps.Keys(f.Sysctl)) {
		p.add(!strings.HasPrefix(sysctlFile(key, "IFNAME"), "/proc/sys/net/"),
			"sysctl %q does not begin with net: a pod has only those for itself", key)
	}
	return p
}

// sysctlFile returns the path of a kernel parameter's file. IFNAME in key stands for the pod's interface.
func sysctlFile(key, ifName string) string {
	return filepath.Join("/proc/sys", strings.Replace(strings.ReplaceAll(key, ".", "/"), "IFNAME", ifName, 1))
}

// checkAllowed returns an error if the operator's list, allowlistFile, does not allow one of the kernel parameters.
// Without that file all parameters are allowed.
func (f *tuningConf) checkAllowed(ctx context.Context) error {
	list, err := file.ReadNamed(ctx, allowlistFile, file.MaxRecord, 0)
	if len(f.Sysctl) == 0 || errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	return checkAllowlist(string(list), f.Sysctl)
}

// checkAllowlist returns an error unless each parameter's name matches one of the regular expressions in list. The list
// has one expression a line.
func checkAllowlist(list string, parameters map[string]string) error {
	for key := range parameters {
		found := false
		for line := range strings.Lines(list) {
			pattern := strings.TrimSpace(line)
			ok, err := regexp.MatchString(pattern, key)
			if err != nil {
				return newError(codeInvalidConfig, "%s: %v", allowlistFile, err)
			}
			found = found || ok && pattern != ""
		}

		if !found {
			return newError(codeInvalidConfig, "sysctl %q is not allowed by %s", key, allowlistFile)
		}
	}

	return nil
}
