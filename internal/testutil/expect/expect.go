// Package expect fails a test, which goes on, where something is not as it should be. Each of its functions
// but That takes what was done at the end, as fmt.Sprintf does; it may be left out.
package expect

import (
	"errors"
	"fmt"
	"reflect"
	"strings"
	"testing"
)

// That fails the test with the message, as fmt.Sprintf makes it, unless ok.
func That(tb testing.TB, ok bool, format string, args ...any) {
	if !ok {
		tb.Helper()
		tb.Errorf(format, args...)
	}
}

// Success fails the test if err is not nil.
func Success(tb testing.TB, err error, done ...any) {
	if err != nil {
		tb.Helper()
		tb.Errorf("%s%v", after(done), err)
	}
}

// Failure fails the test if err is nil.
func Failure(tb testing.TB, err error, done ...any) {
	if err == nil {
		tb.Helper()
		tb.Errorf("%swant an error", after(done))
	}
}

// Says fails the test unless err is an error with part in its text.
func Says(tb testing.TB, err error, part string, done ...any) {
	if err == nil || !strings.Contains(err.Error(), part) {
		tb.Helper()
		tb.Errorf("%serror is %v, want one that says %q", after(done), err, part)
	}
}

// Contains fails the test unless text contains part.
func Contains(tb testing.TB, text, part string, done ...any) {
	if !strings.Contains(text, part) {
		tb.Helper()
		tb.Errorf("%swant %q in:\n%s", after(done), part, text)
	}
}

// Is fails the test unless err is want, as errors.Is has it.
func Is(tb testing.TB, err, want error, done ...any) {
	if !errors.Is(err, want) {
		tb.Helper()
		tb.Errorf("%serror is %v, want %v", after(done), err, want)
	}
}

// Err is the error of a call that returns something else too.
func Err[T any](_ T, err error) error { return err }

// Of is what a call gave, and its error.
func Of[T any](got T, err error) Given[T] { return Given[T]{got, err} }

// Given has the expectations of a call's result.
type Given[T any] struct {
	got T
	err error
}

// Is fails the test unless the call succeeded and gave want.
func (g Given[T]) Is(tb testing.TB, want T, done ...any) {
	if g.err != nil || !reflect.DeepEqual(g.got, want) {
		tb.Helper()
		tb.Errorf("%sgot %+v, %v; want %+v", after(done), g.got, g.err, want)
	}
}

// Len fails the test unless the call succeeded and gave so many.
func (g Given[T]) Len(tb testing.TB, want int, done ...any) {
	if g.err != nil || reflect.ValueOf(g.got).Len() != want {
		tb.Helper()
		tb.Errorf("%sgot %+v, %v; want %d of them", after(done), g.got, g.err, want)
	}
}

// Equal fails the test unless got is want.
func Equal[T comparable](tb testing.TB, got, want T, done ...any) {
	if got != want {
		tb.Helper()
		tb.Errorf("%sgot:\n%+v\nwant:\n%+v", after(done), got, want)
	}
}

// NoDiff fails the test if there is a difference, which cmp.Diff(want, got) found.
func NoDiff(tb testing.TB, diff string, done ...any) {
	if diff != "" {
		tb.Helper()
		tb.Errorf("%s(-want +got):\n%s", after(done), diff)
	}
}

func after(done []any) string {
	if len(done) == 0 {
		return ""
	}
	return fmt.Sprintf(done[0].(string), done[1:]...) + ": "
}
