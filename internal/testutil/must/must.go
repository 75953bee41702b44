// Package must ends a test whose set-up fails.
package must

import (
	"fmt"
	"testing"
	"time"
)

// Succeed ends the test if err is not nil. What was done may stand behind it, as for fmt.Sprintf.
func Succeed(tb testing.TB, err error, done ...any) {
	if err == nil {
		return
	}
	tb.Helper()
	if len(done) == 0 {
		tb.Fatal(err)
	}
	tb.Fatalf("%s: %v", fmt.Sprintf(done[0].(string), done[1:]...), err)
}

// That ends the test with the message, as fmt.Sprintf makes it, unless ok.
func That(tb testing.TB, ok bool, format string, args ...any) {
	if !ok {
		tb.Helper()
		tb.Fatalf(format, args...)
	}
}

// Of is what a call gave, and its error.
func Of[T any](got T, err error) Given[T] { return Given[T]{got, err} }

// Given is the result of a call that has to succeed.
type Given[T any] struct {
	got T
	err error
}

// Get gives the result, and ends the test if there was an error.
func (g Given[T]) Get(tb testing.TB, done ...any) T {
	tb.Helper()
	Succeed(tb, g.err, done...)
	return g.got
}

// Until waits until ok, which another process or the kernel brings about in its own time, and ends the test
// if that takes longer than any machine needs, however busy.
func Until(tb testing.TB, what string, ok func() bool) {
	tb.Helper()
	const patience = 5 * time.Minute
	for end := time.Now().Add(patience); !ok(); time.Sleep(5 * time.Millisecond) {
		That(tb, !time.Now().After(end), "it did not come in %s: %s", patience, what)
	}
}
