package tuning

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"net"
	"os"
	"path/filepath"
	"strings"

	"github.com/containernetworking/cni/pkg/types"
	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/cni/cniargs"
	"github.com/tombolo-cni/tombolo/internal/cni/reference"
	"github.com/tombolo-cni/tombolo/internal/file"
)

// settings are what is to be set; nil, empty or 0 leaves it. Promisc can only be switched on.
type settings struct {
	Sysctl   sysctls `json:"sysctl"`
	MAC      *string `json:"mac"`
	Promisc  *bool   `json:"promisc"`
	MTU      *int    `json:"mtu"`
	AllMulti *bool   `json:"allmulti"`
	TxQLen   *int    `json:"txQLen"`
}

// sysctls are kernel parameters by name. One that stands there twice is an error, as in the
// reference: nobody knows which is meant.
type sysctls map[string]string

// UnmarshalJSON reads an object of strings.
func (s *sysctls) UnmarshalJSON(data []byte) error {
	var values map[string]string
	if err := json.Unmarshal(data, &values); err != nil {
		return err
	}
	// Keys and values are strings, whose quotes are those that no backslash is before.
	quotes, escaped := 0, false
	for _, c := range data {
		if c == '"' && !escaped {
			quotes++
		}
		escaped = c == '\\' && !escaped
	}
	if *s = values; quotes != 4*len(values) && quotes != 0 {
		return errors.New("a parameter stands there twice")
	}
	return nil
}

// JSONExpects says what to write.
func (sysctls) JSONExpects() string { return "an object of strings, each key once" }

// conf is the plugin's configuration.
type conf struct {
	settings
	DataDir       string `json:"dataDir"`
	RuntimeConfig struct {
		MAC string `json:"mac"`
	} `json:"runtimeConfig"`
	Args struct {
		CNI settings `json:"cni"`
	} `json:"args"`

	mac net.HardwareAddr // nil: as it is
	mtu int              // 0: as it is
}

const (
	defaultDataDir = "/run/cni/tuning"
	allowlistFile  = "/etc/cni/tuning/allowlist.conf"
)

// read reads the configuration. Of the places that name a MAC the later ones count: the field,
// CNI_ARGS, runtimeConfig and args.
func read(c *reference.Call) (*conf, error) {
	var f conf
	if err := c.Unmarshal(&f); err != nil {
		return nil, err
	}
	if f.DataDir == "" {
		f.DataDir = defaultDataDir
	}
	args, err := cniargs.Parse(c.Args)
	if err != nil {
		return nil, err
	}
	mac := args["MAC"]
	if f.RuntimeConfig.MAC != "" {
		mac = f.RuntimeConfig.MAC
	}
	if mac != "" {
		f.MAC = &mac
	}
	f.override(&f.Args.CNI)
	if f.MAC != nil && *f.MAC != "" {
		if f.mac, err = net.ParseMAC(*f.MAC); err != nil {
			return nil, reference.Errorf(types.ErrInvalidNetworkConfig, "mac: %v", err)
		}
	}
	if f.MTU != nil {
		f.mtu = *f.MTU
	}
	if f.mtu < 0 || f.TxQLen != nil && *f.TxQLen < 0 {
		return nil, reference.Errorf(types.ErrInvalidNetworkConfig, "mtu and txQLen cannot be negative")
	}
	return &f, nil
}

// override has what is set in other count.
func (s *settings) override(other *settings) {
	if s.Sysctl == nil {
		s.Sysctl = map[string]string{}
	}
	maps.Copy(s.Sysctl, other.Sysctl)
	if other.MAC != nil {
		s.MAC = other.MAC
	}
	if other.Promisc != nil {
		s.Promisc = other.Promisc
	}
	if other.MTU != nil {
		s.MTU = other.MTU
	}
	if other.AllMulti != nil {
		s.AllMulti = other.AllMulti
	}
	if other.TxQLen != nil {
		s.TxQLen = other.TxQLen
	}
}

// ofLink says that something of the link is to be set.
func (f *conf) ofLink() bool {
	return f.mac != nil || f.mtu != 0 || f.promisc() || f.AllMulti != nil || f.TxQLen != nil
}

func (f *conf) promisc() bool { return f.Promisc != nil && *f.Promisc }

// sysctlFile is the file of a kernel parameter: of those of the network only, which each
// namespace has for itself. IFNAME stands for the pod's interface.
func sysctlFile(key, ifName string) (string, error) {
	path := filepath.Join("/proc/sys", strings.Replace(strings.ReplaceAll(key, ".", "/"), "IFNAME", ifName, 1))
	if !strings.HasPrefix(path, "/proc/sys/net/") {
		return "", reference.Errorf(types.ErrInvalidNetworkConfig, "sysctl %q does not begin with net: a pod has only those for itself", key)
	}
	return path, nil
}

// allowed refuses kernel parameters that the node's operator has not allowed. Without the list all
// are.
func (f *conf) allowed() error {
	if len(f.Sysctl) == 0 {
		return nil
	}
	data, err := os.ReadFile(allowlistFile)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	return allowedBy(string(data), f.Sysctl)
}

func allowedBy(list string, sysctls map[string]string) error {
	for key := range sysctls {
		found := false
		for line := range strings.Lines(list) {
			if line = strings.TrimSpace(line); line == "" {
				continue
			}
			ok, err := matches(line, key)
			if err != nil {
				return reference.Errorf(types.ErrInvalidNetworkConfig, "%s: %v", allowlistFile, err)
			}
			found = found || ok
		}
		if !found {
			return reference.Errorf(types.ErrInvalidNetworkConfig, "sysctl %q is not allowed by %s", key, allowlistFile)
		}
	}
	return nil
}

// backup is what the link had before, by which DEL reverts it: the reference's file.
type backup struct {
	MAC      string  `json:"mac,omitempty"`
	Promisc  *bool   `json:"promisc,omitempty"`
	MTU      int     `json:"mtu,omitempty"`
	AllMulti *bool   `json:"allmulti,omitempty"`
	TxQLen   *uint32 `json:"txQLen,omitempty"`
}

func (f *conf) file(c *reference.Call) string {
	return filepath.Join(f.DataDir, c.ContainerID+"_"+c.IfName+".json")
}

// save writes the file whole, and through no link.
func (b *backup) save(path string) error {
	var lines []string
	add := func(name string, there bool, value any) {
		if there {
			lines = append(lines, fmt.Sprintf(" %q: %v", name, value))
		}
	}
	add("mac", b.MAC != "", `"`+b.MAC+`"`)
	if b.Promisc != nil {
		add("promisc", true, *b.Promisc)
	}
	add("mtu", b.MTU != 0, b.MTU)
	if b.AllMulti != nil {
		add("allmulti", true, *b.AllMulti)
	}
	if b.TxQLen != nil {
		add("txQLen", true, *b.TxQLen)
	}
	return file.Replace(path+".new", unix.O_TRUNC, path, []byte("{\n"+strings.Join(lines, ",\n")+"\n}"))
}

// load reads it; nil where there is none, or none that can be read.
func load(path string) *backup {
	data, err := file.Read(path, file.MaxRecord)
	var b backup
	if err != nil || json.Unmarshal(data, &b) != nil {
		return nil
	}
	return &b
}
