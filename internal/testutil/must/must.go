// Package must ends a test whose set-up fails.
package must

import (
	"fmt"
	"testing"
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
