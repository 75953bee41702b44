package cni

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	current "github.com/containernetworking/cni/pkg/types/100"

	"github.com/tombolo-cni/tombolo/internal/ident"
	"github.com/tombolo-cni/tombolo/internal/lease"
	"github.com/tombolo-cni/tombolo/internal/state"
	"github.com/tombolo-cni/tombolo/internal/strict"
	"github.com/tombolo-cni/tombolo/network"
	"github.com/tombolo-cni/tombolo/nft"
)

// A configuration is the decoded stdin of a call. Each plugin that this program implements has its own type of
// configuration, whose methods do the plugin's work.
type configuration interface {
	// run runs one verb, and returns the result to print, or nil to print nothing. For a chained plugin, it is called
	// only for ADD, DEL and CHECK of attachments that Tombolo made. If the configuration's version cannot express the
	// result of an ADD, run is called again with DEL.
	run(context.Context, *call) (*current.Result, error)

	common() *Common
	// complete fills in defaults, and adds requests of the runtime and of args.cni.
	complete(*call)
	// problems returns the errors in the decoded configuration. Verbs other than DEL and GC refuse a configuration with
	// errors, and report the first one.
	problems() []error
	// lacks reports whether the program that had the plugin's name before Tombolo may have made settings that the
	// attachment's record lacks (see kept.go).
	lacks(*state.Attachment) bool
}

// Common holds the fields that the configurations of all Tombolo's plugins have.
type Common struct {
	CNIVersion string `json:"cniVersion"`
	Name       string `json:"name"`

	// RuntimeConfig and Args may contain fields for the runtime or for other plugins. Tombolo ignores those that it
	// does not know.
	RuntimeConfig runtimeConfig `json:"runtimeConfig"`
	Args          struct {
		CNI json.RawMessage `json:"cni"`
	} `json:"args"`
	PrevResult json.RawMessage `json:"prevResult"`

	// The fields from StateDir to LogLevel are Tombolo's own.
	StateDir    string   `json:"stateDir"`
	LeaseDir    string   `json:"leaseDir"`
	ForwardMark Mark     `json:"forwardMark"`
	Deadline    Duration `json:"deadline"`
	LogFile     string   `json:"logFile"`
	LogLevel    string   `json:"logLevel"`

	argMAC    string // args.cni.mac
	annotated annotations
}

// podPolicy holds the policies for connections of pods. EgressPolicy limits those that a pod opens, and PublishFrom
// those to its host ports. A network has policies for all pods. A runtime may request further ones for one pod.
type podPolicy struct {
	EgressPolicy entries `json:"egressPolicy"`
	PublishFrom  entries `json:"publishFrom"`
}

// withDefaults returns p, with the policies of q in place of empty ones.
func (p podPolicy) withDefaults(q podPolicy) podPolicy {
	return podPolicy{cmp.Or(p.EgressPolicy, q.EgressPolicy), cmp.Or(p.PublishFrom, q.PublishFrom)}
}

// entries is a list in one text, separated by commas. In JSON it may also be a list of texts.
type entries string

// UnmarshalJSON parses a text or a list of texts. It returns an error for an empty list, which could mean everything or
// nothing.
func (e *entries) UnmarshalJSON(b []byte) error {
	var list []string
	if json.Unmarshal(b, &list) != nil {
		return json.Unmarshal(b, (*string)(e))
	}
	if len(list) == 0 {
		return errors.New("the list is empty")
	}
	*e = entries(strings.Join(list, ", "))
	return nil
}

// JSONExpects describes the JSON that the type accepts, for errors.
func (entries) JSONExpects() string { return "a text, or a list of texts" }

// list splits the text at commas, and trims spaces. It returns nil for an empty text.
func (e entries) list() []string {
	if e == "" {
		return nil
	}
	items := strings.Split(string(e), ",")
	for i, item := range items {
		items[i] = strings.TrimSpace(item)
	}
	return items
}

// policy returns the text, or "" for "all", since an empty policy allows everything.
func (e entries) policy() string {
	if e == "all" {
		return ""
	}
	return string(e)
}

// runtimeConfig holds the values that a runtime passes for the capabilities of Tombolo's plugins.
type runtimeConfig struct {
	MAC          string        `json:"mac"`
	PortMappings []PortMapping `json:"portMappings"`
	podPolicy
	Bandwidth   *Bandwidth        `json:"bandwidth"`
	Annotations map[string]string `json:"io.kubernetes.cri.pod-annotations"`
	DNS         struct {
		Servers  []string `json:"servers"`
		Searches []string `json:"searches"`
		Options  []string `json:"options"`
	} `json:"dns"`
	RequestedAddresses
}

const (
	defaultDeadline = 60 * time.Second
	defaultMark     = Mark(nft.DefaultMark)
)

// Mark is one bit of a packet's mark in the kernel. In JSON it is a number, or a text such as "0x10".
type Mark uint32

// UnmarshalJSON parses a number or a text. It returns an error unless exactly one of 32 bits is set.
func (m *Mark) UnmarshalJSON(b []byte) error {
	s := strings.Trim(string(b), `"`)
	v, err := strconv.ParseUint(s, 0, 32)
	if err != nil || v == 0 || v&(v-1) != 0 {
		return fmt.Errorf("%s is not a number with one bit set, such as %q", b, "0x10")
	}
	*m = Mark(v)
	return nil
}

// JSONExpects describes the JSON that the type accepts, for errors.
func (Mark) JSONExpects() string { return `one bit of 32, as a number or as "0x10"` }

func (c *Common) common() *Common { return c }

func (c *Common) complete(request *call) {
	var args struct {
		IPs []string `json:"ips"`
		MAC string   `json:"mac"`
		podPolicy
	}
	request.readArgs(&args)
	c.RuntimeConfig.podPolicy = c.RuntimeConfig.withDefaults(args.podPolicy)
	c.argMAC, c.RuntimeConfig.ArgIPs = args.MAC, args.IPs
}

// readArgs decodes the object args.cni of the configuration into the struct that into points to. It passes errors about
// values to note. It ignores keys without a field in the struct, because they belong to other plugins.
func (c *call) readArgs(into any) {
	if data := c.conf.Args.CNI; !isEmpty(data) {
		c.note(strict.Part("args.cni", data, into, strict.Everything))
	}
}

// note stores errors that decoding stdin has found. The method refuse returns them later, for the verbs that they stop.
func (c *call) note(found strict.Problems) {
	for _, err := range found {
		c.undecoded = append(c.undecoded, configError(err))
	}
}

func (c *Common) lacks(*state.Attachment) bool { return false }

func (c *Common) problems() []error {
	var p problems
	p.add(c.StateDir != "" && !filepath.IsAbs(c.StateDir), "stateDir %q is not an absolute path", c.StateDir)
	p.add(c.LeaseDir != "" && !filepath.IsAbs(c.LeaseDir), "leaseDir %q is not an absolute path", c.LeaseDir)
	p.add(c.LogFile != "" && !filepath.IsAbs(c.LogFile), "logFile %q is not an absolute path", c.LogFile)
	p.limits(c.source("bandwidth", "runtimeConfig"), orZero(c.RuntimeConfig.Bandwidth))
	_, err := parseLevel(c.LogLevel)
	p.add(err != nil, `logLevel %q is not known: use "debug", "info", "warn" or "error"`, c.LogLevel)
	return p
}

// problems is a list of errors in a configuration.
type problems []error

func (p *problems) add(holds bool, format string, args ...any) {
	if holds {
		*p = append(*p, newError(codeInvalidConfig, format, args...))
	}
}

// absolute returns dir, or the default path in otherwise if dir is not an absolute path. DEL and GC need a directory
// even if the configuration is wrong.
func absolute(dir, otherwise string) string {
	if !filepath.IsAbs(dir) {
		return otherwise
	}
	return dir
}

func (c *Common) stateDir() string { return absolute(c.StateDir, network.DefaultStateDir) }

func (c *Common) leaseDir() string { return absolute(c.LeaseDir, lease.DefaultDir) }

func (c *Common) mark() uint32 { return uint32(cmp.Or(c.ForwardMark, defaultMark)) }

func (c *Common) deadline() time.Duration {
	return time.Duration(cmp.Or(c.Deadline, Duration(defaultDeadline)))
}

// exempt reports whether an unknown key is allowed in a configuration. path is the place of the key's object. Allowed
// are all keys in runtimeConfig and args, which belong to the runtime. At the top, keys of the specification
// (cni.dev/…) and comments (_…) are allowed.
func exempt(path, key string) bool {
	if path == "" {
		return strings.HasPrefix(key, "cni.dev/") || strings.HasPrefix(key, "_")
	}
	top, _, _ := strings.Cut(path, ".")
	return top == "runtimeConfig" || top == "args"
}

// parse decodes the configuration from data, the content of stdin, and fills in defaults. If data is not JSON, it
// returns an error, which stops every verb. It stores all other errors for the method refuse, since DEL and GC ignore
// them.
func (c *call) parse(data []byte) error {
	c.stdin = data
	pass := exempt
	if c.named {
		pass = strict.Everything
	}

	found := strict.Unmarshal(data, c.configuration, pass)
	var last *strict.Error
	if n := len(found); n > 0 && errors.As(found[n-1], &last) && last.Kind == strict.Syntax {
		return newError(codeDecoding, "decode the network's configuration: %v", last)
	}

	c.note(found)
	c.complete(c)

	// A missing version means 0.1.0, as in the CNI library.
	c.conf.CNIVersion = cmp.Or(c.conf.CNIVersion, "0.1.0")
	return nil
}

// configErrors returns all errors in the configuration, including those that the method parse stored.
func (c *call) configErrors() strict.Problems { return slices.Concat(c.undecoded, c.problems()) }

// refuse returns the first error in the configuration. For DEL and GC it returns nil, since they must do as much as
// possible.
func (c *call) refuse() error {
	if c.verb == "DEL" || c.verb == "GC" {
		return nil
	}
	return c.configErrors().First()
}

// accept returns an error unless this plugin supports the configuration's version, and that version has the verb.
func (c *call) accept() error {
	have := c.conf.CNIVersion
	if supported := c.supported(); !slices.Contains(supported, have) {
		return newError(codeIncompatibleVersion, "cniVersion %q is not supported: this plugin speaks %s", have,
			strings.Join(supported, ", "))
	}

	since := map[string]string{"CHECK": versionWithCheck, "GC": versionWithStatus, "STATUS": versionWithStatus}
	all, first := SupportedVersions(), since[c.verb]
	if slices.Index(all, have) < slices.Index(all, first) {
		return newError(codeIncompatibleVersion,
			"%s is a verb of CNI %s and later, and this network's cniVersion is %s", c.verb, first, have)
	}
	return nil
}

// acceptName returns an error unless the network's name is valid.
func (c *Common) acceptName() error {
	switch {
	case c.Name == "":
		return newError(codeInvalidConfig, "the network has no name: set the field \"name\"")
	case len(c.Name) > maxNetworkName:
		return newError(codeInvalidConfig, "name: a network's name has at most %d bytes, not %d", maxNetworkName,
			len(c.Name))
	case !ident.IsIdentifier(c.Name):
		return newError(codeInvalidConfig,
			"name %q: a network's name takes letters, digits, '_', '.' and '-', and begins with a letter or a digit",
			c.Name)
	}

	return nil
}

// Examine decodes and checks a configuration for the plugin called name. It returns the network that the configuration
// describes, and errors that ADD would find without access to the kernel or the disk, each as one element. If the ipam
// section cannot be decoded, it returns all errors of decoding, but only the first one for type dhcp. Otherwise it
// returns the section's first error. For a plugin that makes no network, such as portmap, the network is nil.
func Examine(name string, data []byte) (n *network.Network, found []string) {
	c := (&Plugin{Name: name}).newCall()
	errs := slices.Concat([]error{c.parse(data)}, c.configErrors(), []error{c.accept(), c.conf.acceptName()})
	switch conf := c.configuration.(type) {
	case *portmapConf:
		errs = append(errs, conf.unsupported())
	case *NetConf:
		if conf.IPAM.Type == typeDHCP {
			_, err := conf.dhcp()
			errs = append(errs, err)
		}

		n = new(conf.settings())
		r := c.ipamRequest(conf, true)
		r.All = true
		alloc, err := newAllocator(r)
		if errs = append(errs, err); err == nil {
			n.Subnets = alloc.subnets()
		}
	}

	if err := errors.Join(errs...); err != nil {
		found = strings.Split(err.Error(), "\n")
	}
	return n, found
}
