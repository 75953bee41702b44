package cni

import (
	"cmp"
	"slices"
	"strconv"
	"strings"
)

// Args holds the values of CNI_ARGS by their keys.
type Args map[string]string

// parseArgs parses a list of KEY=VALUE separated by semicolons (CNI specification 1.1.0, "Parameters"). If a key
// occurs twice, the last value counts. As in the reference plugins, an unknown key is an error unless IgnoreUnknown
// is 1 or true. Keys that describe Kubernetes pods (K8S_…) are known. Errors have the specification's code 4.
func parseArgs(text string) (Args, error) {
	args := Args{}
	if text == "" {
		return args, nil
	}

	unknown := ""
	for pair := range strings.SplitSeq(text, ";") {
		key, value, ok := strings.Cut(pair, "=")
		if !ok || key == "" {
			return nil, newError(codeEnvironment, "CNI_ARGS: %q is not of the form KEY=VALUE", pair)
		}
		args[key] = value
		known := slices.Contains([]string{"IgnoreUnknown", "IP", "MAC", "GATEWAY"}, key) ||
			strings.HasPrefix(key, "K8S_")
		if !known && unknown == "" {
			unknown = pair
		}
	}

	ignore, err := strconv.ParseBool(cmp.Or(args["IgnoreUnknown"], "false"))
	if err != nil {
		return nil, newError(codeEnvironment, "CNI_ARGS: IgnoreUnknown=%q is neither true nor false",
			args["IgnoreUnknown"])
	}

	if unknown != "" && !ignore {
		return nil, newError(codeEnvironment,
			"CNI_ARGS: %s is not known: add IgnoreUnknown=1 if it is meant for another plugin", unknown)
	}

	return args, nil
}

// Pod returns the runtime's name for the pod, namespace/name. Without a namespace it returns only the name, as podman
// sets it for a container. Without a name it returns "".
func (a Args) Pod() string {
	ns, name := a["K8S_POD_NAMESPACE"], a["K8S_POD_NAME"]
	if ns == "" || name == "" {
		return name
	}
	return ns + "/" + name
}

// List splits a value at commas. An empty value is an empty list.
func (a Args) List(key string) []string { return entries(a[key]).list() }
