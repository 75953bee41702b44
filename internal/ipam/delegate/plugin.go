package delegate

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/containernetworking/cni/pkg/types"
	current "github.com/containernetworking/cni/pkg/types/100"
	"github.com/containernetworking/cni/pkg/types/create"
)

// ErrNotFound means that the plugin is in no directory of CNI_PATH or, for Forward, that its file is missing.
var ErrNotFound = errors.New("plugin not found")

// ErrBadResult means that a plugin succeeded but printed no valid result.
var ErrBadResult = errors.New("plugin printed no valid CNI result")

// A Plugin describes a plugin to run, and its parameters for all verbs.
type Plugin struct {
	Name        string   // its type, which is also the name of its binary
	Path        string   // CNI_PATH: the directories to search, separated by colons; also passed to the plugin
	ContainerID string   // CNI_CONTAINERID; empty in GC and STATUS
	NetNS       string   // CNI_NETNS; may be empty in DEL
	IfName      string   // CNI_IFNAME
	Args        string   // CNI_ARGS
	Environ     []string // the rest of the environment; the variables above replace those in it
	IsIPAM      bool     // it must not be Tombolo, which would call itself
	Stdin       []byte   // the complete configuration of the calling plugin

	// Stderr receives the plugin's stderr while the plugin runs. If nil, the output is dropped, but an error may still
	// quote its end.
	Stderr io.Writer
}

// Find returns the path of the executable file called name in the first directory that has such a file. path is a
// list of directories like CNI_PATH. If no directory has such a file, the error matches ErrNotFound.
func Find(name, path string) (string, error) {
	if name == "" || name != filepath.Base(name) {
		return "", fmt.Errorf("find plugin %q: not the name of a file: %w", name, ErrNotFound)
	}

	for _, dir := range filepath.SplitList(path) {
		if dir == "" {
			continue
		}
		file := filepath.Join(dir, name)
		info, err := os.Stat(file)
		if err == nil && info.Mode().IsRegular() && info.Mode()&0o111 != 0 {
			return file, nil
		}
	}

	if path == "" {
		return "", fmt.Errorf("find plugin %q: CNI_PATH is empty: %w", name, ErrNotFound)
	}

	return "", fmt.Errorf("find plugin %q: no such executable in CNI_PATH (%s): %w", name, path, ErrNotFound)
}

// Add runs the plugin with ADD, and returns its result, converted to the latest version of the specification. A result
// with null entries is an error. If Add fails with any error except ErrNotFound and ErrSelf, the caller must call Run
// with DEL (CNI specification 1.1.0, section 4).
func (p *Plugin) Add(ctx context.Context) (*current.Result, error) {
	stdout, err := p.run(ctx, "ADD")
	if err != nil {
		return nil, err
	}
	return p.decode(stdout)
}

// Run runs the plugin with a verb other than ADD. For CHECK the configuration must contain prevResult, and for GC
// cni.dev/valid-attachments. If a plugin does not know GC or STATUS, Run returns nil, since the plugin's ADD may work
// nevertheless.
func (p *Plugin) Run(ctx context.Context, verb string) error {
	_, err := p.run(ctx, verb)
	if verb == "GC" || verb == "STATUS" {
		return tolerateUnknownVerb(err)
	}
	return err
}

// Forward runs the program in file with environ, one digit deeper (see Deeper), and stdin. It returns the program's
// output. If file cannot be examined, for example because it is missing, the error matches ErrNotFound. If file is
// Tombolo, it matches ErrSelf. If the program does not know the verb, Forward returns no error. Otherwise it fails as
// run does.
func Forward(ctx context.Context, file string, environ []string, stdin []byte, stderr io.Writer) ([]byte, error) {
	if _, err := os.Stat(file); err != nil {
		return nil, fmt.Errorf("%w: %w", ErrNotFound, err)
	}
	if IsOurs(file) {
		return nil, fmt.Errorf("run %s: %w", file, ErrSelf)
	}
	output, err := run(ctx, file, Deeper(environ), stdin, stderr)
	return output, tolerateUnknownVerb(err)
}

// tolerateUnknownVerb returns nil for the error of a plugin that does not know a verb, and any other error unchanged.
// In plugins that use the CNI library, the code of that error has changed over time (100, then 4), but not its text.
func tolerateUnknownVerb(err error) error {
	var own *types.Error
	if errors.As(err, &own) && strings.HasPrefix(own.Msg, "unknown CNI_COMMAND") {
		return nil
	}
	return err
}

// run finds the plugin's binary and runs it with a verb.
func (p *Plugin) run(ctx context.Context, verb string) ([]byte, error) {
	file, err := Find(p.Name, p.Path)
	if err != nil {
		return nil, err
	}
	if p.IsIPAM && IsOurs(file) {
		return nil, fmt.Errorf("run %s: %w", file, ErrSelf)
	}
	return run(ctx, file, p.environ(verb), p.Stdin, cmp.Or(p.Stderr, io.Discard))
}

// environ returns the environment for one verb. It removes parameters that the plugin must not get, even if this
// program's own caller has set them.
func (p *Plugin) environ(verb string) []string {
	env := Deeper(p.Environ)
	for _, parameter := range [][2]string{
		{"CNI_COMMAND=", verb},
		{"CNI_CONTAINERID=", p.ContainerID},
		{"CNI_NETNS=", p.NetNS},
		{"CNI_IFNAME=", p.IfName},
		{"CNI_ARGS=", p.Args},
		{"CNI_PATH=", p.Path},
	} {
		key, value := parameter[0], parameter[1]
		env = slices.DeleteFunc(env, func(entry string) bool { return strings.HasPrefix(entry, key) })
		if value != "" {
			env = append(env, key+value)
		}
	}
	return env
}

// decode parses the output of an ADD. An error matches ErrBadResult.
func (p *Plugin) decode(stdout []byte) (*current.Result, error) {
	configured, err := create.DecodeVersion(p.Stdin)
	if err == nil {
		var result *current.Result
		if result, err = ReadResult(stdout, configured); err == nil {
			return result, nil
		}
	}
	return nil, fmt.Errorf("result of plugin %s: %w: %w%s", p.Name, ErrBadResult, err, quoted("; stdout", stdout))
}

// lists holds the parts of a result that the library converts without a check.
type lists struct {
	CNIVersion string            `json:"cniVersion"`
	Interfaces []json.RawMessage `json:"interfaces"`
	IPs        []json.RawMessage `json:"ips"`
	Routes     []json.RawMessage `json:"routes"`
}

// ReadResult parses a result of any version of the specification. version is the CNI version of the configuration. It
// applies to a result that names no version. A null entry in a list is an error, because the library's conversions
// panic on it. An entry in ips without an address is an error too.
func ReadResult(data []byte, version string) (*current.Result, error) {
	var shape lists
	if err := json.Unmarshal(data, &shape); err != nil {
		return nil, err
	}

	if shape.CNIVersion == "" && version != "" {
		data, err := withVersion(data, version)
		if err != nil {
			return nil, err
		}
		return ReadResult(data, version)
	}

	for _, entry := range slices.Concat(shape.Interfaces, shape.IPs, shape.Routes) {
		if string(entry) == "null" {
			return nil, errors.New("a list holds null")
		}
	}

	result, err := create.Create(shape.CNIVersion, data)
	if err != nil {
		return nil, err
	}

	converted, err := current.NewResultFromResult(result)
	if err != nil {
		return nil, err
	}

	for i, ip := range converted.IPs {
		if _, ok := netip.AddrFromSlice(ip.Address.IP); !ok {
			return nil, fmt.Errorf("ips[%d] has no address", i)
		}
	}

	return converted, nil
}

// withVersion adds version to a result that has none, since the library's decoders require one.
func withVersion(result []byte, version string) ([]byte, error) {
	var fields map[string]json.RawMessage
	if err := json.Unmarshal(result, &fields); err != nil || fields == nil {
		return nil, errors.New("it is no object")
	}
	fields["cniVersion"], _ = json.Marshal(version)
	return json.Marshal(fields)
}
