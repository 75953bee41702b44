package fail

import (
	"errors"
	"testing"

	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
)

func TestStepsAreJoined(t *testing.T) {
	t.Parallel()
	first, last := errors.New("first"), errors.New("last")
	ran := 0
	step := func(err error) func() error { return func() error { ran++; return err } }
	err := Join(step(first), step(nil), step(last))
	expect.That(t, ran == 3 && errors.Is(err, first) && errors.Is(err, last), "%d steps ran: %v", ran, err)
	expect.Success(t, Join(step(nil)), "steps that succeed")
}
