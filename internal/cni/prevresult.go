package cni

import (
	"encoding/json"

	current "github.com/containernetworking/cni/pkg/types/100"
	"github.com/containernetworking/cni/pkg/version"
)

// parsePrevResult reads the result of an earlier ADD, or of the plugins before
// this one; nil if there is none.
func parsePrevResult(conf *NetConf, cniVersion string) (*current.Result, error) {
	if isEmptyJSON(conf.PrevResult) {
		return nil, nil
	}
	// A result of its own, as the specification has it, names a version; the one
	// that a runtime puts in need not, and has the configuration's.
	var v struct {
		CNIVersion string `json:"cniVersion"`
	}
	if err := json.Unmarshal(conf.PrevResult, &v); err == nil && v.CNIVersion != "" {
		cniVersion = v.CNIVersion
	}
	raw := map[string]json.RawMessage{}
	if err := json.Unmarshal(conf.PrevResult, &raw); err != nil {
		return nil, newError(codeDecoding, "prevResult: %v", err)
	}
	raw["cniVersion"], _ = json.Marshal(cniVersion)
	data, err := json.Marshal(raw)
	if err != nil {
		return nil, newError(codeDecoding, "prevResult: %v", err)
	}
	if err := refuseNulls(data); err != nil {
		return nil, err
	}
	res, err := version.NewResult(cniVersion, data)
	if err == nil {
		var r *current.Result
		if r, err = current.NewResultFromResult(res); err == nil {
			return r, checkResult(r)
		}
	}
	return nil, newError(codeDecoding, "prevResult: %v", err)
}

// refuseNulls finds the nulls in a result's lists. To convert it to another
// version would panic.
func refuseNulls(result []byte) error {
	var lists struct {
		Interfaces []json.RawMessage `json:"interfaces"`
		IPs        []json.RawMessage `json:"ips"`
		Routes     []json.RawMessage `json:"routes"`
	}
	// What else is wrong, decoding the result says better.
	_ = json.Unmarshal(result, &lists)
	for _, l := range []struct {
		name  string
		items []json.RawMessage
	}{{"interfaces", lists.Interfaces}, {"ips", lists.IPs}, {"routes", lists.Routes}} {
		for i, item := range l.items {
			if string(item) == "null" {
				return newError(codeDecoding, "prevResult: %s[%d] is null", l.name, i)
			}
		}
	}
	return nil
}

// checkResult refuses what would be indexed later on.
func checkResult(r *current.Result) error {
	for i, ip := range r.IPs {
		if ip.Interface != nil && (*ip.Interface < 0 || *ip.Interface >= len(r.Interfaces)) {
			return newError(codeDecoding, "prevResult: ips[%d] names interface %d of %d", i, *ip.Interface, len(r.Interfaces))
		}
	}
	return nil
}
