package delegate

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
)

// Forward runs the program in a file in place of the calling one, with the caller's environment and
// stdin, and gives what it printed; errors are Exec's. No such file is ErrNotFound, and one that leads
// back to the program at self is ErrSelf. A program that is too old to know the verb counts as done.
func Forward(ctx context.Context, file, self string, environ []string, stdin []byte, stderr io.Writer) ([]byte, error) {
	same, err := IsSame(self, file)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil, fmt.Errorf("run %s: %w", file, ErrNotFound)
	case err != nil:
		return nil, fmt.Errorf("compare %s with the program that would run it: %w", file, err)
	case same:
		return nil, fmt.Errorf("run %s: %w", file, ErrSelf)
	}
	said, err := run(ctx, file, Deeper(environ), stdin, stderr)
	return said, tolerateUnknownVerb(err)
}
