// Package docker serves the remote driver protocol of Docker's libnetwork: it makes calls of the plugin of what Docker
// asks about networks and endpoints.
//
// Docker moves a container's interface itself, and wants the container's addresses before the container has a
// namespace. So an endpoint is attached to a namespace that lasts as long as the request, and its interface is
// handed to Docker in the host's. Docker renames it in the container, where its alternative name finds it.
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

// Config is what a Driver works with. All fields are required.
type Config struct {
	StateDir string // of the plugin
	LeaseDir string // beside it, in "docker", networks are kept: Docker tells of one only once
	Node     *network.Node
	Log      *slog.Logger
}

// Driver is an http.Handler. An endpoint is an attachment: what is to outlast a restart is on that one's record.
type Driver struct {
	*Config
	networks  string          // the directory of their files
	endpoints sync.Map        // an *endpoint for each identifier
	begun     atomic.Int64    // when this dockerd began, in nanoseconds since 1970; 0: before tombolod
	ctx       context.Context // of work
	work      sync.WaitGroup  // between requests
}

// New looks for the endpoints in their containers that were being moved there under an earlier Driver. Until ctx is done
// the Driver does things by itself.
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

// Wait waits for the end of what the Driver does by itself.
func (d *Driver) Wait() { d.work.Wait() }

// rest gives false where the Driver ends before a time has gone by.
func (d *Driver) rest(wait time.Duration) bool {
	select {
	case <-d.ctx.Done():
		return false
	case <-time.After(wait):
		return true
	}
}

// request is any of Docker's, and answer any answer: each has a part of the fields.
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

// addresses are those of an endpoint. In an answer they are only those that Docker did not choose, since it refuses
// others.
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

// methods are those of the protocol that want more than an empty answer.
func (d *Driver) methods() map[string]func(context.Context, *request) (*answer, error) {
	return map[string]func(context.Context, *request) (*answer, error){
		"CreateNetwork": d.createNetwork, "DeleteNetwork": d.deleteNetwork,
		"CreateEndpoint": d.createEndpoint, "DeleteEndpoint": d.deleteEndpoint, "Join": d.join,
		"ProgramExternalConnectivity": d.publish, "RevokeExternalConnectivity": d.publish,
	}
}

// longest is what a request may have, in bytes. Docker lists each published port twice, in 200 bytes.
const longest = 64 << 20

// ServeHTTP answers a request of Docker's.
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
		if to, err = carryOut(r, method, do); err != nil {
			d.Log.Warn("cannot do what Docker asks for", "method", method, "err", err)
			to = &answer{Err: err.Error()}
		}
	}
	w.Header().Set("Content-Type", "application/vnd.docker.plugins.v1.2+json")
	_ = json.NewEncoder(w).Encode(to) // Docker has gone, if it cannot be written
}

func carryOut(r *http.Request, method string, do func(context.Context, *request) (*answer, error)) (*answer, error) {
	asked := new(request)
	if err := json.NewDecoder(http.MaxBytesReader(nil, r.Body, longest)).Decode(asked); err != nil {
		return nil, fmt.Errorf("read the request (Docker sends an empty one where it tries again): %w", err)
	}
	ids := []string{asked.NetworkID, asked.EndpointID}
	if strings.HasSuffix(method, "Network") {
		ids = ids[:1]
	}
	for _, id := range ids {
		if !ident.IsIdentifier(id) || len(id) < shortest || len(id) > 10*shortest {
			return nil, fmt.Errorf("%.40q is no identifier of Docker's", id)
		}
	}
	return do(r.Context(), asked)
}
