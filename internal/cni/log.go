package cni

import (
	"cmp"
	"log/slog"
	"os"
	"path/filepath"
	"time"

	"github.com/containernetworking/cni/pkg/types"
	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/file"
	"github.com/tombolo-cni/tombolo/internal/printable"
)

// stepLog writes one line for each verb, with the time of each step. It writes only to a file named in the
// configuration, since a plugin's stderr belongs to the runtime.
type stepLog struct {
	file *os.File // nil if there is none
	*slog.Logger
	start time.Time
	last  time.Time
	steps []slog.Attr
}

// openLog opens the configuration's log file. DEL and GC continue without it, since an error in the configuration
// must not make them fail.
func (c *call) openLog() (*stepLog, error) {
	conf := c.conf

	// A relative path has been refused, except for DEL and GC.
	if !filepath.IsAbs(conf.LogFile) {
		return noLog(), nil
	}

	level, _ := parseLevel(conf.LogLevel)

	// With O_APPEND and one write per line, concurrent plugins do not overwrite each other's lines. A symbolic link
	// is not followed, since a user that could create it would redirect our output.
	fd, err := file.Open(conf.LogFile, unix.O_CREAT|unix.O_APPEND|unix.O_WRONLY)
	switch {
	case err == nil:
	case c.verb == "DEL" || c.verb == "GC":
		return noLog(), nil
	default:
		return noLog(), newError(codeIO, "logFile: %v", err)
	}

	f := os.NewFile(uintptr(fd), conf.LogFile)
	logger := slog.New(slog.NewJSONHandler(f, &slog.HandlerOptions{Level: level})).With(
		"verb", c.verb, "network", conf.Name)
	if c.containerID != "" {
		logger = logger.With("containerID", c.containerID, "ifName", c.ifName, "netns", c.netns)
	}

	now := time.Now()
	return &stepLog{file: f, Logger: logger, start: now, last: now}, nil
}

func noLog() *stepLog { return &stepLog{Logger: slog.New(slog.DiscardHandler)} }

func parseLevel(s string) (level slog.Level, err error) {
	err = level.UnmarshalText([]byte(cmp.Or(s, "info")))
	return level, err
}

// step records the end of a step.
func (l *stepLog) step(name string) {
	now := time.Now()
	took := now.Sub(l.last)
	l.last = now
	for i, s := range l.steps {
		// GC repeats the steps of a DEL for each attachment.
		if s.Key == name {
			l.steps[i] = slog.Duration(name, s.Value.Duration()+took)
			return
		}
	}

	l.steps = append(l.steps, slog.Duration(name, took))
}

// warn writes a line about a problem that was worked around.
func (l *stepLog) warn(msg string) {
	l.Warn(printable.Line(msg))
}

// done writes the line of the verb.
func (l *stepLog) done(failure *types.Error) {
	attrs := []any{slog.Duration("total", time.Since(l.start)), slog.GroupAttrs("steps", l.steps...)}
	if failure != nil {
		l.Error(failure.Msg, append(attrs, slog.Uint64("code", uint64(failure.Code)))...)
	} else {
		l.Info("done", attrs...)
	}
	l.file.Close() // does nothing without a file
}
