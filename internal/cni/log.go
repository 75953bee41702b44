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

// stepLog writes one line about the call, with the duration of each step, and lines with warnings. It writes only to
// the file that the configuration names, since a plugin's stderr belongs to the runtime.
type stepLog struct {
	file *os.File // nil if there is no log file
	*slog.Logger
	start time.Time
	last  time.Time
	steps []slog.Attr
}

// openLog opens the configuration's log file. Without a file, it returns a log that discards everything. If the file
// cannot be opened, it returns an error, except for DEL and GC. They continue without a log, since a wrong
// configuration must not make them fail.
func (c *call) openLog() (*stepLog, error) {
	conf := c.conf

	// An empty path means no log. So does a relative path, which the method refuse rejects for verbs other than DEL and
	// GC.
	if !filepath.IsAbs(conf.LogFile) {
		return noLog(), nil
	}

	level, _ := parseLevel(conf.LogLevel)

	// With O_APPEND and one write for each line, plugins that run at the same time do not overwrite each other's lines.
	// Do not follow a symbolic link: a user who could create it would redirect our output.
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

// step adds the time since the end of the previous step to the duration of the step called name.
func (l *stepLog) step(name string) {
	now := time.Now()
	took := now.Sub(l.last)
	l.last = now
	for i, s := range l.steps {
		// GC repeats the steps of a DEL for each attachment, so add up their durations.
		if s.Key == name {
			l.steps[i] = slog.Duration(name, s.Value.Duration()+took)
			return
		}
	}

	l.steps = append(l.steps, slog.Duration(name, took))
}

// warn writes a line about a problem that does not stop the call.
func (l *stepLog) warn(msg string) {
	l.Warn(printable.Line(msg))
}

// close writes the line about the call, as an error if failure is not nil. Then it closes the file.
func (l *stepLog) close(failure *types.Error) {
	attrs := []any{slog.Duration("total", time.Since(l.start)), slog.GroupAttrs("steps", l.steps...)}
	if failure != nil {
		l.Error(failure.Msg, append(attrs, slog.Uint64("code", uint64(failure.Code)))...)
	} else {
		l.Info("done", attrs...)
	}
	l.file.Close() // Close does nothing if file is nil
}
