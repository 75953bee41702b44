package main

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"golang.org/x/net/netutil"

	"github.com/tombolo-cni/tombolo/internal/file"
)

// mostConnections is the maximum number of open connections to the metrics server, so that enough file descriptors
// remain for leases and repairs.
const mostConnections = 64

// endpoint parses the flag --metrics. It returns the network and the address for net.Listen, or two empty strings for
// "none".
func endpoint(where string) (network, address string, _ error) {
	path, isUnix := strings.CutPrefix(where, "unix:")
	switch {
	case where == "none":
		return "", "", nil
	case isUnix && filepath.IsAbs(path):
		return "unix", path, nil
	case isUnix:
		return "", "", fmt.Errorf("--metrics %q: want unix: and an absolute path", where)
	}

	if _, _, err := net.SplitHostPort(where); err != nil {
		return "", "", fmt.Errorf("--metrics %q: want unix:PATH, HOST:PORT or none", where)
	}
	return "tcp", where, nil
}

// serve serves metrics and health until the caller calls end. It does nothing if where, the flag --metrics, is "none".
func serve(where string, handler http.Handler) (end func(), _ error) {
	network, address, err := endpoint(where)
	if err != nil || network == "" {
		return func() {}, err
	}

	l, err := listen(network, address)
	if err != nil {
		return func() {}, fmt.Errorf("serve metrics at %s: %w", where, err)
	}

	s := &http.Server{Handler: handler, ReadTimeout: 5 * time.Second, WriteTimeout: 10 * time.Second,
		IdleTimeout: time.Minute, MaxHeaderBytes: 8 << 10}
	go s.Serve(netutil.LimitListener(l, mostConnections)) //nolint:errcheck // Close ends Serve
	return func() { _ = s.Close() }, nil
}

// listen opens a listener. For a Unix socket, it sets the mode 0600 before it binds the socket. So only root can
// connect, and the socket's file never has another mode.
func listen(network, address string) (net.Listener, error) {
	var cfg net.ListenConfig
	if network == "unix" {
		if err := makeRoom(address); err != nil {
			return nil, err
		}
		cfg.Control = func(_, _ string, c syscall.RawConn) error {
			var chmod error
			err := c.Control(func(fd uintptr) { chmod = syscall.Fchmod(int(fd), 0o600) })
			return errors.Join(err, chmod)
		}
	}

	return cfg.Listen(context.Background(), network, address)
}

// makeRoom creates a socket's directory, and removes the socket that an earlier tombolod left. A file that is no socket
// is an error. No other tombolod with this lease directory is using the socket, since only one runs at a time.
func makeRoom(path string) error {
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		return err
	}

	if st, err := os.Lstat(path); err == nil && st.Mode().Type() != fs.ModeSocket {
		return fmt.Errorf("%s is there and no socket: %w", path, fs.ErrExist)
	}
	return file.Remove(path)
}
