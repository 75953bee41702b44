package nstest

import "testing"

// RunParallel runs a subtest in parallel with its siblings.
func RunParallel(t *testing.T, name string, test func(t *testing.T)) bool {
	t.Helper()
	return t.Run(name, func(t *testing.T) {
		t.Parallel()
		test(t)
	})
}
