// Package cniargs reads CNI_ARGS, which the runtime gives to every plugin of a chain.
package cniargs

import (
	"fmt"
	"strings"

	"github.com/containernetworking/cni/pkg/types"
)

// Args are the values of CNI_ARGS by their keys.
type Args map[string]string

// Parse reads a list of KEY=VALUE with semicolons (CNI specification 1.1.0, "Parameters"), of which
// the last counts where two have one key. A key that no plugin here knows is an error, as in the
// reference's plugins, unless IgnoreUnknown is 1 or true. What runtimes tell of Kubernetes pods, K8S_…,
// is none. With an error, which has the specification's code 4, Parse gives the pairs all the same.
func Parse(text string) (Args, error) {
	args := Args{}
	if text == "" {
		return args, nil
	}
	var malformed, unknown error
	for pair := range strings.SplitSeq(text, ";") {
		key, value, ok := strings.Cut(pair, "=")
		if !ok || key == "" {
			if malformed == nil {
				malformed = invalid("CNI_ARGS: %q is not of the form KEY=VALUE", pair)
			}
			continue
		}
		args[key] = value
		switch key {
		case "IgnoreUnknown", "IP", "MAC", "GATEWAY":
		default:
			if unknown == nil && !strings.HasPrefix(key, "K8S_") {
				unknown = invalid("CNI_ARGS: %s=%s is not known: add IgnoreUnknown=1 if it is meant for another plugin", key, value)
			}
		}
	}
	if malformed != nil {
		return args, malformed
	}
	switch ignore := args["IgnoreUnknown"]; strings.ToLower(ignore) {
	case "1", "true":
		return args, nil
	case "", "0", "false":
		return args, unknown
	default:
		return args, invalid("CNI_ARGS: IgnoreUnknown=%q is neither true nor false", ignore)
	}
}

func invalid(format string, values ...any) error {
	return &types.Error{Code: types.ErrInvalidEnvironmentVariables, Msg: fmt.Sprintf(format, values...)}
}

// Pod is how the runtime calls the pod, where it says so: namespace/name, or the name alone, as podman
// gives that of a container.
func (a Args) Pod() string {
	ns, name := a["K8S_POD_NAMESPACE"], a["K8S_POD_NAME"]
	if ns == "" || name == "" {
		return name
	}
	return ns + "/" + name
}

// List splits a value with commas. An empty one is an empty list.
func (a Args) List(key string) []string {
	if a[key] == "" {
		return nil
	}
	items := strings.Split(a[key], ",")
	for i, item := range items {
		items[i] = strings.TrimSpace(item)
	}
	return items
}
