package cni

import (
	current "github.com/containernetworking/cni/pkg/types/100"

	"github.com/tombolo-cni/tombolo/internal/ipam/delegate"
)

// parsePrevResult reads the result of an earlier ADD, or of the plugins before
// this one; nil if there is none. One that a runtime puts in need not name its version, and has the configuration's.
func parsePrevResult(conf *NetConf, cniVersion string) (*current.Result, error) {
	if isEmptyJSON(conf.PrevResult) {
		return nil, nil
	}
	r, err := delegate.ReadResult(conf.PrevResult, cniVersion)
	if err != nil {
		return nil, newError(codeDecoding, "prevResult: %v", err)
	}
	for i, ip := range r.IPs {
		if n := ip.Interface; n != nil && (*n < 0 || *n >= len(r.Interfaces)) {
			return nil, newError(codeDecoding, "prevResult: ips[%d] names interface %d of %d", i, *n, len(r.Interfaces))
		}
	}
	return r, nil
}
