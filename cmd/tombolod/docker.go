package main

import (
	"context"
	"net"
	"net/http"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/tombolo-cni/tombolo/cmd/tombolod/internal/docker"
)

const (
	// firstInherited is the first file descriptor that a service manager passes: see sd_listen_fds(3).
	firstInherited = 3
	// dockerSocket is the name of the socket's systemd unit, and of the file descriptor that systemd passes.
	dockerSocket = "tombolo-docker.socket"
	// finishWithin is the time limit for requests in progress when tombolod ends.
	finishWithin = 15 * time.Second
)

// serveDocker serves Docker's network driver until the caller calls end. It does nothing if the operator named no
// socket, and systemd passed none.
func (p *program) serveDocker(ctx context.Context, o *options, cfg *docker.Config) (end func(), _ error) {
	l, err := p.dockerListener(o.docker)
	if l == nil || err != nil {
		return func() {}, err
	}

	driver := docker.New(ctx, cfg)

	// Set no time-out for reading the request: during a wait for a DHCP server it would cancel the request's context.
	s := &http.Server{Handler: driver, ReadHeaderTimeout: 10 * time.Second, MaxHeaderBytes: 8 << 10}
	go s.Serve(l) //nolint:errcheck // Shutdown ends Serve
	return func() {
		within, cancel := context.WithTimeout(context.Background(), finishWithin)
		defer cancel()
		_ = s.Shutdown(within) // a request that takes longer ends unfinished when the process ends
		driver.Wait()
	}, nil
}

// dockerListener listens on the Unix socket at path. If path is empty, it returns the socket that systemd passed, or
// nil if there is none.
func (p *program) dockerListener(path string) (net.Listener, error) {
	if path == "" {
		return p.inherited()
	}
	l, err := listen("unix", path)
	if u, ok := l.(*net.UnixListener); ok {
		// Keep the socket's file when the listener is closed. Docker tries again if a socket refuses the connection,
		// but not if the file is missing.
		u.SetUnlinkOnClose(false)
	}
	return l, err
}

// inherited returns the socket that the service manager passed, or nil if there is none.
func (p *program) inherited() (net.Listener, error) {
	i := slices.Index(strings.Split(p.getenv("LISTEN_FDNAMES"), ":"), dockerSocket)
	if i < 0 || p.getenv("LISTEN_PID") != strconv.Itoa(os.Getpid()) {
		return nil, nil
	}
	f := os.NewFile(uintptr(firstInherited+i), dockerSocket)
	defer f.Close()
	return net.FileListener(f)
}

// refuseConnections closes the connections that wait in the inherited socket, because tombolod cannot run. dockerd has
// no time-out, and would hang instead of reporting an error.
func (p *program) refuseConnections() {
	l, err := p.inherited()
	unix, ok := l.(*net.UnixListener)
	if err != nil || !ok {
		return
	}
	defer l.Close()
	_ = unix.SetDeadline(time.Now().Add(100 * time.Millisecond))
	for {
		conn, err := l.Accept()
		if err != nil {
			return
		}
		_ = conn.Close()
	}
}
