// Package docker serves the remote driver protocol of Docker's libnetwork. It answers Docker's requests about networks
// and endpoints by calls of the CNI plugin.
//
// Docker asks for the container's addresses before the container has a namespace, and later moves the interface into
// the container by itself. So the Driver attaches an endpoint to a temporary namespace. It then moves the interface to
// the host's namespace, where Docker takes it. Docker renames the interface in the container. The Driver finds it there
// by its alternative name.
package docker

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"net/http"
	"net/netip"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/tombolo-cni/tombolo/internal/ident"
	"github.com/tombolo-cni/tombolo/network"
)

// Config configures a Driver. All fields are required.
type Config struct {
	StateDir string // the state directory of the CNI plugin
	LeaseDir string // the lease directory of the CNI plugin; "docker" beside it has descriptions of the networks
	Node     *network.Node
	Log      *slog.Logger
}

// Driver is an http.Handler for Docker's requests. Docker's endpoint is Tombolo's attachment of a container to a
// network. The attachment's record holds everything about the endpoint that must outlast a restart of tombolod.
type Driver struct {
	*Config
	networks  string          // the directory with the networks' files
	endpoints sync.Map        // maps each endpoint's identifier to an *endpoint
	begun     atomic.Int64    // when dockerd last activated the driver, in nanoseconds since 1970; 0 if never
	ctx       context.Context // ends the background work
	work      sync.WaitGroup  // waits for the background work
}

// New returns a Driver. In the background, the Driver looks for the endpoints of an earlier Driver in their containers,
// since Docker may still have been moving their interfaces there. Until ctx is done, it also regularly takes down the
// endpoints that dockerd abandoned (see sweep).
func New(ctx context.Context, cfg *Config) *Driver {
	d := &Driver{Config: cfg, ctx: ctx, networks: filepath.Join(filepath.Dir(filepath.Clean(cfg.LeaseDir)), "docker")}
	for k, a := range d.attached() {
		if a.Path != "" {
			e := &endpoint{created: time.Now()}
			d.endpoints.Store(k.EndpointID, e)
			d.work.Go(func() { d.follow(e, a.Key, a.Path) })
		}
	}

	d.work.Go(func() {
		for d.sleep(joinsWithin) {
			d.sweep()
		}
	})
	return d
}

// Wait waits until the Driver's background work has ended. Cancel the context of New first.
func (d *Driver) Wait() { d.work.Wait() }

// sleep waits for the given time, and returns true. If the Driver's context ends first, it returns false.
func (d *Driver) sleep(wait time.Duration) bool {
	select {
	case <-d.ctx.Done():
		return false
	case <-time.After(wait):
		return true
	}
}

// request holds the fields of all kinds of requests from Docker. Each kind uses some of them.
type request struct {
	key
	SandboxKey         string // the path of the container's namespace
	Options            map[string]json.RawMessage
	IPv4Data, IPv6Data []struct{ Pool, Gateway netip.Prefix }
	Interface          addresses
}

type answer struct {
	Err string `json:",omitempty"`

	Implements               []string `json:",omitempty"`
	Scope, ConnectivityScope string   `json:",omitempty"`

	Interface             *addresses     `json:",omitempty"`
	InterfaceName         *interfaceName `json:",omitempty"`
	Gateway, GatewayIPv6  string         `json:",omitempty"`
	StaticRoutes          []staticRoute  `json:",omitempty"`
	DisableGatewayService bool           `json:",omitempty"`
}

// addresses holds the MAC and addresses of an endpoint. In an answer, fields whose values Docker chose itself must be
// empty.
type addresses struct {
	Address, AddressIPv6 netip.Prefix `json:",omitzero"`
	MacAddress           string       `json:",omitempty"`
}

// staticRoute is a route that Docker adds in the container. RouteType is 0 for a route with a next hop, and 1 for a
// route on the link.
type staticRoute struct {
	Destination string
	RouteType   int
	NextHop     string `json:",omitempty"`
}

type interfaceName struct{ SrcName, DstPrefix string }

// methods returns the functions for methods of the protocol, by name. ServeHTTP itself answers GetCapabilities, and
// gives an empty answer to methods without a function.
func (d *Driver) methods() map[string]func(context.Context, *request) (*answer, error) {
	return map[string]func(context.Context, *request) (*answer, error){
		"CreateNetwork": d.createNetwork, "DeleteNetwork": d.deleteNetwork,
		"CreateEndpoint": d.createEndpoint, "DeleteEndpoint": d.deleteEndpoint, "Join": d.join,
		"ProgramExternalConnectivity": d.publish, "RevokeExternalConnectivity": d.publish,
	}
}

// longest is the maximum length of a request, in bytes. Docker names each published port twice, in about 200 bytes
// together.
const longest = 64 << 20

// ServeHTTP answers one request from Docker.
func (d *Driver) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	to := &answer{}
	method, ofDriver := strings.CutPrefix(r.URL.Path, "/NetworkDriver.")
	do := d.methods()[method]
	switch {
	case r.URL.Path == "/Plugin.Activate":
		d.begun.Store(time.Now().UnixNano())
		d.sweep()
		to.Implements = []string{"NetworkDriver"}
	case !ofDriver:
		http.NotFound(w, r)
		return
	case method == "GetCapabilities":
		to.Scope, to.ConnectivityScope = "local", "local"
	case do != nil:
		var err error
		if to, err = call(r, method, do); err != nil {
			d.Log.Warn("cannot do what Docker asks for", "method", method, "err", err)
			to = &answer{Err: err.Error()}
		}
	}

	w.Header().Set("Content-Type", "application/vnd.docker.plugins.v1.2+json")
	_ = json.NewEncoder(w).Encode(to) // an error means that Docker has gone
}

func call(r *http.Request, method string, do func(context.Context, *request) (*answer, error)) (*answer, error) {
	req := new(request)
	if err := json.NewDecoder(http.MaxBytesReader(nil, r.Body, longest)).Decode(req); err != nil {
		return nil, fmt.Errorf("read the request (Docker sends an empty one where it tries again): %w", err)
	}

	ids := []string{req.NetworkID, req.EndpointID}
	if strings.HasSuffix(method, "Network") {
		ids = ids[:1]
	}

	for _, id := range ids {
		if !ident.IsIdentifier(id) || len(id) < shortest || len(id) > 10*shortest {
			return nil, fmt.Errorf("%.40q is no identifier of Docker's", id)
		}
	}

	return do(r.Context(), req)
}
