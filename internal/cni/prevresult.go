package cni

import (
	current "github.com/containernetworking/cni/pkg/types/100"

	"github.com/tombolo-cni/tombolo/internal/cni/ipamconf"
	"github.com/tombolo-cni/tombolo/internal/ipam/delegate"
)

// prevResult reads the result of an earlier ADD, or of the plugins before
// this one; nil if there is none. One that a runtime puts in need not name its version, and has the configuration's.
func (c *Common) prevResult() (*current.Result, error) {
	if ipamconf.IsEmpty(c.PrevResult) {
		return nil, nil
	}
	r, err := delegate.ReadResult(c.PrevResult, c.CNIVersion)
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

// resultToCheck is the one of the ADD that CHECK is about.
func (c *Common) resultToCheck() (*current.Result, error) {
	prev, err := c.prevResult()
	if err == nil && prev == nil {
		err = newError(codeInvalidConfig, "CHECK needs prevResult: the result of the ADD that is to be checked")
	}
	return prev, err
}
