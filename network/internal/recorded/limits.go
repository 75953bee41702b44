package recorded

import (
	"github.com/tombolo-cni/tombolo/bridge/bandwidth"
	"github.com/tombolo-cni/tombolo/internal/endpoint"
	"github.com/tombolo-cni/tombolo/internal/state"
)

// Target says where an attachment's traffic is shaped.
func Target(rec *state.Attachment) bandwidth.Target {
	return bandwidth.Target{
		Port: rec.HostIf, MTU: rec.MTU, IFB: bandwidth.IFBName(rec.Hash()),
		Alias: endpoint.AliasOf(rec), Owner: endpoint.AliasOwner(rec.Hash()),
	}
}

// Shape are the limits of an attachment.
func Shape(rec *state.Attachment) bandwidth.Shape {
	b := rec.Bandwidth
	return bandwidth.Shape{
		Ingress: bandwidth.Limit{Rate: b.IngressRate, Burst: b.IngressBurst},
		Egress:  bandwidth.Limit{Rate: b.EgressRate, Burst: b.EgressBurst},
	}
}

// Limit puts limits on record, with the link that shapes what the pod sends.
func Limit(rec *state.Attachment, s bandwidth.Shape) {
	rec.Bandwidth, rec.IFB = state.Bandwidth{
		IngressRate: s.Ingress.Rate, IngressBurst: s.Ingress.Burst,
		EgressRate: s.Egress.Rate, EgressBurst: s.Egress.Burst,
	}, ""
	if s.Egress.Rate > 0 {
		rec.IFB = bandwidth.IFBName(rec.Hash())
	}
}
