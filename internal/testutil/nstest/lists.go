package nstest

import (
	"errors"
	"net/netip"
	"sync"
	"testing"
)

// AtOnce calls do for each of several, all at the same time, and gives their errors.
func AtOnce[T any](list []T, do func(i int, each T) error) []error {
	errs := make([]error, len(list))
	var start, end sync.WaitGroup
	start.Add(1)
	for i, each := range list {
		end.Go(func() {
			start.Wait()
			errs[i] = do(i, each)
		})
	}
	start.Done()
	end.Wait()
	return errs
}

// Addrs reads addresses.
func Addrs(list ...string) []netip.Addr {
	var out []netip.Addr
	for _, s := range list {
		out = append(out, Addr(s))
	}
	return out
}

// Prefixes reads prefixes.
func Prefixes(list ...string) []netip.Prefix {
	var out []netip.Prefix
	for _, s := range list {
		out = append(out, Prefix(s))
	}
	return out
}

// NoErrors fails the test if one of several goroutines had an error.
func NoErrors(tb testing.TB, what string, errs []error) {
	tb.Helper()
	if err := errors.Join(errs...); err != nil {
		tb.Fatalf("%s: %v", what, err)
	}
}
