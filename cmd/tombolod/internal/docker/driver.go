// Package docker serves the remote driver protocol of Docker's libnetwork. It answers Docker's requests about
// networks and endpoints by calls of the plugin.
//
// Docker moves a container's interface itself, and needs the container's addresses before the container has a
// namespace. So an endpoint is attached to a namespace that lasts as long as the request, and its interface is then
// moved to the host's namespace for Docker. Docker renames it in the container, where it is found by its alternative
// name.
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

// Config holds the parameters of a Driver. All fields are required.
type Config struct {
	StateDir string // the state directory of the CNI plugin
	LeaseDir string // networks are kept beside it, in "docker", since Docker announces each only once
	Node     *network.Node
	Log      *slog.Logger
}

// Driver is an http.Handler. An endpoint is an attachment. Everything that must outlast a restart is in that
// attachment's record.
type Driver struct {
	*Config
	networks  string          // the directory of their files
	endpoints sync.Map        // an *endpoint for each identifier
	begun     atomic.Int64    // the start of this dockerd, in nanoseconds since 1970; 0 if before tombolod's
	ctx       context.Context // ends the background work
	work      sync.WaitGroup  // waits for the background work
}

// New returns a Driver. It looks in their containers for the endpoints that were being moved there under an earlier
// Driver. Until ctx is done the Driver also works between requests.
func New(ctx context.Context, cfg *Config) *Driver {
	d := &Driver{Config: cfg, ctx: ctx, networks: filepath.Join(filepath.Dir(filepath.Clean(cfg.LeaseDir)), "docker")}
	for k, a := range d.attached() {
		if a.Path != "" {
			e := &endpoint{created: time.Now()}
			d.endpoints.Store(k.EndpointID, e)
			d.work.Go(func() { d.follow(e, a.Key, a.Path) })
		}
	}

	d.work.Go(d.tidy)
	return d
}

// Wait waits for the end of the Driver's work between requests.
func (d *Driver) Wait() { d.work.Wait() }

// rest waits. It returns false if the Driver ends before the time has passed.
func (d *Driver) rest(wait time.Duration) bool {
	select {
	case <-d.ctx.Done():
		return false
	case <-time.After(wait):
		return true
	}
}

// request is any request of Docker, and answer any answer. Each uses some of the fields.
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

// addresses are the addresses of an endpoint. An answer contains only those that Docker did not choose, since it
// refuses others.
type addresses struct {
	Address, AddressIPv6 netip.Prefix `json:",omitzero"`
	MacAddress           string       `json:",omitempty"`
}

// staticRoute is a route that Docker adds in the container. RouteType is 0 with a next hop, else 1.
type staticRoute struct {
	Destination string
	RouteType   int
	NextHop     string `json:",omitempty"`
}

type interfaceName struct{ SrcName, DstPrefix string }

// methods returns the methods of the protocol that need more than an empty answer.
func (d *Driver) methods() map[string]func(context.Context, *request) (*answer, error) {
	return map[string]func(context.Context, *request) (*answer, error){
		"CreateNetwork": d.createNetwork, "DeleteNetwork": d.deleteNetwork,
		"CreateEndpoint": d.createEndpoint, "DeleteEndpoint": d.deleteEndpoint, "Join": d.join,
		"ProgramExternalConnectivity": d.publish, "RevokeExternalConnectivity": d.publish,
	}
}

// longest is the greatest length of a request, in bytes. Docker lists each published port twice, in 200 bytes.
const longest = 64 << 20

// ServeHTTP answers a request of Docker.
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
	_ = json.NewEncoder(w).Encode(to) // if it cannot be written, Docker has gone
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
