// Package must ends a test whose set-up fails.
package must

import "testing"

// Succeed ends the test if err is not nil.
func Succeed(tb testing.TB, err error) {
	tb.Helper()
	if err != nil {
		tb.Fatal(err)
	}
}
