// Command tombolod renews the DHCP leases of pods. It repairs links, firewall rules, and NICs that the host shares with
// pods: see tombolod --help.
package main

import (
	"cmp"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/signal"
	"path/filepath"
	"runtime/debug"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/cmd/tombolod/internal/docker"
	"github.com/tombolo-cni/tombolo/internal/firewalld"
	"github.com/tombolo-cni/tombolo/internal/keeper"
	"github.com/tombolo-cni/tombolo/internal/lease"
	"github.com/tombolo-cni/tombolo/internal/state"
	"github.com/tombolo-cni/tombolo/network"
)

// These are the exit statuses of tombolod. The text usage explains them.
const (
	exitOK     = 0
	exitFailed = 1
	exitUsage  = 2
)

const usage = `Usage: tombolod [flags]

Renews the DHCP leases of pods while the pods run, and moves their host ports and guards
if a lease gets another address. Repairs within a second what another program changes of
the firewall rules, links, addresses, routes and shared NICs that pods need. Every
minute it cleans up after pods that died without a DEL, as tombolo gc does. It reads the
records that the plugin tombolo writes, so that either may start first and be restarted at
any time. It runs in the foreground and logs to standard error.
Where firewalld runs, the bridges of pods' gateways join its zone trusted, unless they are
in another zone or the permanent configuration names one.

Flags:
  --leases DIR     directory of the lease records (%s)
  --state DIR      state directory of the plugin: attachments and networks (%s)
  --docker PATH    serve Docker as a network driver at this Unix socket; without it, at the
                   one that systemd hands over (tombolo-docker.socket), or not at all
  --metrics WHERE  serve /metrics and /healthz at unix:PATH or HOST:PORT, or
                   "none" (unix:DIR/tombolod.sock, where DIR is that of --state)
  --log-level L    debug, info, warn or error (info)
  --firewalld=false
                   leave the zones of firewalld alone
  --version        print the version

Exit status:
  0  SIGTERM or SIGINT came; every lease stays as it is, for the next tombolod
  1  it could not go on: another keeper has the directory, or it lacks CAP_NET_ADMIN
  2  wrong usage
`

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), unix.SIGTERM, unix.SIGINT)
	defer stop()
	p := &program{getenv: os.Getenv, stdout: os.Stdout, stderr: os.Stderr}
	os.Exit(p.run(ctx, os.Args[1:]))
}

// program holds the environment variables and the outputs of the command.
type program struct {
	getenv         func(string) string
	stdout, stderr io.Writer
}

// options are the command's flags.
type options struct {
	leases, state, metrics, docker string
	level                          slog.Level
	firewalld, version             bool
}

func (p *program) run(ctx context.Context, args []string) int {
	o, err := parse(args)
	switch {
	case errors.Is(err, flag.ErrHelp):
		fmt.Fprintf(p.stdout, usage, lease.DefaultDir, state.DefaultDir)
		return exitOK
	case err != nil:
		fmt.Fprintf(p.stderr, "tombolod: %v\nSee tombolod --help.\n", err)
		return exitUsage
	case o.version:
		fmt.Fprintln(p.stdout, "tombolod", version())
		return exitOK
	}

	log := p.logger(o.level)
	if err := p.keep(ctx, o, log); err != nil {
		log.Error("tombolod ends", "err", err)
		p.refuseConnections()
		return exitFailed
	}

	return exitOK
}

// version returns the version that the go command recorded from git.
func version() string {
	build, _ := debug.ReadBuildInfo()
	return build.Main.Version
}

func parse(args []string) (*options, error) {
	o := &options{}
	f := flag.NewFlagSet("tombolod", flag.ContinueOnError)
	f.SetOutput(io.Discard)
	f.StringVar(&o.leases, "leases", lease.DefaultDir, "")
	f.StringVar(&o.state, "state", state.DefaultDir, "")
	f.StringVar(&o.metrics, "metrics", "", "")
	f.StringVar(&o.docker, "docker", "", "")
	f.TextVar(&o.level, "log-level", slog.LevelInfo, "")
	f.BoolVar(&o.firewalld, "firewalld", true, "")
	f.BoolVar(&o.version, "version", false, "")
	if err := f.Parse(args); err != nil {
		return nil, err
	}

	if f.NArg() > 0 {
		return nil, fmt.Errorf("argument %q: want flags only", f.Arg(0))
	}

	if !filepath.IsAbs(o.state) {
		return nil, fmt.Errorf("--state %q: want an absolute path", o.state)
	}

	if o.docker != "" && !filepath.IsAbs(o.docker) {
		return nil, fmt.Errorf("--docker %q: want an absolute path", o.docker)
	}

	o.metrics = cmp.Or(o.metrics, "unix:"+filepath.Join(o.state, "tombolod.sock"))
	if _, _, err := endpoint(o.metrics); err != nil {
		return nil, err
	}

	return o, nil
}

// logger returns a logger that writes text lines to stderr. The lines have no time if they go to systemd's journal,
// which adds its own.
func (p *program) logger(level slog.Level) *slog.Logger {
	journal := p.getenv("JOURNAL_STREAM") != ""
	return slog.New(slog.NewTextHandler(p.stderr, &slog.HandlerOptions{
		Level: level,
		ReplaceAttr: func(groups []string, a slog.Attr) slog.Attr {
			if journal && len(groups) == 0 && a.Key == slog.TimeKey {
				return slog.Attr{}
			}
			return a
		},
	}))
}

// refuseUnprivileged returns an error if the process lacks CAP_NET_ADMIN, which the keeper needs.
func refuseUnprivileged() error {
	header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var data [2]unix.CapUserData
	if err := unix.Capget(&header, &data[0]); err != nil {
		return fmt.Errorf("read the capabilities: %w", err)
	}
	if data[0].Effective&(1<<unix.CAP_NET_ADMIN) == 0 {
		return fmt.Errorf("user %d lacks CAP_NET_ADMIN: run it as root, with sudo for example", os.Geteuid())
	}
	return nil
}

// keep runs the keeper until ctx is done, with the servers for metrics and Docker.
func (p *program) keep(ctx context.Context, o *options, log *slog.Logger) error {
	if err := refuseUnprivileged(); err != nil {
		return err
	}

	dir, err := lease.Open(o.leases)
	if err != nil {
		return err
	}

	plugins, err := state.Open(o.state)
	if err != nil {
		return err
	}

	node, err := network.Open(ctx, &network.Config{StateDir: o.state, LeaseDir: o.leases})
	if err != nil {
		return err
	}

	systemd, err := newNotifier(p.getenv)
	if err != nil {
		log.Warn("cannot tell the service manager how it goes", "err", err)
	}
	defer systemd.close()
	endMetrics, endDocker := func() {}, func() {}
	defer func() {
		endMetrics()
		endDocker()
	}()
	bus := ""
	if o.firewalld {
		bus = cmp.Or(p.getenv("DBUS_SYSTEM_BUS_ADDRESS"), firewalld.SystemBus)
	}

	var k *keeper.Keeper
	k, err = keeper.New(&keeper.Config{
		Leases: dir,
		State:  plugins,
		Node:   node,
		Bus:    bus,
		Log:    log,
		// The keeper calls Ready once it is the only keeper of the lease directory. So no other tombolod of this
		// directory uses the sockets for metrics and for Docker.
		Ready: func() {
			if endMetrics, err = serve(o.metrics, k.Handler()); err != nil {
				// Continue without metrics, since leases matter more.
				log.Error("no metrics", "err", err)
			}

			if endDocker, err = p.serveDocker(ctx, o,
				&docker.Config{StateDir: plugins.Path(), LeaseDir: dir.Path(), Node: node, Log: log}); err != nil {
				log.Error("no networks of Docker", "err", err)
			}

			log.Info("keeping leases", "dir", dir.Path(), "state", plugins.Path(), "metrics", o.metrics)
			systemd.tell("READY=1")
		},
		Alive: func() { systemd.tell("WATCHDOG=1") },
	})
	if err != nil {
		return err
	}

	notified := make(chan struct{})
	context.AfterFunc(ctx, func() {
		systemd.tell("STOPPING=1")
		close(notified)
	})
	err = k.Run(ctx)
	if ctx.Err() != nil {
		<-notified // Run may return before systemd gets the message
	}

	return err
}
