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
	// firstHanded is the first descriptor that a service manager hands over: see sd_listen_fds(3).
	firstHanded = 3
	// dockerSocket is how the unit of the socket is called, and so its descriptor.
	dockerSocket = "tombolo-docker.socket"
	// finishWithin is how long requests may take that are under way when tombolod is to end.
	finishWithin = 15 * time.Second
)

// serveDocker serves Docker, where it is to be, until end is called.
func (p *program) serveDocker(ctx context.Context, o *options, cfg *docker.Config) (end func(), _ error) {
	l, err := p.dockerListener(o.docker)
	if l == nil || err != nil {
		return func() {}, err
	}
	driver := docker.New(ctx, cfg)
	// A time-out of reading the whole request would end its context while a DHCP server is waited for.
	s := &http.Server{Handler: driver, ReadHeaderTimeout: 10 * time.Second, MaxHeaderBytes: 8 << 10}
	go s.Serve(l) //nolint:errcheck // until end
	return func() {
		within, cancel := context.WithTimeout(context.Background(), finishWithin)
		defer cancel()
		_ = s.Shutdown(within) // what goes on is as if tombolod was killed
		driver.Wait()
	}, nil
}

// dockerListener gives the socket at a path, or the one that systemd has made.
func (p *program) dockerListener(path string) (net.Listener, error) {
	if path == "" {
		return p.handed()
	}
	l, err := listen("unix", path)
	if u, ok := l.(*net.UnixListener); ok {
		u.SetUnlinkOnClose(false) // Docker tries again where one is refused, and not where there is none
	}
	return l, err
}

// handed gives the socket of the service manager's; nil where there is none.
func (p *program) handed() (net.Listener, error) {
	i := slices.Index(strings.Split(p.getenv("LISTEN_FDNAMES"), ":"), dockerSocket)
	if i < 0 || p.getenv("LISTEN_PID") != strconv.Itoa(os.Getpid()) {
		return nil, nil
	}
	f := os.NewFile(uintptr(firstHanded+i), dockerSocket)
	defer f.Close()
	return net.FileListener(f)
}

// turnAway ends the connections that wait for a tombolod that cannot run, so that dockerd, which has no time-out, says so.
func (p *program) turnAway() {
	l, err := p.handed()
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
