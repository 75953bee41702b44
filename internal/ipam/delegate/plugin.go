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

// ErrNotFound means that no directory of CNI_PATH holds the plugin.
var ErrNotFound = errors.New("plugin not found")

// ErrBadResult means that a plugin ended well but printed no valid result.
var ErrBadResult = errors.New("plugin printed no valid CNI result")

// A Plugin is a plugin to run and what to hand it, the same for every verb.
type Plugin struct {
	Name        string   // its type, which is the name of its binary
	Path        string   // CNI_PATH: the directories to look in, with colons between them; also handed on
	ContainerID string   // CNI_CONTAINERID; empty in GC and STATUS, and then not set
	NetNS       string   // CNI_NETNS; may be empty in DEL
	IfName      string   // CNI_IFNAME
	Args        string   // CNI_ARGS
	Environ     []string // what else is in the environment; the variables above replace those in it
	Stdin       []byte   // the netconf: that of the calling plugin, whole

	// Self is the path of the program that must not be run, since it is the one
	// that runs plugins: "/proc/self/exe". Empty allows every program.
	Self string

	// Stderr gets the plugin's stderr as it comes; nil drops it. Errors quote
	// its end in any case.
	Stderr io.Writer
}

// Find returns the path of the executable file name in the first of the
// directories that has one. path is like CNI_PATH.
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

// Add runs the plugin with ADD, and returns its result in the current version,
// with null entries refused. Where that fails otherwise than with ErrNotFound,
// the caller owes a Del (CNI specification 1.1.0, section 4).
func (p *Plugin) Add(ctx context.Context) (*current.Result, error) {
	stdout, err := p.run(ctx, "ADD")
	if err != nil {
		return nil, err
	}
	return p.decode(stdout)
}

// Run runs the plugin with another verb. For CHECK the netconf must hold prevResult, and for GC
// cni.dev/valid-attachments. A plugin that is too old to know GC or STATUS counts as done and ready:
// that says nothing against its ADD.
func (p *Plugin) Run(ctx context.Context, verb string) error {
	_, err := p.run(ctx, verb)
	if verb == "GC" || verb == "STATUS" {
		return tolerateUnknownVerb(err)
	}
	return err
}

// Forward runs the program in a file in place of the calling one, with the caller's environment and
// stdin, and gives what it printed; errors are Exec's. No such file is ErrNotFound, and one that leads
// back to the program at self is ErrSelf. A program that is too old to know the verb counts as done.
func Forward(ctx context.Context, file, self string, environ []string, stdin []byte, stderr io.Writer) ([]byte, error) {
	if err := refuseSelf(self, file); err != nil {
		return nil, err
	}
	said, err := run(ctx, file, Deeper(environ), stdin, stderr)
	return said, tolerateUnknownVerb(err)
}

// tolerateUnknownVerb drops the error by which plugins built with the CNI
// library refuse a verb that they do not know. Its code has changed over time
// (100, then 4), its text has not.
func tolerateUnknownVerb(err error) error {
	var own *types.Error
	if errors.As(err, &own) && strings.HasPrefix(own.Msg, "unknown CNI_COMMAND") {
		return nil
	}
	return err
}

func (p *Plugin) run(ctx context.Context, verb string) ([]byte, error) {
	file, err := Find(p.Name, p.Path)
	if err != nil {
		return nil, err
	}
	if p.Self != "" {
		if err := refuseSelf(p.Self, file); err != nil {
			return nil, err
		}
	}
	return run(ctx, file, p.environ(verb), p.Stdin, cmp.Or(p.Stderr, io.Discard))
}

// environ is the environment for one verb. Variables that the specification does not define for the verb are left
// out, even where our own caller had set them.
func (p *Plugin) environ(verb string) []string {
	parameters := []struct{ key, value string }{
		{"CNI_COMMAND", verb},
		{"CNI_CONTAINERID", p.ContainerID},
		{"CNI_NETNS", p.NetNS},
		{"CNI_IFNAME", p.IfName},
		{"CNI_ARGS", p.Args},
		{"CNI_PATH", p.Path},
	}
	env := slices.DeleteFunc(Deeper(p.Environ), func(entry string) bool {
		for _, parameter := range parameters {
			if strings.HasPrefix(entry, parameter.key+"=") {
				return true
			}
		}
		return false
	})
	for _, parameter := range parameters {
		if parameter.value != "" {
			env = append(env, parameter.key+"="+parameter.value)
		}
	}
	return env
}

// decode reads what ADD printed.
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

// lists are what of a result the library's conversions take on trust.
type lists struct {
	CNIVersion string            `json:"cniVersion"`
	Interfaces []json.RawMessage `json:"interfaces"`
	IPs        []json.RawMessage `json:"ips"`
	Routes     []json.RawMessage `json:"routes"`
}

// ReadResult reads a result of any version of the specification. One that does not say its version has that of
// the configuration. Null entries of its lists, on which the library's conversions panic, are errors, and so are
// addresses without one, or of an interface that is none.
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

// withVersion puts the version into a result that lacks it, for the library's
// decoders insist on one.
func withVersion(result []byte, version string) ([]byte, error) {
	var fields map[string]json.RawMessage
	if err := json.Unmarshal(result, &fields); err != nil || fields == nil {
		return nil, errors.New("it is no object")
	}
	fields["cniVersion"], _ = json.Marshal(version)
	return json.Marshal(fields)
}
